"""The routes of the admin API under /admin/v1, and /v1/usage: read, one call, answer.

Who may do what is said in `teams.guards`; every call there asks them. It knows no Redis.
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal, NamedTuple

import msgspec
from forebay_shared.errors import BusError, InvalidRequestError, NotFoundError
from forebay_shared.link import LINK_ERRORS
from litestar import route
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, Receive, Scope, Send

from forebay_gateway.api.admin.openapi import describe
from forebay_gateway.api.body import read_json_body
from forebay_gateway.api.edge import caller, raw_headers
from forebay_gateway.api.errors import Headers
from forebay_gateway.api.query import query
from forebay_gateway.api.respond import Answer
from forebay_gateway.teams.admin import Admin
from forebay_gateway.teams.conditions import Conditions, conditions
from forebay_gateway.teams.guards import Actor, actor_of
from forebay_gateway.teams.records import PLURALS, Kind
from forebay_gateway.teams.reports import Reports

DEFAULT_PAGE = 100
_CONDITIONAL = (b"if-match", b"if-none-match")
_NO_STORE = (b"cache-control", b"no-store")


class Call(NamedTuple):
    """One call: who makes it, the path's id, the query, what the record must be like and the body,
    decoded."""

    actor: Actor
    id: str
    query: Mapping[str, str]
    given: Conditions
    body: object

    @property
    def limit(self) -> int:
        return self.number("limit", DEFAULT_PAGE)

    def number(self, name: str, default: int) -> int:
        text = self.query.get(name, "")
        if not text:
            return default
        if not re.fullmatch(r"\d{1,6}", text):
            raise InvalidRequestError(f"{name} must be a whole number.", param=name)
        return int(text)

    def flag(self, name: str) -> bool:
        return self.query.get(name, "").lower() in ("1", "true", "yes")


class Route(NamedTuple):
    """A row of the table below. `id` at the end of a path takes the rest of it."""

    method: Literal["GET", "PUT", "POST", "DELETE"]
    path: str
    summary: str
    answer: Callable[[Call], Awaitable[Answer]]


def admin_routes(admin: Admin, reports: Reports, max_body_bytes: int) -> list[HTTPRouteHandler]:
    """All of them as Litestar's handlers."""
    table = route_table(admin, reports)
    described = msgspec.json.encode(describe(table))

    async def describes(call: Call) -> Answer:
        return Answer(described)

    table.append(Route("GET", "/admin/v1/openapi.json", "This description", describes))
    return [_handler(row, max_body_bytes) for row in table]


def route_table(admin: Admin, reports: Reports) -> list[Route]:
    rows: list[Route] = []
    for kind, plural in PLURALS.items():
        rows += _kind_routes(admin, kind, f"/admin/v1/{plural}")

    async def whoami(call: Call) -> Answer:
        return _json(call.actor._asdict())

    async def make_key(call: Call) -> Answer:
        return _json(await admin.make_key(call.actor, call.body), status=201)

    async def rotate(call: Call) -> Answer:
        grace_s = msgspec.convert(call.body, _Rotation).grace_s
        return _json(await admin.rotate_key(call.actor, call.id, grace_s, call.given))

    async def apply(call: Call) -> Answer:
        dry_run, prune = call.flag("dry_run"), call.flag("prune")
        return _json(await admin.apply(call.actor, call.body, dry_run=dry_run, prune=prune))

    async def export(call: Call) -> Answer:
        return _json(await admin.export(call.actor))

    async def usage(call: Call) -> Answer:
        return _json(await reports.usage(call.actor, call.query))

    async def own_usage(call: Call) -> Answer:
        return _json(await reports.own_usage(call.actor, call.query))

    async def records(call: Call) -> Answer:
        after = call.query.get("after", "")
        return _json(await reports.records(call.actor, after, call.limit))

    async def audit(call: Call) -> Answer:
        return _json(await reports.audit(call.actor, call.query.get("after", ""), call.limit))

    return [
        *rows,
        Route("POST", "/admin/v1/keys", "Make a key; its token is shown once", make_key),
        Route("POST", "/admin/v1/rotate/{id}", "Give a key a new secret", rotate),
        Route("POST", "/admin/v1/apply", "Make the directory what a document says", apply),
        Route("GET", "/admin/v1/export", "The document of the whole directory", export),
        Route("GET", "/admin/v1/usage", "Usage and cost, summed", usage),
        Route("GET", "/admin/v1/records", "Usage records, one per request", records),
        Route("GET", "/admin/v1/audit", "Who changed what", audit),
        Route("GET", "/admin/v1/whoami", "The caller's role", whoami),
        Route("GET", "/v1/usage", "The usage of the key's own team", own_usage),
    ]


