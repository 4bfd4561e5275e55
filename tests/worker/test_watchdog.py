"""When a step counts as one that hangs, and what ends a process whose interpreter does."""

import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest
from forebay_shared.errors import EngineError
from forebay_shared.telemetry import WorkerMetrics
from forebay_shared.wire import Load
from forebay_worker.alarm import EXIT_CODE
from forebay_worker.watchdog import LOOK_S, STILL_S, Watchdog
from patience import PATIENCE_S
from prometheus_client import CollectorRegistry
from serve_house import until

TIMEOUT_S = 60.0


@dataclass
class Stepping:
    """An engine whose step began at `since`, and the clock."""

    now: float = 1000.0
    since: float = 1000.0
    healthy: bool = True

    def load(self) -> Load:
        return Load(step_age_s=self.now - self.since)


@pytest.fixture
def engine() -> Stepping:
    return Stepping()


@pytest.fixture
def watchdog(engine: Stepping) -> Watchdog:
    metrics = WorkerMetrics(CollectorRegistry(), engine="w")
    return Watchdog(engine, metrics, TIMEOUT_S, clock=lambda: engine.now)  # type: ignore[arg-type]


def _looks(watchdog: Watchdog, engine: Stepping, for_s: float) -> None:
    for _ in range(int(for_s / LOOK_S)):
        engine.now += LOOK_S
        watchdog.look()


def test_a_step_that_hangs_ends_the_process_when_its_time_is_out(
    watchdog: Watchdog, engine: Stepping
) -> None:
    _looks(watchdog, engine, TIMEOUT_S)
    with pytest.raises(EngineError, match="its step has taken 60 s"):
        _looks(watchdog, engine, 2 * LOOK_S)


def test_short_steps_never_add_up(watchdog: Watchdog, engine: Stepping) -> None:
    for _ in range(20):
        engine.since = engine.now + LOOK_S / 2
        _looks(watchdog, engine, TIMEOUT_S / 2)


@pytest.mark.parametrize("before_s", [0.0, TIMEOUT_S / 2])
def test_time_in_which_the_process_stood_still_is_not_the_steps(
    watchdog: Watchdog, engine: Stepping, before_s: float
) -> None:
    """The step that it was in goes on, and has what it has not used of its time."""
    _looks(watchdog, engine, before_s)
    engine.now += 3600
    watchdog.look()
    _looks(watchdog, engine, TIMEOUT_S - before_s - STILL_S)
    with pytest.raises(EngineError, match="hangs"):
        _looks(watchdog, engine, STILL_S)


def test_a_step_that_began_before_a_look_came_late_has_just_begun(
    watchdog: Watchdog, engine: Stepping
) -> None:
    _looks(watchdog, engine, TIMEOUT_S)
    engine.since = engine.now + LOOK_S
    engine.now += 3600
    watchdog.look()
    _looks(watchdog, engine, TIMEOUT_S - STILL_S)


TIME_S = 0.5
_GOES_ON = f"""
import select, sys
from forebay_worker.alarm import last_resort
call = last_resort()
call({TIME_S})
print("armed", flush=True)
while not select.select([sys.stdin], [], [], {TIME_S / 10})[0]:
    call({TIME_S})
"""
_HANGS = f"""
import ctypes
from forebay_worker.alarm import last_resort
call = last_resort()
call({TIME_S})
libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
for _ in range(2):
    libc.pthread_mutex_lock(mutex)  # with the interpreter's lock
"""


def _started(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_process_that_stood_still_goes_on() -> None:
    with _started(_GOES_ON) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "armed\n"
        process.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        until(lambda: time.monotonic() - stopped > 2 * TIME_S)
        process.send_signal(signal.SIGCONT)
        process.communicate("end\n", timeout=PATIENCE_S)
    assert process.returncode == 0


def test_a_process_whose_interpreter_hangs_ends_and_shows_where() -> None:
    with _started(_HANGS) as process:
        _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == EXIT_CODE
    assert "Timeout" in said
    assert 'File "<string>"' in said
