"""A real `forebay serve`: its processes, its address, its clients, which check every stream."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import openai
import psutil
import response_transcripts
from transcripts import check_stream

READY = re.compile(r"forebay ready on (http://\S+)  model (\S+)  key (\S+)\n")
STOP_S = 5.0
FAILURES = (openai.APIError, httpx2.HTTPError)
"""What the SDK raises when a server dies under it; of a cut stream it passes its library's own."""


class Serve:
    """One `forebay serve` of the test's own. `url`, `model` and `key` are those it printed."""

    def __init__(self, *arguments: str, data: Path, **variables: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "forebay_shared.cli", "serve", *arguments, "--data-dir", data],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
        )
        self.stdout: list[str] = []
        self.stderr: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(stream, into), daemon=True)
            for stream, into in (
                (self.process.stdout, self.stdout),
                (self.process.stderr, self.stderr),
            )
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(stream, into: list[str]) -> None:
        into.extend(iter(stream.readline, ""))

    def wait_ready(self, timeout_s: float = 60.0) -> "Serve":
        until(lambda: bool(self.stdout) or self.process.poll() is not None, timeout_s)
        match = READY.fullmatch("".join(self.stdout))
        assert match, (self.stdout, self.stderr)
        self.url, self.model, self.key = match.groups()
        return self

    def wait_end(self, timeout_s: float = 60.0) -> int:
        status = self.process.wait(timeout_s)
        for reader in self._readers:
            reader.join(timeout_s)
        return status

    def children(self, name: str = "") -> list[psutil.Process]:
        """Its children whose command holds `name`: gateway, worker or redis-server."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in found if name in " ".join(_command(child))]

    def client(self, **options) -> openai.OpenAI:
        """A client under which every stream that comes to its end is checked."""
        options = {"max_retries": 0, "timeout": 30.0} | options
        http = openai.DefaultHttpxClient(transport=CheckedTransport())
        return openai.OpenAI(base_url=self.url, api_key=self.key, http_client=http, **options)

    def metric(self, name: str) -> float:
        """The sum over a metric's series, from the one scrape of the base URL; -1 without any."""
        with urllib.request.urlopen(
            self.url.removesuffix("/v1") + "/metrics", timeout=10
        ) as answer:
            lines = answer.read().decode().splitlines()
        found = [line for line in lines if re.match(rf"{re.escape(name)}[{{ ]", line)]
        return sum(float(line.rpartition(" ")[2]) for line in found) if found else -1.0

    def interrupt(self) -> list[psutil.Process]:
        """As Ctrl-C does. Returns the processes that were there, itself included."""
        house = [psutil.Process(self.process.pid), *self.children()]
        self.process.send_signal(signal.SIGINT)
        return house

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()  # what is below dies with it
            self.wait_end()


class CheckedTransport(httpx2.HTTPTransport):
    """Passes answers on; holds each event stream against the contract when it is over."""

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        response = super().handle_request(request)
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            return response
        path = request.url.path
        if "/responses" in path:
            response.stream = _CheckedResponse(response.stream, whole=path.endswith("/responses"))
        else:
            chat = path.endswith("/chat/completions")
            response.stream = _CheckedStream(response.stream, json.loads(request.content), chat)
        return response


class _CheckedStream(httpx2.SyncByteStream):
    """One event stream. What was cut off, by client or server, promises nothing."""

    def __init__(self, stream: httpx2.SyncByteStream, asked: dict, chat: bool) -> None:
        self._stream = stream
        self._asked = asked
        self._chat = chat
        self._raw = b""

    def __iter__(self) -> Iterator[bytes]:
        for part in self._stream:
            self._raw += part
            yield part

    def close(self) -> None:
        self._stream.close()
        last = self._raw.rpartition(b"data: ")[2]
        if last == b"[DONE]\n\n" or last.startswith(b'{"error"'):
            check_stream(
                self._raw,
                model=self._asked["model"],
                n=self._asked.get("n", 1),
                include_usage=self._asked.get("stream_options", {}).get("include_usage", False),
                chat=self._chat,
            )


class _CheckedResponse(httpx2.SyncByteStream):
    """The event stream of a response; `whole` when it was read from its first event on."""

    def __init__(self, stream: httpx2.SyncByteStream, *, whole: bool) -> None:
        self._stream = stream
        self._whole = whole
        self._raw = b""

    def __iter__(self) -> Iterator[bytes]:
        for part in self._stream:
            self._raw += part
            yield part

    def close(self) -> None:
        self._stream.close()
        last = self._raw.rstrip(b"\n").rpartition(b"\n\n")[2]
        if self._whole and last.startswith(response_transcripts.LAST):
            background = b'"type":"response.queued"' in self._raw
            response_transcripts.check_events(self._raw, background=background)


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition stayed false"
        time.sleep(0.01)


def gone(processes: list[psutil.Process], timeout_s: float = STOP_S) -> None:
    """Waits until none of `processes` runs; a zombie of a dead parent counts as gone."""

    def none_runs() -> bool:
        return not any(
            p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes if _exists(p)
        )

    until(none_runs, timeout_s)


def _exists(process: psutil.Process) -> bool:
    try:
        process.status()
    except psutil.NoSuchProcess:
        return False
    return True


Starter = Callable[..., Serve]


@contextlib.contextmanager
def starting() -> Iterator[Starter]:
    """Starts servers, each on a free port and in a data directory of its own unless told."""
    directories: list[str] = []
    servers: list[Serve] = []

    def start(*arguments: str, data: Path | None = None, **variables: str) -> Serve:
        if data is None:
            directories.append(tempfile.mkdtemp(prefix="fb-"))
            data = Path(directories[-1])
        server = Serve("--port", "0", *arguments, data=data, **variables)
        servers.append(server)
        return server

    try:
        yield start
    finally:
        for server in servers:
            server.close()
        for directory in directories:
            shutil.rmtree(directory, ignore_errors=True)