class _Rotation(msgspec.Struct):
    grace_s: float = 86_400.0


def _kind_routes(admin: Admin, kind: Kind, path: str) -> list[Route]:
    async def listed(call: Call) -> Answer:
        after, team = call.query.get("after", ""), call.query.get("team", "")
        return _json(admin.list(call.actor, kind, after, call.limit, team))

    async def got(call: Call) -> Answer:
        tree, revision = admin.get(call.actor, kind, call.id)
        call.given.must_match(revision)
        if call.given.is_unchanged(revision):
            return Answer(b"", [_etag(revision), _NO_STORE], status=304)
        return _json(tree, revision)

    async def put(call: Call) -> Answer:
        tree, revision = await admin.put(call.actor, kind, call.id, call.body, call.given)
        return _json(tree, revision)

    async def deleted(call: Call) -> Answer:
        await admin.delete(call.actor, kind, call.id, call.given)
        return _json({"deleted": call.id})

    return [
        Route("GET", path, f"List: {kind}", listed),
        Route("GET", path + "/{id}", f"One: {kind}", got),
        Route("PUT", path + "/{id}", f"Write: {kind}", put),
        Route("DELETE", path + "/{id}", f"Delete: {kind}", deleted),
    ]


def _handler(row: Route, max_body_bytes: int) -> HTTPRouteHandler:
    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        actor = actor_of(caller(scope))
        headers = raw_headers(scope)
        body: object = None
        if row.method in ("POST", "PUT"):
            body = _decoded(await read_json_body(headers, receive, max_body_bytes))
        name = str(scope["path_params"].get("id", "")).removeprefix("/")
        if "{id}" in row.path and not name:
            raise NotFoundError("There is nothing at this path.")
        try:
            answer = await row.answer(Call(actor, name, query(scope), _conditions(scope), body))
        except msgspec.ValidationError as error:
            raise InvalidRequestError(f"The body is not valid: {error}.") from None
        except LINK_ERRORS:
            raise BusError("Redis is not available. Please retry.", retry_after_s=1.0) from None
        await answer(scope, receive, send)

    async def handler() -> ASGIApp:
        return run

    path = row.path.replace("{id}", "{id:path}")
    return route(path, http_method=row.method, status_code=200)(handler)


def _conditions(scope: Scope) -> Conditions:
    """A header that is sent twice is one list."""
    sent = {
        name: b",".join(value for each, value in scope["headers"] if each == name).decode("latin-1")
        for name in _CONDITIONAL
        if any(each == name for each, _ in scope["headers"])
    }
    return conditions(*(sent.get(name) for name in _CONDITIONAL))


def _decoded(body: bytes | bytearray) -> object:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        raise InvalidRequestError("The body is not valid JSON.") from None


def _json(tree: object, revision: int = 0, status: int = 200) -> Answer:
    headers: Headers = [(b"content-type", b"application/json"), _NO_STORE]
    if revision:
        headers.append(_etag(revision))
    return Answer(msgspec.json.encode(tree), headers, status)


def _etag(revision: int) -> tuple[bytes, bytes]:
    return b"etag", b'"%d"' % revision
