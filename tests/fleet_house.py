"""Real gateways and workers as processes over one Redis: to kill, to stop, to drain, to look into.

A fleet sees which worker each request goes to by watching Redis, so that a test can end just the
one that answers it.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import IO

import httpx
from patience import PATIENCE_S, START_S
from redis import Redis
from redis_house import RedisServer
from serve_house import until
from storm_house import HeldPort

KEY = "sk-fleet"
_NAME = re.compile(r"worker (\w+) serves")
LONG_LEASE_S = 60.0
"""For tests where no worker is to be lost but by its own end: however a machine pauses."""
_RUN = """
import ctypes, os, signal, sys, threading, time
if lease := float(os.environ.pop("TEST_LEASE_S", 0)):
    from forebay_shared import keys
    keys.LEASE_MS = int(lease * 1000)  # before anybody else has read it
if pace := float(os.environ.pop("TEST_PACE_S", 0)):
    from forebay_worker.engine.core import EngineCore
    step = EngineCore.step
    def paced(core):
        time.sleep(pace)
        step(core)
    EngineCore.step = paced
if os.environ.pop("TEST_HANG", ""):
    from forebay_worker.engines.echo.core import EchoCore
    advance, hangs = EchoCore.step, threading.Event()
    def hanging(core):
        while hangs.is_set():
            time.sleep(1)
        return advance(core)
    EchoCore.step = hanging
    signal.signal(signal.SIGUSR2, lambda *_: hangs.set())
if poison := int(os.environ.pop("TEST_POISON", 0)):
    from forebay_worker.engines.echo.core import EchoCore
    advance, given = EchoCore._advance, []
    def deadly(core, sequence, now):
        if len(sequence.prompt) == poison:
            given.append(sequence)
            if given.count(sequence) == 5:
                os.kill(os.getpid(), signal.SIGKILL)
        return advance(core, sequence, now)
    EchoCore._advance = deadly
if os.environ.pop("TEST_SEIZE", ""):
    from forebay_worker.beacon import Presence
    renew, libc, mutex = Presence.renew, ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    def seize(presence):
        renew(presence)
        for _ in range(2):
            libc.pthread_mutex_lock(mutex)  # with the interpreter's lock
    Presence.renew = seize
if jump := float(os.environ.pop("TEST_CLOCK", 0)):
    real, offset = time.time, [0.0]
    time.time = lambda: real() + offset[0]
    signal.signal(signal.SIGUSR1, lambda *_: offset.__setitem__(0, jump))
else:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
if "TEST_FAULT" in os.environ:
    import sabotage
    sabotage.install()
