"""The routes of the OpenAI dialect: read, one call, answer."""

import msgspec
from forebay_shared.models import ModelCard
from litestar import Request, get, post
from litestar.datastructures import State
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from litestar.types import ASGIApp

from forebay_gateway.api.body import read_json_body
from forebay_gateway.api.edge import caller, raw_headers
from forebay_gateway.api.openai.service import OpenAIService, find_model
from forebay_gateway.api.ports import Models
from forebay_gateway.api.respond import Answer

HTTPRequest = Request[object, object, State]


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


def generation_routes(service: OpenAIService, max_body_bytes: int) -> list[HTTPRouteHandler]:
    @post("/v1/chat/completions", status_code=200)
    async def chat_completions(request: HTTPRequest) -> ASGIApp:
        headers = raw_headers(request.scope)
        body = await read_json_body(headers, request.receive, max_body_bytes)
        return await service.chat(body, caller(request.scope))

    @post("/v1/completions", status_code=200)
    async def completions(request: HTTPRequest) -> ASGIApp:
        headers = raw_headers(request.scope)
        body = await read_json_body(headers, request.receive, max_body_bytes)
        return await service.complete(body, caller(request.scope))

    return [chat_completions, completions]


def model_routes(roster: Models) -> list[HTTPRouteHandler]:
    @get("/v1/models")
    async def models() -> ASGIApp:
        entries = [_entry(card, name) for card in roster.cards() for name in card.names]
        return Answer(msgspec.json.encode(ModelList(entries)))

    @get("/v1/models/{name:path}")
    async def model(name: FromPath[str]) -> ASGIApp:
        # Litestar gives a path parameter its leading slash; a model's name may hold slashes itself.
        name = name.removeprefix("/")
        return Answer(msgspec.json.encode(_entry(find_model(roster, name), name)))

    return [models, model]


def _entry(card: ModelCard, name: str) -> ModelEntry:
    return ModelEntry(id=name, created=card.created, max_model_len=card.max_model_len)
