"""The outermost layer of the gateway: what holds for every request, whatever its path.

In order: a request id, CORS and preflight, the key, a place among the open requests; then the
routes. It answers itself when one of these fails, and counts every answer. It knows no dialect.
"""

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from forebay_shared.errors import AuthenticationError, OverloadedError, PermissionDeniedError
from forebay_shared.telemetry import GatewayMetrics
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send

from forebay_gateway.admission import Admission
from forebay_gateway.api.dialects import speaks_anthropic
from forebay_gateway.api.errors import ClientGoneError, Headers
from forebay_gateway.api.request_ids import take_request_id
from forebay_gateway.api.respond import Answer, error_answer
from forebay_gateway.auth import METRICS_PATH, OPEN_PATHS, Keyring
from forebay_gateway.teams.caller import Caller
from forebay_gateway.teams.networks import Proxies

if TYPE_CHECKING:
    from forebay_shared.tracing.spans import Call, Tracing

_CALLER = "forebay_caller"
_HEADERS = "forebay_headers"
_CLIENT_CLOSED = 499

_ENDING = "The server is shutting down."

_UNBOUNDED = OPEN_PATHS | {METRICS_PATH}
_ROUTES = {
    "/v1/chat/completions": "chat_completions",
    "/v1/completions": "completions",
    "/v1/embeddings": "embeddings",
    "/score": "score",
    "/v1/score": "score",
    "/rerank": "rerank",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "tokenize",
    "/tokenize": "tokenize",
    "/detokenize": "tokenize",
    "/v1/tokenize": "tokenize",
    "/v1/detokenize": "tokenize",
    "/v1/models": "models",
    "/v1/responses": "responses",
    "/v1/responses/input_tokens": "tokenize",
    "/v1/usage": "usage",
    "/health": "health",
    "/ping": "health",
    "/ready": "ready",
    "/version": "version",
    "/metrics": "metrics",
}
_WITH_IDS = frozenset({"/v1/models", "/v1/responses"})
"""Paths that go on with the id of one thing."""
_EXPOSED = ", ".join(
    [
        "x-request-id",
        "request-id",
        "retry-after",
        "retry-after-ms",
        "x-should-retry",
        *(
            f"x-ratelimit-{figure}-{what}"
            for what in ("requests", "tokens")
            for figure in ("limit", "remaining", "reset")
        ),
    ]
).encode()
"""Headers that a page from another origin may read."""
_ANY_ORIGIN = b"*"
_PREFLIGHT: Headers = [
    (b"access-control-allow-methods", b"GET, POST, PUT, DELETE, OPTIONS"),
    (b"access-control-max-age", b"600"),
]


def raw_headers(scope: Scope) -> Mapping[bytes, bytes]:
    """The request's headers by lower-case name."""
    return scope["state"][_HEADERS]


def caller(scope: Scope) -> Caller:
    """Whose request this is."""
    return scope["state"][_CALLER]


