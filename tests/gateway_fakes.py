"""A stand-in for Redis and workers, inside the process: it plays scripted tokens to the HTTP side.

It exists so that the API's tests can say exactly which tokens come, in which grouping, and what
fails when. `tests/system` runs the same contract against the real Redis and real workers.
"""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Self

import httpx
import uvloop
from forebay_gateway.app import create_app
from forebay_gateway.jobs import Job
from forebay_gateway.ledger import Event
from forebay_gateway.main import server_config
from forebay_gateway.server import Server
from forebay_gateway.teams.teams import Teams
from forebay_shared.bus import Publisher
from forebay_shared.errors import ModelNotFoundError, NoWorkerError
from forebay_shared.models import (
    CAP_GENERATE,
    CAP_LOGIT_BIAS,
    CAP_LOGPROBS,
    CAP_PENALTIES,
    ModelCard,
    content_hash,
)
from forebay_shared.settings import GatewaySettings
from forebay_shared.supervise import Supervisor
from forebay_shared.telemetry import GatewayMetrics
from forebay_shared.wire import Delta, Done, FinishReason, Started, TokenLogprobs, Usage
from patience import PATIENCE_S
from prometheus_client import CollectorRegistry, generate_latest
from tokenizer_house import ANSWER, byte_level_tokenizer
from tokenizers import Tokenizer

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MODEL = "org/scripted"


@dataclass(frozen=True)
class Play:
    """What one sequence does. Tokens come in groups; `error` comes after `error_after` tokens."""

    token_ids: Sequence[int]
    group: int = 1
    error: Exception | None = None
    error_after: int = 0
    hang_after: int | None = None
    pause_at: Sequence[int] = ()
    """Positions to wait at, for as long as they are listed."""
    reason: FinishReason | None = "stop"
    """How it ends when it is not cut; None: it never says that it ended."""
    stop_token: int = 2


class ScriptedGeneration:
    """A running job that plays its script, one group of tokens per call of `events`."""

    def __init__(self, backend: "ScriptedBackend", job: Job) -> None:
        self._backend = backend
        self.job = job
        self._plays = [backend.script(job, index) for index in range(job.n)]
        self._position = [0] * job.n
        self._open = set(range(job.n))
        self._started = False
        self._cached = min(2, len(job.prompt))

    async def __aenter__(self) -> Self:
        self._backend.running[self.job.request_id] = self
        return self

    async def __aexit__(self, *_: object) -> None:
        self._backend.running.pop(self.job.request_id)
        if self._open:
            self._backend.cancelled.append(self.job.request_id)

    @property
    def taken(self) -> bool:
        return self._backend.takes

    def stop(self, index: int) -> None:
        self._open.discard(index)
        self._backend.stopped += 1

    def reasoned(self, tokens: int) -> None:
        self._backend.reasoned = tokens

    async def events(self) -> list[Event]:
        await asyncio.sleep(0)
        request_id = self.job.request_id
        events: list[Event] = []
        if not self._started:
            self._started = True
            events += [
                Started(request_id, 1, index, self._cached, 0.0) for index in sorted(self._open)
            ]
        for index in sorted(self._open):
            events += await self._step(index)
        return events

    async def _step(self, index: int) -> list[Event]:
        play, at = self._plays[index], self._position[index]
        while at in play.pause_at:  # noqa: ASYNC110  the test that changes it has another thread
            await asyncio.sleep(0.001)
        if play.error is not None and at >= play.error_after:
            raise play.error
        if play.hang_after is not None and at >= play.hang_after:
            await asyncio.Event().wait()
        limit = self.job.sampling.max_tokens
        ids = list(play.token_ids[at : min(at + play.group, limit)])
        self._position[index] += len(ids)
        request_id, events = self.job.request_id, list[Event]()
        if ids:
            logprobs = self._logprobs(ids)
            events.append(Delta(request_id, 1, index, at, ids, logprobs))
        at += len(ids)
        if at >= min(len(play.token_ids), limit) and play.error is None and play.hang_after is None:
            self._open.discard(index)
            cut = at >= limit
            usage = Usage(len(self.job.prompt), self._cached, at if cut else at + 1)
            reason, token = ("length", None) if cut else (play.reason, play.stop_token)
            if reason is not None:
                events.append(Done(request_id, 1, index, reason, token, usage))
        return events

    def _logprobs(self, ids: list[int]) -> list[TokenLogprobs] | None:
        if self.job.sampling.logprobs is None:
            return None
        others = range(5, 5 + self.job.sampling.logprobs)
        top = [(token, -1.0 - token) for token in others]
        return [TokenLogprobs(-0.5, ([(i, -0.5), *top])[: self.job.sampling.logprobs]) for i in ids]


