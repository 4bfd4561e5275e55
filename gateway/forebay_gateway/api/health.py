"""Is it alive, can it serve, what is it, how is it doing. Nothing here waits for a worker."""

from collections.abc import Awaitable, Callable
from importlib.metadata import version

import msgspec
from forebay_shared.errors import NoWorkerError, OverloadedError
from litestar import get
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp

from forebay_gateway.api.ports import Services
from forebay_gateway.api.respond import Answer

_EXPOSITION = b"text/plain; version=0.0.4; charset=utf-8"


def health_routes(
    backend: Services,
    draining: Callable[[], bool],
    warm: Callable[[], Awaitable[None]],
    load: Callable[[], int],
) -> list[HTTPRouteHandler]:
    """`warm` loads what the first request would have to wait for, so that ready means fast; `load`
    is how many requests this process works on.
    """
    about = msgspec.json.encode({"version": version("forebay-gateway")})

    @get(["/health", "/ping"])
    async def health() -> ASGIApp:
        return Answer(b'{"status":"ok"}')

    @get("/ready")
    async def ready() -> ASGIApp:
        if draining():
            raise OverloadedError("The gateway is shutting down.", retry_after_s=1.0)
        if not backend.roster.ready:
            raise NoWorkerError("No worker is ready.", retry_after_s=1.0)
        await warm()
        if backend.teams is not None and backend.teams.sync.pepper_differs:
            return Answer(b'{"status":"ready","warning":"the pepper is not the fleet\'s"}')
        return Answer(b'{"status":"ready"}')

    @get("/version")
    async def about_version() -> ASGIApp:
        return Answer(about)

    @get("/load")
    async def server_load() -> ASGIApp:
        return Answer(b'{"server_load":%d}' % load())

    @get("/metrics")
    async def metrics() -> ASGIApp:
        exposition = await backend.metrics()
        return Answer(exposition.encode(), [(b"content-type", _EXPOSITION)])

    return [health, ready, about_version, server_load, metrics]
