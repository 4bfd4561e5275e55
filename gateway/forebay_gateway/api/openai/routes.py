"""The routes of the OpenAI dialect: read, one call, answer."""

from collections.abc import Awaitable, Callable, Mapping

import msgspec
from forebay_shared.models import ModelCard
from litestar import get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from litestar.types import ASGIApp, Receive, Scope, Send

from forebay_gateway.api.body import read_json_body
from forebay_gateway.api.edge import caller, raw_headers
from forebay_gateway.api.openai.service import OpenAIService
from forebay_gateway.api.openai.turns import find_model
from forebay_gateway.api.ports import Models
from forebay_gateway.api.respond import Answer
from forebay_gateway.teams.caller import Caller


class ModelEntry(msgspec.Struct, frozen=True):
    """A model as /v1/models lists it. `created` is in seconds."""

    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "forebay"


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelEntry]
    object: str = "list"


def generation_apps(service: OpenAIService, max_body_bytes: int) -> dict[str, ASGIApp]:
    """What answers a POST, by path."""

    def app(call: Callable[[bytes | bytearray, Caller], Awaitable[ASGIApp]]) -> ASGIApp:
        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            body = await read_json_body(raw_headers(scope), receive, max_body_bytes)
            answer = await call(body, caller(scope))
            await answer(scope, receive, send)

        return run

    return {
        "/v1/chat/completions": app(service.chat),
        "/v1/completions": app(service.complete),
    }


def generation_routes(apps: Mapping[str, ASGIApp]) -> list[HTTPRouteHandler]:
    """The same as routes, which know other methods and other spellings of the paths."""

    def route(path: str, app: ASGIApp) -> HTTPRouteHandler:
        async def answer() -> ASGIApp:
            return app

        return post(path, status_code=200)(answer)

    return [route(path, app) for path, app in apps.items()]


def model_routes(roster: Models) -> list[HTTPRouteHandler]:
    @get("/v1/models")
    async def models(scope: Scope) -> ASGIApp:
        sees = caller(scope).sees
        entries = [
            _entry(card, name) for card in roster.cards() for name in card.names if sees(name)
        ]
        return Answer(msgspec.json.encode(ModelList(entries)))

    @get("/v1/models/{name:path}")
    async def model(name: FromPath[str], scope: Scope) -> ASGIApp:
        # Litestar gives a path parameter its leading slash; a model's name may hold slashes itself.
        name = name.removeprefix("/")
        return Answer(msgspec.json.encode(_entry(find_model(roster, name, caller(scope)), name)))

    return [models, model]


def _entry(card: ModelCard, name: str) -> ModelEntry:
    return ModelEntry(id=name, created=card.created, max_model_len=card.max_model_len)
