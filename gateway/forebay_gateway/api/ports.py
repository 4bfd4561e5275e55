"""What the HTTP side asks of the rest of the gateway: the roster, the dispatcher, the store.

`backend.Backend` is the real one, over Redis. It knows no implementation.
"""

from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Protocol, Self

from forebay_shared.bus import Publisher
from forebay_shared.models import ModelCard
from forebay_shared.telemetry import GatewayMetrics
from forebay_shared.wire import Embedded

from forebay_gateway.jobs import EncodeJob, Job, TextJob
from forebay_gateway.ledger import Event
from forebay_gateway.teams.teams import Teams


class Scope(Protocol):
    """A running job as an async context manager; see attempts.Attempts."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...


class Running(Scope, Protocol):
    """See generation.Generation."""

    @property
    def taken(self) -> bool: ...

    async def events(self) -> list[Event]: ...

    def stop(self, index: int) -> None: ...

    def reasoned(self, tokens: int) -> None: ...


class Encoding(Scope, Protocol):
    """See encoding.Encoding."""

    async def events(self) -> list[Embedded]: ...


class Dispatch(Protocol):
    def generate(self, job: Job | TextJob) -> Running: ...

    def encode(self, job: EncodeJob) -> Encoding: ...


class Models(Protocol):
    @property
    def ready(self) -> bool: ...

    def cards(self) -> list[ModelCard]: ...

    def find(self, name: str) -> ModelCard: ...

    def serves(self, card: ModelCard) -> bool: ...

    def on_card(self, learner: Callable[[ModelCard], None]) -> None: ...


class Blobs(Protocol):
    async def blob(self, sha256: str) -> bytes: ...


class Tasks(Protocol):
    """Owns what goes on without a client; see supervise.Supervisor."""

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> None: ...


class Services(Protocol):
    """Everything together. `gateway` is this process's name for the others."""

    @property
    def gateway(self) -> str: ...

    @property
    def publisher(self) -> Publisher: ...

    @property
    def tasks(self) -> Tasks: ...

    @property
    def roster(self) -> Models: ...

    @property
    def dispatcher(self) -> Dispatch: ...

    @property
    def store(self) -> Blobs: ...

    @property
    def teams(self) -> Teams | None: ...

    @property
    def telemetry(self) -> GatewayMetrics: ...

    async def metrics(self) -> str: ...
