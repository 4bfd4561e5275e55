"""Ports: what an engine is given from outside: where its events go, who counts, and what computes.

Protocols and types, and the recorder of who counts nothing.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from forebay_shared.wire import Reply

from forebay_worker.engine.batch import Launched, Sampled, ScheduledRow

Event = tuple[str, Reply]
"""A message and the gateway incarnation that it is for."""

Emit = Callable[[Sequence[Event]], None]
"""Takes one step's events as (gateway incarnation, event). Called from the engine's thread."""


class Recorder(Protocol):
    """Where an engine reports what it did; telemetry implements it. Seconds and tokens."""

    def step(
        self,
        *,
        prompt_tokens: int,
        generation_tokens: int,
        prefix_queries: int,
        prefix_hits: int,
        preemptions: int,
        host_s: float,
    ) -> None:
        """`host_s`: what it took beside the model; 0 where the steps are not this engine's own."""
        ...

    def step_failed(self) -> None:
        """A step failed; its rows are tried one by one."""
        ...

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


class Unrecorded:
    """The recorder of a script, which has no metrics."""

    def step(self, **facts: float) -> None: ...

    def step_failed(self) -> None: ...

    def first_token(self, seconds: float) -> None: ...

    def inter_token(self, seconds: float) -> None: ...

    def finished(self, **facts: float | str) -> None: ...


class Runner(Protocol):
    """What computes the steps of the native engine; sizes are in tokens and blocks."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def token_budget(self) -> int:
        """Tokens of a step at most, where the settings name none."""
        ...

    @property
    def prefill_budget(self) -> int:
        """Prompt tokens of a step that others wait for, likewise."""
        ...

    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def scores_prompts(self) -> bool:
        """Whether it computes the scores that a row asks for."""
        ...

    def execute(self, rows: list[ScheduledRow]) -> list[Sampled | None]:
        """One result per row, None where the row neither samples nor scores."""
        ...

    def poison_blocks(self, blocks: list[int]) -> None:
        """Fills blocks that are free with NaN, after all steps launched before."""
        ...


@runtime_checkable
class OverlappingRunner(Runner, Protocol):
    """A runner that computes on its own, so that the host can prepare the next step meanwhile.

    Steps run in the order of their launch. A decode row's token may be unknown to the host when it
    is launched; then the launch before this one samples it, and the runner takes it from there.
    """

    def launch(self, rows: list[ScheduledRow]) -> Launched: ...
