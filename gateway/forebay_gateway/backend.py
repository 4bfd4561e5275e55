"""The gateway's side of the bus, wired: `async with connect(settings) as backend`."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from forebay_shared.settings import GatewaySettings
from forebay_shared.telemetry import GatewayMetrics

from forebay_gateway.dispatch import Dispatcher
from forebay_gateway.roster import Roster
from forebay_gateway.store import Store


class Backend:
    """What the HTTP layer uses. `telemetry` is where it counts requests and open streams."""

    roster: Roster
    dispatcher: Dispatcher
    store: Store
    telemetry: GatewayMetrics

    async def metrics(self) -> str:
        """One Prometheus exposition of this process and of every live gateway and worker."""
        raise NotImplementedError

    @property
    def connected(self) -> bool:
        """Redis answers."""
        raise NotImplementedError


@asynccontextmanager
async def connect(settings: GatewaySettings) -> AsyncGenerator[Backend]:
    """Starts the reader, the publisher and the upkeep of one gateway incarnation; stops them on
    leaving.

    Returns at once when Redis is away: everything then raises BusError until it is back.
    """
    raise NotImplementedError
    yield Backend()