@dataclass
class ScriptedBackend:
    """Roster, dispatcher, store and metrics in one. Change `script` to change what models say."""

    tokenizer: Tokenizer = field(default_factory=byte_level_tokenizer)
    template: str = TEMPLATE
    max_model_len: int = 512
    ready: bool = True
    known: bool = True
    """A worker was seen at some time, so that its model's name is known."""
    takes: bool = True
    """Jobs have a place in a worker's queue at once."""
    telemetry: GatewayMetrics = field(default_factory=lambda: GatewayMetrics(CollectorRegistry()))
    running: dict[str, ScriptedGeneration] = field(default_factory=dict)
    cancelled: list[str] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    stopped: int = 0
    reasoned: int = 0
    teams: Teams | None = None
    generation_defaults: dict[str, float] = field(default_factory=dict)
    capabilities: frozenset[str] = frozenset(
        {CAP_GENERATE, CAP_LOGPROBS, CAP_PENALTIES, CAP_LOGIT_BIAS}
    )

    redis_url: str = ""
    """A real Redis for what the HTTP side keeps there; without one, every call to it fails."""
    gateway: str = "scripted"

    def __post_init__(self) -> None:
        files = (self.tokenizer.to_str().encode(), self.template.encode())
        self._blobs = {content_hash(data): data for data in files}
        self.answer = self.tokenizer.encode(ANSWER, add_special_tokens=False).ids
        self.script: Callable[[Job, int], Play] = lambda job, index: Play(self.answer)

    @property
    def card(self) -> ModelCard:
        tokenizer, template = self._blobs
        return ModelCard(
            names=(MODEL, "scripted"),
            revision="r1",
            family="llama",
            engine="scripted",
            tokenizer=tokenizer,
            vocab_size=self.tokenizer.get_vocab_size(),
            max_model_len=self.max_model_len,
            block_size=16,
            created=1_700_000_000,
            eos_token_ids=(2,),
            chat_template=template,
            capabilities=self.capabilities,
            generation_defaults=dict(self.generation_defaults),
        )

    @asynccontextmanager
    async def connected(self) -> AsyncGenerator[None]:
        """The tasks and the connection to Redis that last as long as the server."""
        self.publisher = Publisher(self.redis_url or "unix:///none.sock", patience_s=1.0)
        async with Supervisor("redis") as connection:
            connection.start("publisher", self.publisher.run())
            async with Supervisor("background") as self.tasks:
                yield

    roster = property(lambda self: self)
    dispatcher = property(lambda self: self)
    store = property(lambda self: self)

    def cards(self) -> list[ModelCard]:
        return [self.card] if self.known else []

    def on_card(self, learner: Callable[[ModelCard], None]) -> None:
        """Its one card is known from the beginning."""

    def find(self, name: str) -> ModelCard:
        if not self.known:
            raise NoWorkerError("No worker is ready.", retry_after_s=1.0)
        if name not in self.card.names:
            raise ModelNotFoundError("The model does not exist.", param="model")
        return self.card

    def serves(self, card: ModelCard) -> bool:
        return self.ready

    def generate(self, job: Job) -> ScriptedGeneration:
        self.jobs.append(job)
        return ScriptedGeneration(self, job)

    async def blob(self, sha256: str) -> bytes:
        return self._blobs[sha256]

    async def metrics(self) -> str:
        return generate_latest(self.telemetry.registry).decode()


@contextmanager
def serving(backend: ScriptedBackend, settings: GatewaySettings) -> Generator[tuple[str, Server]]:
    """A real uvicorn server on loopback, in a thread of its own; yields its base URL and itself."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server: Server | None = None
    started = threading.Event()

    async def serve() -> None:
        nonlocal server
        async with backend.connected():
            app = create_app(settings, backend, lambda: server is not None and server.draining)
            server = Server(server_config(app, settings, backend.telemetry.http.slow_clients.inc))
            started.set()
            await server.serve(sockets=[listener])

    def main() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=main, name="gateway")
    thread.start()
    started.wait()
    try:
        assert server is not None
        yield f"http://127.0.0.1:{port}", server
    finally:
        assert server is not None
        server.should_exit = True
        thread.join()


@dataclass
class Api:
    """A running gateway under test, with a client for it."""

    url: str
    backend: ScriptedBackend
    http: httpx.Client
    server: Server

    def chat(self, **fields: object) -> httpx.Response:
        """POSTs a chat request with one short user message; `fields` override."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def complete(self, **fields: object) -> httpx.Response:
        return self.http.post("/v1/completions", json={"model": MODEL, "prompt": "hi", **fields})

    def reset(self) -> None:
        """Back to the plain script, books empty."""
        fresh = self.backend
        fresh.script = lambda job, index: Play(fresh.answer)
        fresh.ready = fresh.known = fresh.takes = True
        fresh.stopped = fresh.reasoned = 0
        fresh.cancelled.clear()
        fresh.jobs.clear()


@contextmanager
def running_api(
    backend: ScriptedBackend | None = None, settings: GatewaySettings | None = None
) -> Generator[Api]:
    """A gateway with a scripted backend, and a client that sends its first key."""
    backend = backend or ScriptedBackend()
    settings = settings or GatewaySettings()
    headers = {"authorization": f"Bearer {settings.api_key[0]}"} if settings.api_key else {}
    with (
        serving(backend, settings) as (url, server),
        httpx.Client(base_url=url, headers=headers, timeout=PATIENCE_S) as http,
    ):
        yield Api(url, backend, http, server)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Waits for a condition, not for time."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited in vain: {what}"
        time.sleep(0.005)


def exchange(url: str, sent: bytes) -> tuple[int, bytes, bytes]:
    """Sends bytes as they are; status, head and body of what comes back until the server closes."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        connection.sendall(sent)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.lower(), body


def request_bytes(method: str, path: str, headers: dict[str, str], body: bytes = b"") -> bytes:
    """One raw HTTP request that asks to close the connection behind it."""
    lines = {"host": "x", "connection": "close", "content-length": str(len(body))} | headers
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body
