"""Faults inside a worker: each SIGUSR1 arms the one that TEST_FAULT names, for the next step.

Runs in the worker's own process, put there by `fleet_house`; the product knows nothing of it.
"""

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
from forebay_worker.engine import runner as runners


def _raises(error: Callable[[], Exception], times: int) -> None:
    """The model's pass fails, so many times in a row; a card's sticky error never ends."""
    execute = runners.Runner.execute

    def failing(runner: runners.Runner, rows: Any) -> Any:
        if _armed.take(times):
            raise error()
        return execute(runner, rows)

    runners.Runner.execute = failing


def _nan() -> None:
    """One row of the next logits is not a number."""
    sample = runners.sample

    def poisoned(logits: torch.Tensor, sequences: Any) -> Any:
        if len(sequences) and _armed.take(1):
            logits[0, 0] = float("nan")
        return sample(logits, sequences)

    runners.sample = poisoned


class _Armed:
    """How often the fault is still to come."""

    def __init__(self) -> None:
        self.left = 0
        self.armed = False

    def arm(self, *_: object) -> None:
        self.armed, self.left = True, 0

    def take(self, times: int) -> bool:
        if self.armed:
            self.armed, self.left = False, times
        self.left -= 1
        return self.left >= 0


_armed = _Armed()
_FAULTS: dict[str, Callable[[], None]] = {
    "sticky": lambda: _raises(lambda: RuntimeError("CUDA error: an illegal access"), 1 << 30),
    "memory": lambda: _raises(lambda: torch.OutOfMemoryError("out of memory"), 1),
    "nan": _nan,
}


def install() -> None:
    _FAULTS[os.environ.pop("TEST_FAULT")]()
    signal.signal(signal.SIGUSR1, _armed.arm)
