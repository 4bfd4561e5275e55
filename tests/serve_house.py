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
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import response_transcripts
from forebay_gateway.admin.client import AdminClient
from forebay_shared.settings import Secret
from patience import PATIENCE_S, START_S
from transcripts import check_stream

READY = re.compile(r"forebay ready on (http://\S+)  model (\S+)  key (\S+)\n")
STOP_S = 5.0
"""So long a server takes to end at most, on a machine that it has for itself."""
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

    def wait_ready(self, timeout_s: float = START_S) -> "Serve":
        until(lambda: bool(self.stdout) or self.process.poll() is not None, timeout_s)
        match = READY.fullmatch("".join(self.stdout))
        assert match, (self.stdout, self.stderr)
        self.url, self.model, self.key = match.groups()
        return self

    def wait_end(self, timeout_s: float = PATIENCE_S) -> int:
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
        options = {"max_retries": 0, "timeout": PATIENCE_S} | options
        http = openai.DefaultHttpxClient(transport=CheckedTransport())
        return openai.OpenAI(base_url=self.url, api_key=self.key, http_client=http, **options)

    def metric(self, name: str, **labels: str) -> float:
        """The sum over a metric's series with these labels, from the one scrape of the base URL; -1
        without any."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        found = [line for line in self._series(name) if all(each in line for each in wanted)]
        return sum(float(line.rpartition(" ")[2]) for line in found) if found else -1.0

    def mirrored(self) -> None:
        """Waits until every gateway has all changes of the directory that were made before."""
        self.agree("forebay_directory_revision")

    def agree(self, metric: str, least: float = 0.0) -> None:
        """Waits until all gateways say the same of something that only grows: not less than it was
        for any of them when the wait began, and `least`."""
        gateways = len(self.children("cli gateway"))
        told: dict[str, float] = {}

        def agreed() -> bool:
            """The one that is scraped speaks of itself first, and of this moment."""
            with ThreadPoolExecutor(2 * gateways) as pool:
                scrapes = pool.map(self._series, [metric] * 2 * gateways)
                for name, _, value in (scrape[0].rpartition(" ") for scrape in scrapes):
                    told[name] = max(float(value), told.get(name, least))
            return len(told) == gateways and len(set(told.values())) == 1

        until(agreed)

    def _series(self, name: str) -> list[str]:
        """The lines of a metric, from the one scrape of the base URL."""
        url = self.url.removesuffix("/v1") + "/metrics"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            lines = answer.read().decode().splitlines()
        return [line for line in lines if re.match(rf"{re.escape(name)}[{{ ]", line)]

    def interrupt(self) -> list[psutil.Process]:
        """As Ctrl-C does. Returns the processes that were there, itself included."""
        house = [psutil.Process(self.process.pid), *self.children()]
        self.process.send_signal(signal.SIGINT)
        return house

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()  # what is below dies with it
            self.wait_end()


def since_yesterday() -> str:
    """From where usage is asked for: the default is this month, which may have begun meanwhile."""
    return (datetime.now(UTC).date() - timedelta(days=1)).isoformat()


class Admin(AdminClient):
    """What it changes is on every gateway when the call returns."""

    def __init__(self, server: Serve, key: Secret) -> None:
        super().__init__(server.url, key)
        self._server = server

    def call(
        self, method: str, path: str, body: object = None, query: Mapping[str, object] | None = None
    ) -> dict[str, Any]:
        answer = super().call(method, path, body, query)
        if method != "GET":
            self._server.mirrored()
        return answer

    def usage(self, **query: str) -> list[dict[str, Any]]:
        return self.call("GET", "usage", query={"from": since_yesterday(), **query})["data"]


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


class _Checked(httpx2.SyncByteStream):
    """A stream that is looked at when it is closed. What was cut off, by client or server, promises
    nothing."""

    def __init__(self, stream: httpx2.SyncByteStream) -> None:
        self._stream = stream
        self._raw = b""

    def __iter__(self) -> Iterator[bytes]:
        for part in self._stream:
            self._raw += part
            yield part

    def close(self) -> None:
        self._stream.close()
        self.check()

    def check(self) -> None:
        raise NotImplementedError


class _CheckedStream(_Checked):
    """One event stream."""

    def __init__(self, stream: httpx2.SyncByteStream, asked: dict, chat: bool) -> None:
        super().__init__(stream)
        self._asked = asked
        self._chat = chat

    def check(self) -> None:
        last = self._raw.rpartition(b"data: ")[2]
        if last == b"[DONE]\n\n" or last.startswith(b'{"error"'):
            check_stream(
                self._raw,
                model=self._asked["model"],
                n=self._asked.get("n", 1),
                include_usage=self._asked.get("stream_options", {}).get("include_usage", False),
                chat=self._chat,
            )


class _CheckedResponse(_Checked):
    """The event stream of a response; `whole` when it was read from its first event on."""

    def __init__(self, stream: httpx2.SyncByteStream, *, whole: bool) -> None:
        super().__init__(stream)
        self._whole = whole

    def check(self) -> None:
        last = self._raw.rstrip(b"\n").rpartition(b"\n\n")[2]
        if self._whole and last.startswith(response_transcripts.LAST):
            background = b'"type":"response.queued"' in self._raw
            response_transcripts.check_events(self._raw, background=background)


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition stayed false"
        time.sleep(0.01)


def gone(processes: list[psutil.Process], timeout_s: float = PATIENCE_S) -> None:
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
