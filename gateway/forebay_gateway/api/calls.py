"""What answers a POST, whatever its dialect: the body is read, one call made, its answer run."""

from collections.abc import Awaitable, Callable, Mapping

from forebay_shared.errors import ForebayError
from litestar import post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, Receive, Scope, Send

from forebay_gateway.api.body import read_json_body
from forebay_gateway.api.edge import caller, raw_headers
from forebay_gateway.teams.caller import Caller

Call = Callable[[bytes | bytearray, Caller], Awaitable[ASGIApp]]
"""From a body and who sent it to an answer that is ready to run."""


def posted(call: Call, max_body_bytes: int) -> ASGIApp:
    """An app that hands the body to `call`, and runs what it returns.

    Where that fails before anything was answered, and an alias knows another model that may do
    better, the call is made again for that one. A model is asked once, so this ends.
    """

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_json_body(raw_headers(scope), receive, max_body_bytes)
        asker = caller(scope)
        while True:
            try:
                answer = await call(body, asker)
                await answer(scope, receive, send)
            except ForebayError as error:  # an answer that has begun tells its errors itself
                if not asker.goes_on(error):
                    raise
            else:
                return

    return run


def post_routes(apps: Mapping[str, ASGIApp]) -> list[HTTPRouteHandler]:
    """Apps by path as routes, which know other methods and other spellings of the paths."""

    def route(path: str, app: ASGIApp) -> HTTPRouteHandler:
        async def answer() -> ASGIApp:
            return app

        return post(path, status_code=200)(answer)

    return [route(path, app) for path, app in apps.items()]
