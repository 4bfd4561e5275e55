"""The Engine protocol: the product's plug. The service drives it; it knows no Redis and no asyncio.

An engine runs its own thread. `submit` and `cancel` may be called from any thread and return at
once; everything that happens to a request comes out through `emit`, once per step, in order.
"""

from typing import Protocol, runtime_checkable

from forebay_shared.models import ModelCard
from forebay_shared.wire import Encode, Load, Submit, SubmitText
from prometheus_client import CollectorRegistry

from forebay_worker.engine.cache_log import CacheLog
from forebay_worker.engine.ports import Emit, Recorder

__all__ = [
    "CacheLog",
    "CacheTeller",
    "Dependent",
    "Emit",
    "Encoder",
    "Engine",
    "Measured",
    "Recorder",
    "Teller",
]


class Engine(Protocol):
    """What the worker's service asks of an engine."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def blobs(self) -> dict[str, bytes]:
        """Content by hash, uncompressed: the tokenizer.json and chat template that `card` names."""
        ...

    @property
    def healthy(self) -> bool:
        """False once the engine's thread has given up; the process should end then."""
        ...

    def start(self, emit: Emit, recorder: Recorder) -> None:
        """Loads what is not loaded yet and starts the engine's thread."""
        ...

    def submit(self, submit: Submit) -> None:
        """Queues a request. What is wrong with it is answered as Failed, never raised. Where it
        names an adapter, that is on the card: the service sees to it.

        The service has answered Accepted before; an engine's first event is Started or Failed.
        """
        ...

    def cancel(self, request_id: str, attempt: int, index: int | None = None) -> None:
        """Aborts one or all sequences; each answers Done("abort") when its blocks are back."""
        ...

    def cancel_gateway(self, gateway: str) -> None:
        """Aborts everything that a lost gateway asked for."""
        ...

    def load(self) -> Load: ...

    def stop(self, timeout_s: float) -> None:
        """Ends the thread. What still runs gets Failed("worker_lost", retryable)."""
        ...


@runtime_checkable
class Encoder(Protocol):
    """What an engine has besides when it makes vectors: its card then has CAP_EMBED."""

    def encode(self, encode: Encode) -> None:
        """Queues inputs as `submit` queues a prompt: whatever comes of them is emitted.

        One Embedded or Failed ends it, or Done("abort") after a cancel. A Started goes before when
        it takes more than a step.
        """
        ...


@runtime_checkable
class Teller(Protocol):
    """What an engine has besides when it takes and gives text: its card then has CAP_TEXT."""

    def submit_text(self, submit: SubmitText) -> None:
        """Queues a request, as `submit` does. What comes of it is emitted as TextDeltas."""
        ...


@runtime_checkable
class Dependent(Protocol):
    """What an engine has besides when its work is done elsewhere."""

    @property
    def available(self) -> bool:
        """False while what it depends on is away: the worker then asks for no new requests."""
        ...


@runtime_checkable
class CacheTeller(Protocol):
    """What an engine has besides when it can say what its prefix cache holds: requests then go to
    the worker that has their prefix."""

    @property
    def cache_log(self) -> CacheLog | None:
        """Where it notes each block that enters or leaves the cache, by the hashes of
        `forebay_shared.blocks`; None when it keeps no cache."""
        ...


@runtime_checkable
class Measured(Protocol):
    """What an engine has besides when it has metrics of its own."""

    def measure(self, registry: CollectorRegistry, engine: str) -> None:
        """Registers them, once, before `start`. Each has the label `engine`."""
        ...