class Edge:
    """An ASGI app around the routes."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keyring: Keyring,
        admission: Admission,
        telemetry: GatewayMetrics,
        allowed_origins: Sequence[str],
        trusted_proxies: Sequence[str] = (),
        tracing: "Tracing | None" = None,
        draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self._app = app
        self._keyring = keyring
        self._admission = admission
        self._http, self._jobs = telemetry.http, telemetry.jobs
        self._origins = frozenset(origin.encode() for origin in allowed_origins)
        self._proxies = Proxies(trusted_proxies)
        self._tracing = tracing
        self._draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started = time.perf_counter()
        headers = dict(scope["headers"])
        extra = self._extra_headers(scope, headers)
        status = _CLIENT_CLOSED

        async def send_out(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *extra, *_callers_headers(scope)]
                if self._draining():  # its client is to go elsewhere with its next request
                    message["headers"].append((b"connection", b"close"))
            await send(message)

        path = scope["path"]
        scope["state"][_HEADERS] = headers
        self._http.open_requests.inc()
        call = self._call(scope, headers) if self._tracing and path not in _UNBOUNDED else None
        try:
            await self._admitted(scope, receive, send_out, path, headers)
        except asyncio.CancelledError:
            if status == _CLIENT_CLOSED:
                ending = error_answer(OverloadedError(_ENDING), scope)
                await ending(scope, receive, send_out)
            raise
        except ClientGoneError:
            pass  # nobody is there to be answered
        except Exception as error:
            if status != _CLIENT_CLOSED:
                raise  # the answer has begun: the server closes the connection
            if isinstance(error, OverloadedError):
                self._jobs.shed(error)
            if isinstance(error, AuthenticationError | PermissionDeniedError):
                self._http.auth_refused(error)
            await error_answer(error, scope)(scope, receive, send_out)
        finally:
            self._http.open_requests.dec()
            self._http.answered(_route(path), status, time.perf_counter() - started)
            if call is not None:
                call.end(status)

    def _call(self, scope: HTTPScope, headers: Mapping[bytes, bytes]) -> "Call":
        """The span of this call. Its name is one of a few: a path may be anything."""
        assert self._tracing is not None
        route, method = _route(scope["path"]), scope["method"]
        traceparent = headers.get(b"traceparent", b"").decode("latin-1")
        facts = {"http.request.method": method, "http.route": route}
        return self._tracing.call(f"{method} {route}", traceparent, facts)

    async def _admitted(
        self,
        scope: HTTPScope,
        receive: Receive,
        send: Send,
        path: str,
        headers: Mapping[bytes, bytes],
    ) -> None:
        if scope["method"] == "OPTIONS":
            await self._preflight(headers)(scope, receive, send)
            return
        client = self._proxies.client(scope["client"], headers)
        caller = await self._keyring.authorize(path, headers, client)
        scope["state"][_CALLER] = caller
        inner = _as_routed(scope)
        caller.check_route(_route(inner["path"]))
        if path in _UNBOUNDED:
            await self._app(inner, receive, send)
            return
        with self._admission.admit(caller.team):
            await self._app(inner, receive, send)

    def _preflight(self, headers: Mapping[bytes, bytes]) -> ASGIApp:
        """A browser asks before it sends a key, so this needs none; it reaches no route."""
        answer: Headers = [(b"allow", b"GET, HEAD, POST, PUT, DELETE, OPTIONS")]
        if self._may_come(headers.get(b"origin")):
            wanted = headers.get(b"access-control-request-headers", b"authorization, content-type")
            answer += [*_PREFLIGHT, (b"access-control-allow-headers", wanted)]
        return Answer(b"", answer, status=204)

    def _may_come(self, origin: bytes | None) -> bool:
        """Whether pages from there may call: those that are configured, or all with a `*`."""
        return origin is not None and (origin in self._origins or _ANY_ORIGIN in self._origins)

    def _extra_headers(self, scope: HTTPScope, headers: Mapping[bytes, bytes]) -> Headers:
        """The request's id, under the names that its dialect knows, and what CORS asks for."""
        request_id = take_request_id(scope, headers)
        extra: Headers = [(b"x-request-id", request_id)]
        if speaks_anthropic(scope["path"], scope["headers"]):
            extra.append((b"request-id", request_id))
        origin = headers.get(b"origin")
        if self._origins:
            extra.append((b"vary", b"origin"))
            if origin is not None and self._may_come(origin):
                extra += [
                    (b"access-control-allow-origin", origin),
                    (b"access-control-expose-headers", _EXPOSED),
                ]
        return extra


def _callers_headers(scope: Scope) -> Headers:
    """What goes out for the caller's sake; nothing when it was not let in."""
    known: Caller | None = scope["state"].get(_CALLER)
    return known.answer_headers() if known is not None else []


def _route(path: str) -> str:
    """The metrics' name of a path: one of a few, whatever clients send."""
    if path.startswith("/admin"):
        return "admin"
    name = _ROUTES.get(path.rstrip("/"))
    if name is None:
        parent = "/".join(path.split("/", 3)[:3])
        name = _ROUTES[parent] if parent in _WITH_IDS else "other"
    return name


def _as_routed(scope: HTTPScope) -> HTTPScope:
    """HEAD is answered as GET, whose body the server leaves out; doubled slashes count as one."""
    if scope["method"] != "HEAD" and "//" not in scope["path"]:
        return scope
    routed = scope.copy()
    routed["path"] = re.sub("/+", "/", scope["path"])
    if scope["method"] == "HEAD":
        routed["method"] = "GET"
    return routed
