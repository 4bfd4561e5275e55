"""The one place that wires the gateway's HTTP side: keys, limits, renderers, routes."""

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from forebay_shared.errors import MethodNotAllowedError
from forebay_shared.models import ModelCard
from forebay_shared.settings import GatewaySettings
from litestar import Litestar, Request, Response
from litestar.datastructures import State
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, Receive, Scope, Send

from forebay_gateway.admission import Admission
from forebay_gateway.api.admin.routes import admin_routes
from forebay_gateway.api.anthropic.routes import messages_apps
from forebay_gateway.api.anthropic.service import MessagesService
from forebay_gateway.api.calls import post_routes
from forebay_gateway.api.dialects import written
from forebay_gateway.api.edge import Edge
from forebay_gateway.api.errors import ClientGoneError, foreseen
from forebay_gateway.api.health import health_routes
from forebay_gateway.api.models import model_routes
from forebay_gateway.api.openai.embeddings import EmbeddingService
from forebay_gateway.api.openai.routes import embedding_apps, generation_apps
from forebay_gateway.api.openai.scoring import ScoringService
from forebay_gateway.api.openai.service import OpenAIService
from forebay_gateway.api.openai.turns import Turns
from forebay_gateway.api.openapi.document import document_routes
from forebay_gateway.api.ports import Services
from forebay_gateway.api.request_ids import request_id
from forebay_gateway.api.responses.routes import response_apps, response_routes
from forebay_gateway.api.responses.service import ResponsesService
from forebay_gateway.api.tokens import TokensService, tokens_apps
from forebay_gateway.auth import Keyring
from forebay_gateway.interpret import Interpreter
from forebay_gateway.renderers import Renderers
from forebay_gateway.teams.aliases import configured
from forebay_gateway.teams.catalog import Catalog
from forebay_gateway.teams.directory import Directory

if TYPE_CHECKING:
    from forebay_shared.tracing.spans import Tracing


def create_app(
    settings: GatewaySettings,
    backend: Services,
    draining: Callable[[], bool] = lambda: False,
    *,
    tracing: "Tracing | None" = None,
) -> Edge:
    """The ASGI app of one gateway process. `draining` says that the process was asked to end."""
    turns = _turns(settings, backend)
    responses = ResponsesService(turns, settings)
    admission = Admission(settings.max_concurrent_requests)
    posts = _posts(turns, responses, settings.max_body_bytes)
    routes = Litestar(
        route_handlers=[
            *post_routes(posts),
            *model_routes(turns.catalog),
            *response_routes(responses),
            *document_routes(),
            *health_routes(backend, draining, _warming(turns), lambda: admission.open),
            *_team_routes(backend, settings.max_body_bytes),
        ],
        exception_handlers={Exception: _answer_error},
        openapi_config=None,
        logging_config=None,
        request_max_body_size=None,
    )
    return Edge(
        _direct(posts, routes),
        keyring=Keyring(
            settings.api_key,
            admin_key=settings.admin_key,
            teams=backend.teams,
            protect_metrics=settings.protect_metrics,
        ),
        admission=admission,
        telemetry=backend.telemetry,
        allowed_origins=settings.allowed_origins,
        trusted_proxies=settings.trusted_proxy,
        tracing=tracing,
        draining=draining,
    )


def _turns(settings: GatewaySettings, backend: Services) -> Turns:
    """What every dialect comes through. It learns each model that a worker brings."""
    renderers, catalog = Renderers(backend.store.blob), _catalog(settings, backend)

    def learn(card: ModelCard) -> None:
        catalog.meet(card)
        backend.tasks.start("tokenizer", renderers.prepare(card))

    backend.roster.on_card(learn)
    return Turns(
        backend,
        renderers,
        catalog,
        Interpreter(settings.tool_call_parser, settings.reasoning_parser),
        trusts_templates=settings.trust_request_chat_template,
        signs_are_events=settings.stream_keep_alive == "event",
    )


def _catalog(settings: GatewaySettings, backend: Services) -> Catalog:
    teams = backend.teams
    directory = teams.directory if teams is not None else Directory(configured(settings.alias))
    return Catalog(backend.roster, directory, backend.telemetry.jobs.fell_back)


def _posts(turns: Turns, responses: ResponsesService, max_body_bytes: int) -> dict[str, ASGIApp]:
    """The apps of the calls that models answer, by path."""
    models = (turns.backend, turns.renderers, turns.catalog)
    return {
        **generation_apps(OpenAIService(turns), max_body_bytes),
        **embedding_apps(EmbeddingService(*models), ScoringService(*models), max_body_bytes),
        **messages_apps(MessagesService(turns), max_body_bytes),
        **tokens_apps(TokensService(turns), max_body_bytes),
        **response_apps(responses, max_body_bytes),
    }


def _warming(turns: Turns) -> Callable[[], Awaitable[None]]:
    """Loads the tokenizers of all models that are known; of an adapter it is its model's."""

    async def warm() -> None:
        cards = turns.backend.roster.cards()
        await turns.renderers.warm([card for card in cards if card.adapter is None])

    return warm


def _direct(posts: Mapping[str, ASGIApp], routes: ASGIApp) -> ASGIApp:
    """The calls that everybody makes go past the router, which takes 9 % of a request's time."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        posted = scope["type"] == "http" and scope["method"] == "POST"
        direct = posts.get(scope["path"]) if posted else None
        await (direct or routes)(scope, receive, send)

    return app


def _team_routes(backend: Services, max_body_bytes: int) -> list[HTTPRouteHandler]:
    teams = backend.teams
    return admin_routes(teams.admin, teams.reports, max_body_bytes) if teams is not None else []


def _answer_error(request: Request[object, object, State], error: Exception) -> Response[bytes]:
    if isinstance(error, ClientGoneError):
        return Response(b"", status_code=499)  # nobody reads it
    ours, headers = foreseen(error)
    if isinstance(ours, MethodNotAllowedError):
        headers.append((b"allow", _allowed_methods(request).encode()))
    scope = request.scope
    status, body = written(ours, scope["path"], scope["headers"], request_id(scope))
    return Response(
        body,
        status_code=status,
        headers={name.decode(): value.decode("latin-1") for name, value in headers},
    )


def _allowed_methods(request: Request[object, object, State]) -> str:
    path = request.scope["path"].rstrip("/")
    for route in request.app.routes:
        fixed, variable, _ = route.path.partition("{")
        if path == route.path or (variable and path.startswith(fixed)):
            methods = route.methods | ({"HEAD"} if "GET" in route.methods else set[str]())
            return ", ".join(sorted(methods))
    return ""
