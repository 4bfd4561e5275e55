"""TaskEngine: an engine whose sequences are asyncio tasks, on a loop in a thread of its own.

It is for engines that wait for somebody else's: an upstream over HTTP, a library with a loop. It
keeps the order of events, the queue with its bounds and deadlines, cancels and times; what a
sequence does is its maker's. It knows no Redis.
"""

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import suppress

import uvloop
from forebay_shared.errors import (
    DeadlineError,
    EngineError,
    ForebayError,
    OverloadedError,
    RateLimitError,
    WorkerLostError,
)
from forebay_shared.models import ModelCard
from forebay_shared.settings import WorkerSettings
from forebay_shared.wire import (
    Done,
    Embedded,
    Failed,
    Load,
    Task,
)

from forebay_worker.engine import replies
from forebay_worker.engines.base import Emit, Recorder
from forebay_worker.engines.lives import Ending, Life
from forebay_worker.engines.places import Places, Ticket

log = logging.getLogger(__name__)

Run = Callable[[Life], Coroutine[None, None, Ending | Embedded]]
"""What a sequence does once it has a place. Raises ForebayError, which ends its whole request."""


class TaskEngine(ABC):
    """Implements most of the Engine protocol. `max_num_seqs` sequences run at once."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._started = threading.Event()
        self._stopping: asyncio.Event | None = None
        self._places = Places(settings.max_num_seqs)
        self._lives: dict[asyncio.Task[Ending | Embedded], Life] = {}
        self._emit: Emit | None = None
        self._recorder: Recorder | None = None
        self._stopped = False

    @property
    @abstractmethod
    def card(self) -> ModelCard: ...

    @property
    def blobs(self) -> dict[str, bytes]:
        return {}

    @property
    def healthy(self) -> bool:
        """False once the engine's thread has given up; the process should end then."""
        return self._thread is None or self._stopped or self._thread.is_alive()

    @abstractmethod
    async def serve(self, stopping: asyncio.Event) -> None:
        """Opens what sequences need, sets `ready`, and closes it when `stopping` is set. When it
        returns before, or raises, the engine is lost."""

    def ready(self) -> None:
        """Sequences may come."""
        self._started.set()

    def start(self, emit: Emit, recorder: Recorder) -> None:
        """Returns when the engine is ready. Raises EngineError when it is lost before."""
        self._emit, self._recorder = emit, recorder
        if self._thread is None:
            self.launch()

    def launch(self) -> None:
        """Starts the thread; returns when the engine is ready. Raises EngineError when it is lost
        before. `start` does so unless the engine is loaded when it is made."""
        self._thread = threading.Thread(target=self._main, name="tasks-engine", daemon=True)
        self._thread.start()
        self._started.wait()
        if not self.healthy or self._loop is None:
            raise EngineError("The engine could not be started.")

    def cancel(self, request_id: str, attempt: int, index: int | None = None) -> None:
        key = (request_id, attempt)

        def meant(life: Life) -> bool:
            return life.key == key and index in (None, life.index)

        self._call(self._cancel, meant)

    def cancel_gateway(self, gateway: str) -> None:
        def meant(life: Life) -> bool:
            return life.work.gateway == gateway

        self._call(self._cancel, meant)

    def load(self) -> Load:
        lives = list(self._lives.values())
        waiting = [life for life in lives if not life.placed_at]
        return Load(
            running=len(lives) - len(waiting),
            waiting=len(waiting),
            waiting_tokens=sum(life.work.num_tokens for life in waiting),
            kv_usage=min(1.0, (len(lives) - len(waiting)) / self._settings.max_num_seqs),
        )

    def stop(self, timeout_s: float) -> None:
        self._stopped = True
        if self._thread is not None:
            self._call(self._give_up)
            self._thread.join(timeout_s)

    def open(self, work: Task, counts: dict[int, int], run: Run) -> None:
        """Queues the sequences of a request, by index, each with what it has emitted elsewhere."""
        self._call(self._open, work, counts, run)

    def refuse(self, work: Task, error: ForebayError) -> None:
        """Answers a request that is not taken in."""
        assert self._emit is not None, "the engine has not been started"
        self._emit([(work.gateway, failed(work, error))])

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None, "the engine has not been started"
        with suppress(RuntimeError):  # the loop is closed: the engine has stopped
            self._loop.call_soon_threadsafe(function, *arguments)

    def _main(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except Exception:
            log.exception("the engine failed")
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        try:
            await self.serve(self._stopping)
        finally:
            await self.emptied()

    async def emptied(self) -> None:
        """Hands back what still runs, and waits until it is ended."""
        self._give_up()
        while self._lives:
            await asyncio.wait(list(self._lives))
            await asyncio.sleep(0)  # for what follows their end

    def _open(self, work: Task, counts: dict[int, int], run: Run) -> None:
        assert self._emit is not None
        assert self._recorder is not None
        room = self._settings.max_num_queued_reqs - self._places.waiting
        if len(counts) > room and self._places.waits(work.team):
            self.refuse(work, OverloadedError("The worker's queue is full. Please retry."))
            return
        for index, emitted in counts.items():
            life = Life(work, index, self._emit, self._recorder, emitted)
            task = asyncio.create_task(self._live(life, run), name=f"{work.request_id}.{index}")
            self._lives[task] = life
            task.add_done_callback(self._ended)

    async def _live(self, life: Life, run: Run) -> Ending | Embedded:
        work = life.work
        ticket = Ticket(work.team, work.weight, work.priority, work.num_tokens)
        try:
            async with asyncio.timeout(work.queue_timeout_ms / 1000 or None):
                await self._places.take(ticket)
        except TimeoutError:
            raise DeadlineError("The request waited too long for its first step.") from None
        try:
            life.placed_at = time.monotonic()
            return await run(life)
        finally:
            self._places.give_back(ticket, life.tokens)

    def _ended(self, task: asyncio.Task[Ending | Embedded]) -> None:
        """Says how a sequence ended, in one place: a task may be cancelled before it ever ran."""
        life = self._lives.pop(task)
        if task.cancelled():
            self._finish(life, Ending("abort", life.usage))
        elif (error := task.exception()) is None:
            self._finish(life, task.result())
        else:
            if not isinstance(error, ForebayError):
                log.error("a request failed unexpectedly", exc_info=without_text(error))
                error = EngineError("The engine failed to answer this request.")
            self._fail(life, error)

    def _finish(self, life: Life, ending: Ending | Embedded) -> None:
        if isinstance(ending, Embedded):
            life.say(ending)
            return
        usage = life.spent(ending.usage)
        done = Done(*life.key, life.index, ending.reason, ending.stop_token, usage)
        life.say(done)
        life.record(ending.reason, usage)

    def _fail(self, life: Life, error: ForebayError) -> None:
        life.say(failed(life.work, error))
        life.record("error", life.spent(life.usage))
        for task, other in list(self._lives.items()):
            if other.key == life.key:
                other.silent = True
                task.cancel()

    def _cancel(self, wanted: Callable[[Life], bool]) -> None:
        for task, life in list(self._lives.items()):
            if wanted(life):
                task.cancel()

    def _give_up(self) -> None:
        """Hands back what still runs, then lets the loop end."""
        error = WorkerLostError("The worker stopped.")
        for life in list(self._lives.values()):
            if not life.silent:
                life.say(failed(life.work, error))
            for other in self._lives.values():
                other.silent = other.silent or other.key == life.key
        self._cancel(lambda life: True)
        if self._stopping is not None:
            self._stopping.set()


def failed(work: Task, error: ForebayError) -> Failed:
    """No other worker is asked where a limit is reached: it holds for all, and the client waits."""
    retryable = error.retryable and not isinstance(error, RateLimitError)
    return replies.failed((work.request_id, work.attempt), error, retryable)


def without_text(error: BaseException) -> Exception:
    """The error with its place but without its message, which may quote what a client wrote."""
    return RuntimeError(type(error).__name__).with_traceback(error.__traceback__)
