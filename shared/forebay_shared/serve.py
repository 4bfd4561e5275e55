"""`forebay serve`: a private Redis, gateways and a worker for each model, supervised as one.

Binds the port itself and hands the socket to the gateways, so a busy port is known before anything
starts and no connection is refused while a gateway restarts. Secrets reach children through the
environment only. It knows processes and their order; it does not know HTTP's dialect, nor engines.
"""

import asyncio
import contextlib
import errno
import http.client
import os
import re
import signal
import socket
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, Final, TypeVar, cast

import msgspec

from forebay_shared.children import REFUSED, Child, ChildError, Program
from forebay_shared.embedded import (
    EmbeddedRedis,
    check_server,
    data_directory,
    embedded_redis,
)
from forebay_shared.flags import PREFIX, to_environment
from forebay_shared.settings import (
    GatewaySettings,
    ServeSettings,
    StartError,
    WorkerSettings,
)

S = TypeVar("S", GatewaySettings, WorkerSettings)

BACKLOG: Final = 2048
_SEES_WORKERS = re.compile(rb"^forebay_workers(?:{[^}]*})? (\d+)", re.MULTILINE)
POLL_S, GET_TIMEOUT_S = 0.1, 1.0
LEAVE_S, STOP_WORKER_S, STOP_REDIS_S = 1.5, 1.2, 0.7
"""A gateway has the drain time (1 s) and LEAVE_S: all in all less than the 5 s of the promise."""


def run(settings: ServeSettings) -> int:
    """Serves until a signal. Returns the exit status; raises StartError when it cannot start."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listener(settings.host, settings.port))
        data = stack.enter_context(data_directory(settings.data_dir))
        if not settings.api_key:
            settings = replace(settings, api_key=(data.api_key(),))
        if not settings.admin_key:
            settings = replace(settings, admin_key=data.admin_key())
        private = None
        if settings.redis_url:
            check_server(settings.redis_url, "--redis-url")
        else:
            private = stack.enter_context(embedded_redis(data))
            settings = replace(settings, redis_url=private.url)
        return asyncio.run(_House(settings, listener, private, data.lock).serve())


class _House:
    """The processes of one `forebay serve`."""

    def __init__(
        self,
        settings: ServeSettings,
        listener: socket.socket,
        private: EmbeddedRedis | None,
        lock: int,
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._address = _reachable(listener)
        self._private = private
        gateway = _gateway_program(settings, listener)
        self._redis = [Child(_redis_program(private, lock), _say)] if private else []
        self._gateways = [Child(gateway, _say) for _ in range(settings.gateways)]
        self._workers = [Child(_worker_program(settings), _say)]
        if settings.embedding_model:
            self._workers.append(Child(_embedding_program(settings), _say))
        self._stopping = asyncio.Event()

    async def serve(self) -> int:
        """Starts all, says when it is ready, waits for a signal, stops all."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        status = 0
        try:
            async with asyncio.TaskGroup() as group:
                opening = group.create_task(self._open(group), name="serve.open")
                await self._stopping.wait()
                opening.cancel()
                await self._stop()
        except* ChildError as errors:
            status = _report(errors)
        finally:
            await self._stop()
        return status

    async def _open(self, group: asyncio.TaskGroup) -> None:
        """Starts the children in order and says when they serve."""
        if self._private is not None:
            self._keep(group, self._redis)
            _say(f"redis {await self._redis_version(self._private)} is up, for this server alone")
        self._keep(group, self._gateways + self._workers)
        _say(f"the worker is loading {self._loaded}")
        await self._all_ready()
        name = await self._model_name()
        host = self._settings.host
        url = f"http://{f'[{host}]' if ':' in host else host}:{self._address[1]}/v1"
        print(f"forebay ready on {url}  model {name}  key {self._key}", flush=True)

    async def _stop(self) -> None:
        """Gateways first, so that no new work comes; Redis last, so that farewells are heard."""
        leaving = _stopped(self._gateways, self._settings.drain_timeout_s + LEAVE_S)
        await asyncio.sleep(0)  # from here on no gateway is started
        # While it is open here, who connects waits for a gateway that takes in nobody any more.
        self._listener.close()
        await leaving
        await _stopped(self._workers, STOP_WORKER_S)
        await _stopped(self._redis, STOP_REDIS_S)

    def _on_signal(self) -> None:
        """The first signal stops in order, the second at once."""
        if self._stopping.is_set():
            for child in self._gateways + self._workers + self._redis:
                child.kill()
            return
        _say("stopping")
        self._stopping.set()

    @staticmethod
    def _keep(group: asyncio.TaskGroup, children: Sequence[Child]) -> None:
        for child in children:
            group.create_task(child.keep(), name="serve.keep")

    async def _redis_version(self, private: EmbeddedRedis) -> str:
        while True:
            with contextlib.suppress(StartError):
                return await asyncio.to_thread(check_server, private.url, "redis", 1.0)
            await asyncio.sleep(POLL_S)

    @property
    def _loaded(self) -> str:
        if self._settings.engine != "native":
            return f"the engine {self._settings.engine}"
        return self._settings.model or "the demo model"

    @property
    def _key(self) -> str:
        return str(self._settings.api_key[0])

    async def _all_ready(self) -> None:
        """Waits for /ready, and until each gateway has counted every worker.

        Any gateway may take a connection: /metrics, which speaks for all of them, says the rest.
        """
        while True:
            if await self._get("/ready") is not None:
                metrics = await self._get("/metrics") or b""
                counts = [int(count) for count in _SEES_WORKERS.findall(metrics)]
                complete = [count for count in counts if count >= len(self._workers)]
                if len(complete) >= len(self._gateways):
                    return
            await asyncio.sleep(POLL_S)

    async def _model_name(self) -> str:
        """What the first gateway that knows the model calls it; of two, that which generates."""
        while True:
            models = msgspec.json.decode(await self._get("/v1/models") or b"{}", type=_Models)
            embedders = [each.id for each in models.data if "generate" not in each.capabilities]
            generators = [each.id for each in models.data if "generate" in each.capabilities]
            if len(self._workers) == 1 and models.data:
                return models.data[0].id
            if embedders and generators:
                _say(f"embeddings by the model {embedders[0]}")
                return generators[0]
            await asyncio.sleep(POLL_S)

    async def _get(self, path: str) -> bytes | None:
        """The body of a 200, None for anything else."""
        return await asyncio.to_thread(_get, self._address, path, self._key)


