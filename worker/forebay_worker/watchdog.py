"""Finds that this worker is of no use any more: its engine has died or hangs.

It sees the engine's load and its own clock, never a request.
"""

import asyncio
from collections.abc import Callable
from time import monotonic

from forebay_shared import keys
from forebay_shared.errors import EngineError
from forebay_shared.telemetry import WorkerMetrics

from forebay_worker.engines.base import Engine

LEASE_S = keys.LEASE_MS / 1000
LOOK_S = 0.5
STILL_S = LEASE_S
"""What passes between two looks beyond this is time in which this process stood still: stopped, on
a machine that was paused, or without a processor."""


class Watchdog:
    """Looks twice a second. A step may take `step_timeout_s`, waits for work and time in which the
    whole process stood still not counted.

    `alarm(s)` is to end the process from outside the interpreter unless it is called again within
    so many seconds: no task of ours runs while a thread that hangs keeps the interpreter's lock.
    """

    def __init__(
        self,
        engine: Engine,
        metrics: WorkerMetrics,
        step_timeout_s: float,
        alarm: Callable[[float], None] = lambda _: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._step_timeout_s = step_timeout_s
        self._alarm = alarm
        self._clock = clock
        self._looked_at = clock()
        self._run_s = 0.0
        """How long the step that is under way could run."""

    async def run(self) -> None:
        """Raises EngineError when the engine has given up or hangs: the process must end then, so
        that its requests go elsewhere and somebody starts it again."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Raises as `run` does."""
        self._alarm(self._step_timeout_s + LEASE_S)
        age_s = self._engine.load().step_age_s
        self._metrics.step_age.set(age_s)
        self._count(age_s)
        if not self._engine.healthy:
            raise EngineError("The engine has stopped.")
        if self._run_s > self._step_timeout_s:
            raise EngineError(f"The engine hangs: its step has taken {age_s:.0f} s.")

    def _count(self, age_s: float) -> None:
        now = self._clock()
        passed_s, self._looked_at = now - self._looked_at, now
        before_s = self._run_s if age_s > passed_s else 0.0
        self._run_s = before_s + min(age_s, passed_s, STILL_S)
