"""The routes of /v1/responses: read, one call, answer."""

import msgspec
from forebay_shared.errors import InvalidRequestError
from litestar import delete, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from litestar.types import ASGIApp, Scope

from forebay_gateway.api.calls import posted
from forebay_gateway.api.edge import caller
from forebay_gateway.api.query import flag, number, query
from forebay_gateway.api.respond import Answer
from forebay_gateway.api.responses.composer import encode
from forebay_gateway.api.responses.follow import FollowedEvents
from forebay_gateway.api.responses.pages import page
from forebay_gateway.api.responses.service import ResponsesService


class Deleted(msgspec.Struct):
    id: str
    object: str = "response"
    deleted: bool = True


class _Kept(msgspec.Struct):
    """What a stored response must be for its events to be kept."""

    background: bool


def response_apps(service: ResponsesService, max_body_bytes: int) -> dict[str, ASGIApp]:
    """What answers a POST, by path."""
    return {
        "/v1/responses": posted(service.create, max_body_bytes),
        "/v1/responses/input_tokens": posted(service.count, max_body_bytes),
    }


def response_routes(service: ResponsesService) -> list[HTTPRouteHandler]:
    store = service.store

    @get("/v1/responses/{response_id:str}")
    async def retrieve(response_id: FromPath[str], scope: Scope) -> ASGIApp:
        asked = query(scope)
        stored = await store.read(caller(scope).team, response_id)
        if not flag(asked, "stream"):
            return Answer(stored.response)
        await service.check_streams(caller(scope).team, response_id)
        after = number(asked, "starting_after", 0, 10**9)
        first = 0 if after is None else after + 1
        return FollowedEvents(store, service.runs, caller(scope).team, response_id, first)

    @delete("/v1/responses/{response_id:str}", status_code=200)
    async def remove(response_id: FromPath[str], scope: Scope) -> ASGIApp:
        await store.delete(caller(scope).team, response_id)
        return Answer(encode(Deleted(response_id)))

    @post("/v1/responses/{response_id:str}/cancel", status_code=200)
    async def cancel(response_id: FromPath[str], scope: Scope) -> ASGIApp:
        stored = await store.cancel(caller(scope).team, response_id)
        if not msgspec.json.decode(stored.response, type=_Kept).background:
            raise InvalidRequestError(
                "Only a response that was created with background: true can be cancelled."
            )
        return Answer(stored.response)

    @get("/v1/responses/{response_id:str}/input_items")
    async def input_items(response_id: FromPath[str], scope: Scope) -> ASGIApp:
        asked = query(scope)
        order = asked.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequestError("order must be asc or desc.", param="order")
        limit = number(asked, "limit", 1, 100)
        stored = await store.read(caller(scope).team, response_id)
        return Answer(
            page(
                stored.input,
                order,
                20 if limit is None else limit,
                asked.get("after"),
            )
        )

    return [retrieve, remove, cancel, input_items]