from forebay_shared.cli import main
sys.exit(main())
"""


class Process:
    """One `forebay` process. Its log is on its standard error."""

    def __init__(
        self,
        *arguments: str,
        fds: tuple[int, ...] = (),
        log: IO[str] | None = None,
        **variables: str,
    ) -> None:
        self._log = log or tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-c", _RUN, *arguments],
            env={**os.environ, **variables},
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            pass_fds=fds,
        )

    @property
    def log(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def jump(self) -> None:
        """Its wall clock is TEST_CLOCK seconds off from now on, if that was given."""
        self.send(signal.SIGUSR1)

    def hang(self) -> None:
        """Its next step does not end, if TEST_HANG was given."""
        self.send(signal.SIGUSR2)

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.alive:
            self.kill()
        self._log.close()


class Worker(Process):
    @property
    def name(self) -> str:
        """Of this incarnation; "" until it serves."""
        found = _NAME.search(self.log)
        return found[1] if found else ""


class Gateway(Process):
    """Listens on `port` of `host`, or on one that is kept for it and for who comes after it."""

    def __init__(
        self,
        *arguments: str,
        host: str = "127.0.0.1",
        port: int = 0,
        log: IO[str] | None = None,
        **variables: str,
    ) -> None:
        self._held = None if port else HeldPort(host)
        listener = socket.create_server((host, self._held.number if self._held else port))
        self.port = listener.getsockname()[1]
        self.base = f"http://{host}:{self.port}"
        fd = listener.fileno()
        super().__init__("gateway", "--fd", str(fd), *arguments, fds=(fd,), log=log, **variables)
        listener.close()

    def close(self) -> None:
        super().close()
        if self._held is not None:
            self._held.close()

    def get(self, path: str, key: str = KEY) -> httpx.Response | None:
        """None when nobody answers."""
        headers = {"authorization": f"Bearer {key}"}
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(self.base + path, timeout=30, headers=headers)
        return None

    def post(self, path: str, body: dict) -> httpx.Response:
        return httpx.post(self.base + path, json=body, timeout=PATIENCE_S, headers=AUTH)

    @property
    def ready(self) -> bool:
        answer = self.get("/ready")
        return answer is not None and answer.status_code == 200

    def metric(self, name: str, **labels: str) -> float:
        """The sum over the series with these labels in the one scrape; 0 without any."""
        answer = self.get("/metrics")
        assert answer is not None
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            float(line.rpartition(" ")[2])
            for line in answer.text.splitlines()
            if re.match(rf"{re.escape(name)}[{{ ]", line) and all(w in line for w in wanted)
        )


AUTH = {"authorization": f"Bearer {KEY}"}


class Fleet:
    """The processes of one test, and where its requests go."""

    def __init__(self, redis: RedisServer, lease_s: float = 0.0) -> None:
        self.redis = redis
        self._lease_s = lease_s
        self.processes: list[Process] = []
        self.placements: list[str] = []
        """The worker of each attempt of a generation, in order, once it is watched."""
        self._watcher: threading.Thread | None = None

    def watch(self) -> None:
        """Has Redis tell every command: slow, so not under load."""
        self._watching = Redis(
            unix_socket_path=str(self.redis.socket), socket_timeout=None
        ).monitor()
        self._watching.__enter__()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def gateway(
        self,
        *arguments: str,
        host: str = "127.0.0.1",
        port: int = 0,
        log: IO[str] | None = None,
        **variables: str,
    ) -> Gateway:
        one = Gateway(*arguments, host=host, port=port, log=log, **self._variables(variables))
        self.processes.append(one)
        return one

    def worker(self, *arguments: str, log: IO[str] | None = None, **variables: str) -> Worker:
        """`arguments` are those of `forebay worker`."""
        one = Worker("worker", *arguments, log=log, **self._variables(variables))
        self.processes.append(one)
        return one

    def echo(self, delay_ms: float = 10.0, *arguments: str, **variables: str) -> Worker:
        options = ("--engine", "echo", "--echo-delay-ms", str(delay_ms))
        return self.worker(*options, *arguments, **variables)

    @property
    def workers(self) -> dict[str, Worker]:
        """Those that serve, by name."""
        found = [one for one in self.processes if isinstance(one, Worker) and one.alive]
        return {one.name: one for one in found if one.name}

    def ready(self, gateway: Gateway, workers: int) -> None:
        """Waits until the gateway counts so many workers."""
        until(
            lambda: gateway.ready and gateway.metric("forebay_workers") >= workers,
            START_S,
        )

    def holder(self, attempt: int) -> Worker:
        """The worker of attempt number `attempt` of all, from 0, once it was placed."""
        until(lambda: len(self.placements) > attempt)
        return self.workers[self.placements[attempt]]

    def close(self) -> None:
        for one in self.processes:
            one.close()
        if self._watcher is not None:
            self._watching.connection.disconnect()
            self._watcher.join()

    def _variables(self, more: dict[str, str]) -> dict[str, str]:
        lease = {"TEST_LEASE_S": str(self._lease_s)} if self._lease_s else {}
        return {"FOREBAY_REDIS_URL": self.redis.url, "FOREBAY_API_KEY": KEY} | lease | more

    def _watch(self) -> None:
        with contextlib.suppress(Exception):  # Redis has ended
            while True:
                command = str(self._watching.next_command()["command"])
                found = re.match(r"XADD fb:\{w:(\w+)\}:work ", command)
                if found:
                    self.placements += [found[1]] * command.count("type\\xa6submit")


@contextlib.contextmanager
def fleet(redis: RedisServer, lease_s: float = 0.0) -> Iterator[Fleet]:
    """`lease_s` takes the place of the usual lease of a process."""
    house = Fleet(redis, lease_s)
    house.watch()
    try:
        yield house
    finally:
        house.close()


def stream(
    gateway: Gateway, path: str, body: dict, seen: Callable[[int], None] = lambda _: None
) -> bytes:
    """The raw bytes of an event stream; `seen(k)` is called when k events have come."""
    raw, count = b"", 0
    with (
        httpx.Client(timeout=PATIENCE_S, headers=AUTH) as client,
        client.stream("POST", gateway.base + path, json={**body, "stream": True}) as answer,
    ):
        if answer.status_code != 200:
            answer.read()
        assert answer.status_code == 200, answer.text
        for part in answer.iter_raw():
            raw += part
            while count < raw.count(b"\n\n"):
                count += 1
                seen(count)
    return raw
