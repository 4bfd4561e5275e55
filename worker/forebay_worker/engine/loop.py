"""EngineLoop: the engine's thread: takes commands, drives the core, hands each step's events on.

Any thread may call it; only its own thread touches the core. It knows no Redis and no asyncio.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Generic, Protocol, TypeVar

import msgspec
from forebay_shared.errors import ForebayError, WorkerLostError
from forebay_shared.wire import Cancel, Load

from forebay_worker.engine.ports import Emit, Event

_log = logging.getLogger(__name__)


class Sized(Protocol):
    """Work for an engine."""

    @property
    def num_tokens(self) -> int: ...


W = TypeVar("W", bound=Sized)
W_contra = TypeVar("W_contra", contravariant=True)


class Core(Protocol[W_contra]):
    """What the loop drives: `core.EngineCore`, or another that takes work of another kind."""

    @property
    def idle(self) -> bool: ...
    @property
    def stalled(self) -> bool:
        """Whether all that is left waits for what is done outside."""
        ...

    @property
    def healthy(self) -> bool: ...
    @property
    def next_deadline(self) -> float | None: ...

    def submit(self, work: W_contra, arrived: float, /) -> None: ...

    def cancel(self, request_id: str, attempt: int, index: int | None = None) -> None: ...

    def cancel_gateway(self, gateway: str) -> None: ...

    def fail_all(self, error: ForebayError) -> None: ...

    def step(self) -> None: ...

    def take_events(self) -> list[Event]: ...

    def load(self) -> Load: ...

    def check(self) -> None:
        """Counts everything again; raises when the books are wrong. Called when it is idle."""
        ...

    def on_ready(self, wake: Callable[[], None]) -> None:
        """Has `wake` called when what was done outside is ready for the next step."""
        ...


@dataclass(frozen=True, slots=True)
class _Arrival(Generic[W]):
    work: W
    at: float


@dataclass(frozen=True, slots=True)
class _GatewayLost:
    gateway: str


@dataclass(frozen=True, slots=True)
class _Ready:
    pass


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


class EngineLoop(Generic[W]):
    """The thread of one core. With `check`, all blocks are counted again whenever it falls idle."""

    def __init__(self, core: Core[W], emit: Emit, *, check: bool = False) -> None:
        self._core = core
        self._emit = emit
        self._check = check
        self._commands: SimpleQueue[_Arrival[W] | Cancel | _GatewayLost | _Ready | _Stop] = (
            SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopping = False
        self._crashed = False
        self._resting = True
        self._last_round = monotonic()
        self._load = core.load()
        self._arrived_tokens = self._taken_tokens = 0
        """Of prompts: handed over by other threads, and taken in by the loop's load."""
        core.on_ready(lambda: self._commands.put(_Ready()))

    @property
    def healthy(self) -> bool:
        """False once the thread has given up; the process should end then."""
        return not self._crashed

    def start(self) -> None:
        self._thread.start()

    def submit(self, work: W) -> None:
        self._arrived_tokens += work.num_tokens
        self._commands.put(_Arrival(work, monotonic()))

    def cancel(self, request_id: str, attempt: int, index: int | None = None) -> None:
        self._commands.put(Cancel(request_id=request_id, attempt=attempt, index=index))

    def cancel_gateway(self, gateway: str) -> None:
        self._commands.put(_GatewayLost(gateway))

    def stop(self, timeout_s: float) -> None:
        """Ends the thread after the step that it is in; waits for that at most `timeout_s`."""
        self._commands.put(_Stop())
        self._thread.join(timeout_s)

    def load(self) -> Load:
        """The state after the last round, and the prompts that wait for the next one.

        A thread that hangs or has died shows a growing age.
        """
        age = 0.0 if self._resting and not self._crashed else monotonic() - self._last_round
        load = self._load
        waiting = load.waiting_tokens + self._arrived_tokens - self._taken_tokens
        return msgspec.structs.replace(load, waiting_tokens=max(0, waiting), step_age_s=age)

    def _run(self) -> None:
        try:
            while not self._stopping and self._core.healthy:
                self._round()
        except Exception:
            _log.exception("the engine's loop failed")
        self._crashed = not self._stopping
        self._end()

    def _round(self) -> None:
        if self._take_commands():
            self._flush()  # a refusal or an abort does not wait for the step
        if not self._stopping:
            self._core.step()
            self._flush()

    def _take_commands(self) -> bool:
        """Carries out all commands that are there; sleeps until one comes when there is no work.
        Whether the engine rested or got any."""
        busy = not (self._core.idle or self._core.stalled)
        if busy and self._commands.empty():
            return False
        if self._commands.empty():
            self._rest()
        with suppress(Empty):
            while True:
                self._carry_out(self._commands.get_nowait())
        return True

    def _rest(self) -> None:
        if self._check:
            self._core.check()
        self._resting = True
        deadline = self._core.next_deadline if self._core.stalled else None
        patience = None if deadline is None else max(0.0, deadline - monotonic())
        with suppress(Empty):
            self._carry_out(self._commands.get(timeout=patience))
        self._last_round = monotonic()
        self._resting = False

    def _carry_out(self, command: _Arrival[W] | Cancel | _GatewayLost | _Ready | _Stop) -> None:
        match command:
            case _Arrival(work, at):
                self._core.submit(work, at)
                self._taken_tokens += work.num_tokens
            case Cancel():
                self._core.cancel(command.request_id, command.attempt, command.index)
            case _GatewayLost(gateway):
                self._core.cancel_gateway(gateway)
            case _Ready():
                pass  # the next step takes it
            case _Stop():
                self._stopping = True

    def _flush(self) -> None:
        """Hands the events on. A receiver that raises loses them; the engine goes on."""
        self._load = self._core.load()
        self._last_round = monotonic()
        events = self._core.take_events()
        if not events:
            return
        try:
            self._emit(events)
        except Exception:
            _log.exception("%d events were not taken", len(events))

    def _end(self) -> None:
        """Gives up what still runs and what has come in since."""
        try:
            with suppress(Empty):
                while True:
                    self._carry_out(self._commands.get_nowait())
            self._core.fail_all(WorkerLostError("The worker has stopped."))
        except Exception:
            _log.exception("the engine's state could not be cleared")
        self._flush()