class _Model(msgspec.Struct):
    id: str
    capabilities: list[str] = []


class _Models(msgspec.Struct):
    data: list[_Model] = []


def _report(errors: ExceptionGroup[ChildError]) -> int:
    """Says what the children have not said themselves; returns the exit status."""
    status = 1
    for error in errors.exceptions:
        if isinstance(error, ChildError) and error.silent:
            status = REFUSED
        else:
            _say(str(error))
    return status


def _stopped(children: Sequence[Child], timeout_s: float) -> asyncio.Future[list[None]]:
    return asyncio.gather(*(child.stop(timeout_s) for child in children))


@contextmanager
def _listener(host: str, port: int) -> Generator[socket.socket]:
    """A listening socket. Raises StartError when the address cannot be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StartError(
                f"--port: {port} is in use by another process: stop it, or give another port"
            ) from None
        if error.errno == errno.EACCES:
            raise StartError(f"--port: {port} needs privileges: give one above 1023") from None
        raise StartError(f"--host: cannot listen on {host}: {error.strerror}") from None
    with bound:
        yield bound


def _reachable(listener: socket.socket) -> tuple[str, int]:
    """Where this machine reaches the socket: an address for all is no address to call."""
    host, port = cast("tuple[str, int]", listener.getsockname()[:2])
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
    return here.get(host, host), port


def _redis_program(private: EmbeddedRedis, lock: int) -> Program:
    return Program(
        name="redis",
        command=private.command,
        environment=_environment(),
        feed=private.config,
        fds=(lock,),
        log=private.log,
        orphaned=signal.SIGTERM,  # it writes its file first
    )


def _gateway_program(settings: ServeSettings, listener: socket.socket) -> Program:
    gateway = _narrowed(settings, GatewaySettings, fd=listener.fileno())
    return Program(
        name="gateway",
        command=(sys.executable, "-m", "forebay_shared.cli", "gateway"),
        environment=_environment() | to_environment(gateway),
        fds=(listener.fileno(),),
    )


def _worker_program(settings: ServeSettings, **more: Any) -> Program:
    # It stops after the gateways: nobody is left whom a drain could serve.
    worker = _narrowed(settings, WorkerSettings, drain_timeout_s=0.0, **more)
    return Program(
        name="worker",
        command=(sys.executable, "-m", "forebay_shared.cli", "worker"),
        environment=_environment() | to_environment(worker),
    )


def _embedding_program(settings: ServeSettings) -> Program:
    """The second worker. What was said of the first one's model does not hold for its own."""
    return _worker_program(
        settings,
        model=settings.embedding_model,
        served_model_name=settings.embedding_served_model_name,
        runner="pooling",
        engine="echo" if settings.engine == "echo" else "native",
        quantization="auto",
        kv_cache_dtype="auto",
        max_model_len=0,
        max_num_batched_tokens=0,
        enable_lora=False,
        lora_modules=(),
        chat_template="",
        generation_config="auto",
        override_generation_config="",
    )


def _narrowed(settings: ServeSettings, kind: type[S], **more: Any) -> S:
    """The fields of `settings` that a child of this kind has too."""
    ours: dict[str, Any] = {field.name: getattr(settings, field.name) for field in fields(kind)}
    return kind(**ours | more)


def _environment() -> dict[str, str]:
    """Ours, less our own settings: a child gets all of its settings from us."""
    return {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}


def _get(address: tuple[str, int], path: str, key: str) -> bytes | None:
    connection = http.client.HTTPConnection(*address, timeout=GET_TIMEOUT_S)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}"})
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return body if answer.status == http.HTTPStatus.OK else None


def _say(line: str) -> None:
    print(f"forebay: {line}", file=sys.stderr, flush=True)
