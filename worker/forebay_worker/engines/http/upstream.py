"""The HTTP client of an upstream: streams, embeddings, probes; every wait and size bounded.

A cancelled call closes its connection, which is how an upstream learns of it. Nothing is tried
twice here: whoever sent the request may, as long as nothing of an answer is known. The key is in
the headers alone; no redirect is followed, so that it goes nowhere else.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress

import aiohttp
from forebay_shared.errors import DeadlineError, ForebayError, UpstreamError
from forebay_shared.settings import Secret, WorkerSettings
from forebay_shared.telemetry import TripReason

from forebay_worker.engines.http.breaker import Replica, choose
from forebay_worker.engines.http.chunks import Chunk, Events, chunk_of
from forebay_worker.engines.http.refusals import counts, refusal

log = logging.getLogger(__name__)

MAX_ERROR_BYTES = 64 * 2**10
MAX_STREAM_BYTES = 256 * 2**20
MAX_ANSWER_BYTES = 64 * 2**20
PROBE_TIMEOUT_S = 5.0
KEEP_ALIVE_S = 30.0
"""Less than most servers keep an idle connection: one that they have closed costs a retry."""
DONE = b"[DONE]"
END_S = 0.5
"""After its last event an answer ends at once, or its connection is closed."""


class UnreachableError(UpstreamError):
    """No connection, or one that broke."""


class Upstream:
    """All replicas of one upstream. Make it in the loop that uses it."""

    def __init__(self, settings: WorkerSettings, replicas: Sequence[Replica], key: Secret) -> None:
        self.replicas = replicas
        self._key = key
        self._first_s = settings.upstream_first_token_timeout_s
        self._idle_s = settings.upstream_idle_timeout_s
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=settings.max_num_seqs + len(replicas), keepalive_timeout=KEEP_ALIVE_S
            ),
            timeout=aiohttp.ClientTimeout(
                total=None,
                sock_connect=settings.upstream_connect_timeout_s,
                connect=settings.upstream_connect_timeout_s,
            ),
            headers=headers_of(key),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def close(self) -> None:
        await self._session.close()

    async def stream(
        self, path: str, body: bytes, begun: Callable[[], None]
    ) -> AsyncGenerator[list[Chunk]]:
        """What is said, all that came together; `begun` is called when the answer begins.

        Raises ForebayError. Closing the generator closes the connection.
        """
        loop = asyncio.get_running_loop()
        due = loop.time() + self._first_s
        async with self._call(path, body, due) as response:
            begun()
            events, received = Events(), 0
            while True:
                data = await self._read(response, due)
                received += len(data)
                if received > MAX_STREAM_BYTES:
                    raise UpstreamError("The upstream's answer is too long.")
                found = list(events.push(data)) if data else [events.rest()]
                chunks = [chunk_of(each) for each in found if each and each != DONE]
                if any(chunk.says for chunk in chunks):
                    due = loop.time() + self._idle_s
                if chunks:
                    yield chunks
                if DONE in found:
                    yield [Chunk(ended=True)]
                    await self._end(response)
                if not data or DONE in found:
                    return

    async def post(self, path: str, body: bytes, timeout_s: float) -> bytes:
        """The whole answer. Raises ForebayError."""
        due = asyncio.get_running_loop().time() + timeout_s
        async with self._call(path, body, due) as response:
            return await self._whole(response, due, MAX_ANSWER_BYTES)

    async def probe(self, replica: Replica) -> bool:
        """Whether it answers at all: what is refused is refused by somebody."""
        status = 599
        with suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                async with self._session.get(
                    f"{replica.url}/models", allow_redirects=False
                ) as response:
                    status = response.status
        replica.probed("failed" if status >= 500 else "refused" if status >= 400 else "ok")
        return replica.up

    @asynccontextmanager
    async def _call(
        self, path: str, body: bytes, due: float
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """One call of one replica; counts how it ended."""
        replica = choose(self.replicas, time.monotonic())
        replica.open += 1
        why: TripReason = "answer"
        try:
            with _translated():
                async with asyncio.timeout_at(due) as patience:
                    response = await self._session.post(
                        f"{replica.url}/{path}",
                        data=body,
                        headers={"Content-Type": "application/json"},
                        allow_redirects=False,
                    )
                    patience.reschedule(None)
            async with response:
                if response.status != 200:
                    why = "status"
                    data = await self._whole(response, due, MAX_ERROR_BYTES)
                    raise refusal(response.status, response.headers, data, self._key)
                yield response
                replica.succeeded()
        except ForebayError as error:
            if isinstance(error, DeadlineError):
                replica.failed(time.monotonic(), "timeout")
            elif counts(error):
                broke = isinstance(error, UnreachableError)
                replica.failed(time.monotonic(), "unreachable" if broke else why)
            else:
                replica.succeeded()
            raise
        finally:
            replica.open -= 1

    async def _read(self, response: aiohttp.ClientResponse, due: float) -> bytes:
        """What came; empty at the end. Raises DeadlineError when nothing did in time."""
        with _translated():
            async with asyncio.timeout_at(due):
                return await response.content.readany()

    async def _end(self, response: aiohttp.ClientResponse) -> None:
        """Reads on to the end of the answer, so that its connection can be used again."""
        due = asyncio.get_running_loop().time() + END_S
        with suppress(ForebayError):
            while await self._read(response, due):
                pass

    async def _whole(self, response: aiohttp.ClientResponse, due: float, most: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        while data := await self._read(response, due):
            size += len(data)
            if size > most:
                raise UpstreamError("The upstream's answer is too long.")
            parts.append(data)
        return b"".join(parts)


@contextmanager
def _translated() -> Generator[None]:
    """Errors of the transport as ours, without the addresses that they name."""
    try:
        yield
    except aiohttp.ServerTimeoutError:
        raise UnreachableError("The upstream cannot be reached in time.") from None
    except TimeoutError:
        raise DeadlineError("The upstream did not answer in time.") from None
    except aiohttp.ClientConnectorError:
        raise UnreachableError("The upstream cannot be reached.") from None
    except (aiohttp.ClientError, OSError) as error:
        log.info("an upstream's connection failed: %s", type(error).__name__)
        raise UnreachableError("The connection to the upstream broke.") from None


def headers_of(key: str) -> dict[str, str]:
    """Headers of every call. An answer that is packed could be any size."""
    headers = {"Accept-Encoding": "identity", "User-Agent": "forebay"}
    return headers | ({"Authorization": f"Bearer {key}"} if key else {})
