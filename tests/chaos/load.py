"""Clients over real HTTP, on a thread of their own: each answer is checked, each end is known.

A client that finds nobody listening tries the next gateway, as a balancer would. Nothing else is
tried twice: what went wrong is seen.
"""

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Collection, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import aiohttp
from requests_mix import Ask, Mix
from serve_house import until
from transcripts import Transcript, check_error

End = Literal["ok", "left", "refused", "broken", "cut", "unreached"]
"""How a request ended: answered, left by its client, refused with a status and an envelope, with an
error event in its stream, cut off by a connection that broke, or nobody listened."""

TIMEOUT_S = 90.0
T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """`id` is the answer's, "" when none came. `status` 0: no head came."""

    ask: Ask
    end: End
    status: int
    id: str
    code: str
    usage: dict | None
    seconds: float
    retry_after: str = ""


class Load:
    """A context manager: entering starts `clients` that ask one request after the other, leaving
    lets the open ones end. `clients` 0: only what `start` asks for.
    """

    def __init__(
        self, bases: Sequence[str], keys: Sequence[str], mix: Mix, rng: random.Random, clients: int
    ) -> None:
        self.outcomes: list[Outcome] = []
        self.violations: list[str] = []
        self.events = 0
        """Parts of answers that have come, over all clients."""
        self.asked = 0
        self._bases, self._keys, self._mix, self._rng = bases, keys, mix, rng
        self._clients = clients
        self._stopping = False
        self._loop = asyncio.new_event_loop()
        self._open_asks: set[Future[object]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="load", daemon=True)

    def __enter__(self) -> "Load":
        self._thread.start()
        self._session = self._run(self._open())
        for _ in range(self._clients):
            self._spawn(self._client(random.Random(self._rng.random())))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stopping = True
        try:
            if kind is None:
                self.finish()
        finally:
            self._run(self._close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def start(self, asks: Sequence[Ask]) -> None:
        """Sends these at once."""
        for ask in asks:
            self._spawn(self._ask(ask, self._rng.randrange(1 << 20)))

    def flow(self, events: int, timeout_s: float = 60.0) -> None:
        """Waits until so many more parts of answers have come: the random moment of a fault."""
        goal = self.events + events
        until(lambda: self.events >= goal, timeout_s)

    def finish(self, timeout_s: float = TIMEOUT_S) -> None:
        """Asks nothing more, and waits for every answer."""
        self._stopping = True
        until(lambda: not self._open_asks, timeout_s)

    @property
    def ends(self) -> Counter[str]:
        return Counter(outcome.end for outcome in self.outcomes)

    def only(self, *ends: End, statuses: Collection[int] = (503,)) -> None:
        """No violation; every request that was not to be refused ended in one of these ways, with
        one of these statuses if it was refused, and then with a hint when to come again."""
        assert self.outcomes, "nothing was asked"
        assert not self.violations, self.violations[:5]
        wrong = [one for one in self.outcomes if one.end not in ends and not self._meant(one)]
        refused = [o for o in self.outcomes if o.end == "refused" and not self._meant(o)]
        wrong += [one for one in refused if one.status not in statuses]
        wrong += [one for one in refused if one.status in (429, 503) and not one.retry_after]
        assert not wrong, [(one.end, one.status, one.code, one.ask.body) for one in wrong[:5]]

    @staticmethod
    def _meant(outcome: Outcome) -> bool:
        return outcome.end == "left" or outcome.ask.refused == outcome.status != 0

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._open_asks.add(future)
        future.add_done_callback(self._ended)

    def _ended(self, future: Future[object]) -> None:
        self._open_asks.discard(future)
        if not future.cancelled() and (error := future.exception()) is not None:
            self.violations.append(f"the client failed: {error!r}")

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_S)

    async def _open(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        return aiohttp.ClientSession(connector=connector, timeout=timeout)

    async def _close(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._session.close()

    async def _client(self, rng: random.Random) -> None:
        while not self._stopping:
            ask = self._mix(rng)
            if await self._ask(ask, rng.randrange(1 << 20)) in ("cut", "unreached", "refused"):
                await asyncio.sleep(0.05)  # a client that hammers proves nothing

    async def _ask(self, ask: Ask, draw: int) -> End:
        self.asked += 1
        began = time.monotonic()
        outcome = Outcome(ask, "unreached", 0, "", "", None, 0.0)
        for turn in range(len(self._bases)):
            base = self._bases[(draw + turn) % len(self._bases)]
            try:
                key = ask.key or self._keys[draw % len(self._keys)]
                outcome = await self._send(base, key, ask, began)
            except aiohttp.ClientConnectorError:
                continue
            except AssertionError as error:
                self.violations.append(f"{error} in an answer to {dict(ask.body)}")
            break
        self.outcomes.append(outcome)
        return outcome.end

    async def _send(self, base: str, key: str, ask: Ask, began: float) -> Outcome:
        headers = {"authorization": f"Bearer {key}"}
        raw = bytearray()
        status, retry = 0, ""
        try:
            async with self._session.post(base + ask.path, json=ask.body, headers=headers) as got:
                status, retry = got.status, got.headers.get("retry-after", "")
                left = ask.leave_after is not None and await self._leaves(got, raw, ask)
                if left:
                    end: End = "left"
                else:
                    async for part in got.content.iter_any():
                        raw += part
                        self.events += 1
                    end = "ok"
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ClientError, ConnectionError, TimeoutError):
            end = "cut"
        transcript, end, code = self._judge(ask, bytes(raw), status, end)
        return Outcome(
            ask, end, status, transcript.id, code, transcript.usage, time.monotonic() - began, retry
        )

    async def _leaves(self, got: aiohttp.ClientResponse, raw: bytearray, ask: Ask) -> bool:
        """Reads until the client has had enough; False when the answer ended before."""
        while raw.count(b"\n\n") < (ask.leave_after or 0):
            part = await got.content.readany()
            if not part:
                return False
            raw += part
            self.events += 1
        if got.status != 200 or got.content.at_eof():
            return False
        got.close()
        return True

    @staticmethod
    def _judge(ask: Ask, raw: bytes, status: int, end: End) -> tuple[Transcript, End, str]:
        """Holds what came against what may come."""
        if end in ("left", "cut"):
            part = raw if ask.streams and status == 200 else b""
            return ask.read_part(part), end, ""
        if status != 200:
            error = check_error(raw, status=status)
            expected = (ask.refused, 429, 500, 503, 504)
            assert status in expected, f"{status} where {ask.refused} is right: {error}"
            return Transcript(), "refused", error["code"]
        assert ask.refused is None, "what should be refused was answered"
        transcript = ask.read(raw)
        if transcript.error is not None:
            return transcript, "broken", transcript.error["code"]
        return transcript, end, ""
