"""LoopedEngine: an engine whose core is driven by `engine.loop`: it passes on what it is asked.

What it loads and which core works on it is its maker's. It knows no Redis and no asyncio.
"""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from forebay_shared.errors import ForebayError
from forebay_shared.models import ModelCard
from forebay_shared.settings import WorkerSettings
from forebay_shared.wire import Load, Task

from forebay_worker.engine import replies
from forebay_worker.engine.loop import Core, EngineLoop
from forebay_worker.engine.ports import Emit, Recorder

W = TypeVar("W", bound=Task)


class LoopedEngine(ABC, Generic[W]):
    """Implements most of the Engine protocol over a core that takes work of one kind."""

    def __init__(self, settings: WorkerSettings, card: ModelCard, blobs: dict[str, bytes]) -> None:
        self._settings = settings
        self._card = card
        self._blobs = blobs
        self._emit: Emit | None = None
        self._loop: EngineLoop[W] | None = None

    @abstractmethod
    def make_core(self, recorder: Recorder) -> Core[W]:
        """The core that the loop is to drive; asked for once."""

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def blobs(self) -> dict[str, bytes]:
        return self._blobs

    @property
    def healthy(self) -> bool:
        """False once the engine's thread has given up; the process should end then."""
        return self._loop is None or self._loop.healthy

    def start(self, emit: Emit, recorder: Recorder) -> None:
        self._emit = emit
        core, check = self.make_core(recorder), self._settings.log_level == "debug"
        self._loop = EngineLoop(core, emit, check=check)
        self._loop.start()

    def take(self, work: W) -> None:
        """Queues work for the core."""
        self._running.submit(work)

    def refuse(self, work: Task, error: ForebayError) -> None:
        """Answers what is not for this engine."""
        assert self._emit is not None, "the engine has not been started"
        self._emit([(work.gateway, replies.failed((work.request_id, work.attempt), error))])

    def cancel(self, request_id: str, attempt: int, index: int | None = None) -> None:
        self._running.cancel(request_id, attempt, index)

    def cancel_gateway(self, gateway: str) -> None:
        self._running.cancel_gateway(gateway)

    def load(self) -> Load:
        return Load() if self._loop is None else self._loop.load()

    def stop(self, timeout_s: float) -> None:
        if self._loop is not None:
            self._loop.stop(timeout_s)

    @property
    def _running(self) -> EngineLoop[W]:
        assert self._loop is not None, "the engine has not been started"
        return self._loop
