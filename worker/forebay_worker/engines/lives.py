"""Life: one sequence of a TaskEngine from intake to its end: what it says, its times, its cost."""

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from forebay_shared.wire import (
    Delta,
    FinishReason,
    Reply,
    Started,
    Task,
    TextDelta,
    Usage,
)

from forebay_worker.engine.replies import Key
from forebay_worker.engines.base import Emit, Recorder


class Ending(NamedTuple):
    """How a sequence ended by itself."""

    reason: FinishReason
    usage: Usage
    stop_token: int | None = None


@dataclass(slots=True, eq=False)
class Life:
    """One sequence, from intake to its end. `tokens` counts what it emitted, before it came here,
    too; `usage` is what it has used so far, without times, as far as anybody said."""

    work: Task
    index: int
    emit: Emit
    recorder: Recorder
    tokens: int = 0
    usage: Usage = field(default_factory=Usage)
    arrived: float = field(default_factory=time.monotonic)
    placed_at: float = 0.0
    started_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    silent: bool = False
    """Nothing more is to be said of it: its request has failed."""

    @property
    def key(self) -> Key:
        return self.work.request_id, self.work.attempt

    def begin(self, cached_tokens: int = 0) -> None:
        """Says that it is being worked on; once."""
        if not self.started_at:
            self.started_at = time.monotonic()
            queued_ms = (self.started_at - self.arrived) * 1000
            self.say(Started(*self.key, self.index, cached_tokens, queued_ms))

    def say(self, *replies: Reply) -> None:
        """Emits what came of it, and keeps the times of its tokens."""
        if self.silent or not replies:
            return
        if any(isinstance(reply, Delta | TextDelta) for reply in replies):
            now = time.monotonic()
            if self.first_token_at:
                self.recorder.inter_token(now - self.last_token_at)
            else:
                self.first_token_at = now
                self.recorder.first_token(now - self.arrived)
            self.last_token_at = now
        self.emit([(self.work.gateway, reply) for reply in replies])

    def spent(self, usage: Usage) -> Usage:
        """The usage with this sequence's times."""
        now = time.monotonic()
        started = self.started_at or now
        first = self.first_token_at or now
        return Usage(
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            (started - self.arrived) * 1000,
            (first - started) * 1000,
            (now - first) * 1000,
            usage.reasoning_tokens,
            usage.estimated,
        )

    def record(self, reason: str, usage: Usage) -> None:
        """Counts it among those that have ended."""
        sampling = getattr(self.work, "sampling", None)
        self.recorder.step(
            prompt_tokens=usage.prompt_tokens,
            generation_tokens=usage.completion_tokens,
            prefix_queries=usage.prompt_tokens,
            prefix_hits=usage.cached_tokens,
            preemptions=0,
            host_s=0.0,
        )
        self.recorder.finished(
            reason=reason,
            e2e_s=time.monotonic() - self.arrived,
            queued_s=usage.queued_ms / 1000,
            prefill_s=usage.prefill_ms / 1000,
            decode_s=usage.decode_ms / 1000,
            prompt_tokens=usage.prompt_tokens,
            generation_tokens=usage.completion_tokens,
            max_tokens=sampling.max_tokens if sampling is not None else 0,
        )
