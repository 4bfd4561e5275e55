"""The Engine protocol: the product's plug. The service drives it; it knows no Redis and no asyncio.

An engine runs its own thread. `submit` and `cancel` may be called from any thread and return at
once; everything that happens to a request comes out through `emit`, once per step, in order.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from forebay_shared.models import ModelCard
from forebay_shared.wire import Load, Reply, Submit

Emit = Callable[[Sequence[tuple[str, Reply]]], None]
"""Takes one step's events as (gateway incarnation, event). Called from the engine's thread."""


class Recorder(Protocol):
    """Where an engine reports what it did; telemetry implements it. Times in seconds, counts in tokens."""

    def step(
        self,
        *,
        running: int,
        waiting: int,
        kv_usage: float,
        prompt_tokens: int,
        generation_tokens: int,
        prefix_queries: int,
        prefix_hits: int,
        preemptions: int,
        host_s: float,
    ) -> None: ...

    def first_token(self, seconds: float) -> None: ...

    def inter_token(self, seconds: float) -> None: ...

    def finished(
        self,
        *,
        reason: str,
        e2e_s: float,
        queued_s: float,
        prefill_s: float,
        decode_s: float,
        prompt_tokens: int,
        generation_tokens: int,
        max_tokens: int,
    ) -> None: ...


class Engine(Protocol):
    """What the worker's service asks of an engine."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def blobs(self) -> dict[str, bytes]:
        """Content by hash, uncompressed: the tokenizer.json and chat template that `card` names."""
        ...

    def start(self, emit: Emit, recorder: Recorder) -> None:
        """Loads what is not loaded yet and starts the engine's thread."""
        ...

    def submit(self, submit: Submit) -> None:
        """Queues a request. Never raises for what a request holds: it answers Failed through emit."""
        ...

    def cancel(self, request_id: str, attempt: int, index: int | None = None) -> None:
        """Aborts a sequence or all of a request's; each answers Done("abort") when its blocks are back."""
        ...

    def cancel_gateway(self, gateway: str) -> None:
        """Aborts everything that a lost gateway asked for."""
        ...

    def load(self) -> Load: ...

    def stop(self, timeout_s: float) -> None:
        """Ends the thread. What still runs gets Failed("worker_lost", retryable)."""
        ...
