"""Child processes that are kept running: started again when they die, stopped in order.

A child has a session of its own, so a terminal's Ctrl-C reaches the parent alone, and it dies with
its parent even when that is killed (Linux). It knows nothing of what the programs do, but that exit
status 2 means: cannot start as asked, so do not try again.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

REFUSED: Final = 2
"""Exit status of a process that cannot start as asked and has said why in one line."""
MAX_FAILURES = 5
STEADY_S = 30.0
"""A child that lived this long has started well: its next death counts as its first."""
BACKOFF_S = (0.1, 0.5, 1.0, 2.0, 4.0)

_PR_SET_PDEATHSIG = 1


class ChildError(Exception):
    """A child cannot be kept running. `silent`: it has said why itself."""

    def __init__(self, message: str, *, silent: bool = False) -> None:
        super().__init__(message)
        self.silent = silent


@dataclass(frozen=True, kw_only=True)
class Program:
    """What to run. `feed` goes to its standard input; `orphaned` is its signal when we die."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    feed: bytes = b""
    fds: tuple[int, ...] = ()
    log: Path | None = None
    orphaned: signal.Signals = signal.SIGKILL


class Child:
    """One program and its current process."""

    def __init__(self, program: Program, say: Callable[[str], None]) -> None:
        self._program = program
        self._say = say
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()

    async def keep(self) -> None:
        """Runs the program again and again, until `stop`. Raises ChildError when it gives up."""
        failures = 0
        clock = asyncio.get_running_loop().time
        while not self._stopping.is_set():
            started = clock()
            self._process = await self._spawn()
            if self._stopping.is_set():  # while it was being started
                self._signal(self._process, signal.SIGKILL)
            status = await self._process.wait()
            if self._stopping.is_set():
                return
            if status == REFUSED:
                raise ChildError(f"{self._program.name} cannot start", silent=True)
            failures = 1 if clock() - started >= STEADY_S else failures + 1
            ending = f"{self._program.name} ended by {_ending(status)}"
            if failures > MAX_FAILURES:
                raise ChildError(f"{ending}, for the {failures}th time{self._where()}")
            self._say(f"{ending}: starting it again")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), BACKOFF_S[failures - 1])

    async def stop(self, timeout_s: float) -> None:
        """Asks the process to end, and kills it when it has not within `timeout_s`."""
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        self._signal(process, signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), timeout_s)
        except TimeoutError:
            self._signal(process, signal.SIGKILL)
            await process.wait()

    def kill(self) -> None:
        """Ends the process at once; a `stop` that waits for it returns."""
        self._stopping.set()
        if self._process is not None:
            self._signal(self._process, signal.SIGKILL)

    async def _spawn(self) -> asyncio.subprocess.Process:
        program = self._program
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(program.log.open("wb")) if program.log else None
            process = await asyncio.create_subprocess_exec(
                *program.command,
                env=program.environment,
                stdin=asyncio.subprocess.PIPE if program.feed else asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=program.fds,
                start_new_session=True,
                preexec_fn=_tether(program.orphaned),
            )
        if process.stdin is not None:
            with contextlib.suppress(ConnectionError):  # it died: `keep` sees that
                process.stdin.write(program.feed)
                await process.stdin.drain()
            process.stdin.close()
        return process

    @staticmethod
    def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)

    def _where(self) -> str:
        return f" (see {self._program.log})" if self._program.log else ""


def _ending(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    return f"signal {signal.Signals(-status).name}"


def _tether(number: signal.Signals) -> Callable[[], None] | None:
    """To run in the child before its program: the kernel sends it `number` when we die."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # we died between the fork and the line above
            os._exit(1)

    return tie
