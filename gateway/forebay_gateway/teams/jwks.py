"""Keeps the public keys of every issuer of tokens: reads them from time to time, and for new ones.

What it reads is bounded in time and size; how often it asks, and how long old keys speak for an
issuer that is away, are too. It knows no token and no caller.
"""

import asyncio
import logging
import math
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast

from forebay_shared.errors import OverloadedError

from forebay_gateway.teams.directory import Directory
from forebay_gateway.teams.records import Issuer

if TYPE_CHECKING:
    from jwt import PyJWK

    from forebay_gateway.teams.tokens import KeySet

log = logging.getLogger(__name__)

REFRESH_S = 300.0
RETRY_S = 5.0
STALE_S = 3600.0
"""So long the last keys that were read speak for an issuer whose keys cannot be read."""
FETCH_S = 5.0
MAX_BYTES = 262_144
ASKS = 4.0
"""Times in a row that an unknown key makes its issuer be asked; then once in ASK_AGAIN_S."""
ASK_AGAIN_S = 15.0
MAX_WAITING = 256
"""Requests that wait for keys at once."""
TICK_S = 1.0


class KeyKeeper:
    """The keys of the directory's issuers.

    `version` changes when any set of keys is read anew; `failures` counts what could not be read.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._sources: dict[str, _Source] = {}
        self._wake = asyncio.Event()
        self._waiting = 0
        self.version = 0
        self.failures = 0

    async def key(self, issuer: Issuer, kid: str, algorithm: str) -> "PyJWK | None":
        """The issuer's key of that id, for that algorithm; None when it has none.

        An unknown one makes the keys be read again, as often as that is allowed. Raises
        OverloadedError while the issuer's keys are not known.
        """
        source = self._source(issuer)
        clock = asyncio.get_running_loop().time
        found = source.find(kid, algorithm, clock())
        if found is None and source.is_busy:  # a reading that began before the key was there
            await self._read_again(source)
            found = source.find(kid, algorithm, clock())
        if found is None and source.may_ask(clock()):
            await self._read_again(source)
            found = source.find(kid, algorithm, clock())
        if found is None and not source.speaks(clock()):
            raise OverloadedError(
                "Tokens of this issuer cannot be checked now. Please retry.", retry_after_s=2.0
            )
        return found

    async def run(self) -> None:
        """Reads what is due; for ever."""
        async with asyncio.TaskGroup() as readings:
            while True:
                self._wake.clear()
                now = asyncio.get_running_loop().time()
                for source in list(self._present()):
                    if source.is_due(now):
                        source.begin(now)
                        readings.create_task(self._read(source), name="jwks")
                try:
                    async with asyncio.timeout(TICK_S):
                        await self._wake.wait()
                except TimeoutError:
                    pass

    def _present(self) -> "Iterator[_Source]":
        """The sources of the issuers that are there; the others are forgotten."""
        issuers = self._directory.issuers().values()
        ids = {issuer.id for issuer in issuers if not issuer.disabled}
        self._sources = {name: each for name, each in self._sources.items() if name in ids}
        for issuer in issuers:
            if not issuer.disabled:
                yield self._source(issuer)

    def _source(self, issuer: Issuer) -> "_Source":
        source = self._sources.get(issuer.id)
        if source is None or source.location != issuer.jwks:
            source = self._sources[issuer.id] = _Source(issuer.id, issuer.jwks)
        return source

    async def _read_again(self, source: "_Source") -> None:
        if self._waiting >= MAX_WAITING:
            raise OverloadedError("Too many tokens wait for their keys.", retry_after_s=2.0)
        news = source.news
        if not source.is_busy:
            source.wanted = True
            self._wake.set()
        self._waiting += 1
        try:
            async with asyncio.timeout(FETCH_S + TICK_S):
                await news.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting -= 1

    async def _read(self, source: "_Source") -> None:
        try:
            async with asyncio.timeout(FETCH_S):
                keys = await _keys_at(source.location)
        except Exception as error:  # whatever is wrong there must not end this process
            self.failures += 1
            if not source.failing:
                log.warning("issuer %s: no keys: %s", source.name, type(error).__name__)
            source.failing = True
        else:
            self.version += 1
            source.took(keys, asyncio.get_running_loop().time())
        finally:
            source.end()


class _Source:
    """Where an issuer's keys are, and the last ones that were read there."""

    def __init__(self, name: str, location: str) -> None:
        self.name = name
        self.location = location
        self.wanted = False
        self.failing = False
        self.news = asyncio.Event()
        self._keys: KeySet | None = None
        self._read_at = -math.inf
        self._tried_at = -math.inf
        self.is_busy = False
        self._asks = ASKS
        self._asked_at = -math.inf

    def find(self, kid: str, algorithm: str, now: float) -> "PyJWK | None":
        return self._keys.find(kid, algorithm) if self._keys and self.speaks(now) else None

    def speaks(self, now: float) -> bool:
        """Its keys are young enough to say yes and no."""
        return now - self._read_at <= STALE_S

    def may_ask(self, now: float) -> bool:
        """Whether an unknown key may make it be read again, or does already; counts."""
        if self.wanted:
            return True
        self._asks = min(ASKS, self._asks + (now - self._asked_at) / ASK_AGAIN_S)
        self._asked_at = now
        if self._asks < 1:
            return False
        self._asks -= 1
        return True

    def is_due(self, now: float) -> bool:
        if self.is_busy:
            return False
        late = now - self._read_at >= REFRESH_S and now - self._tried_at >= RETRY_S
        return self.wanted or late

    def begin(self, now: float) -> None:
        self.is_busy, self.wanted = True, False
        self._tried_at = now

    def took(self, keys: "KeySet", now: float) -> None:
        self._keys, self._read_at = keys, now
        self.failing = False

    def end(self) -> None:
        self.is_busy = False
        news, self.news = self.news, asyncio.Event()
        news.set()


async def _keys_at(location: str) -> "KeySet":
    """Raises OSError, ValueError and what the HTTP client raises."""
    tokens = await asyncio.to_thread(_tokens)
    if location.startswith("/"):
        document = await asyncio.to_thread(_file, location)
    else:
        document = await _fetched(location)
    return cast("KeySet", tokens.read_keys(document))


def _tokens() -> ModuleType:
    """Loaded off the event loop: these modules take long. aiohttp is loaded with it."""
    import_module("aiohttp")
    from forebay_gateway.teams import tokens

    return tokens


def _file(path: str) -> bytes:
    with Path(path).open("rb") as file:
        document = file.read(MAX_BYTES + 1)
    if len(document) > MAX_BYTES:
        raise ValueError("too large")
    return document


async def _fetched(url: str) -> bytes:
    import aiohttp

    async with (
        aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session,
        session.get(url, allow_redirects=False) as answer,
    ):
        if answer.status != 200:
            raise ValueError(f"status {answer.status}")
        document = b""
        async for part in answer.content.iter_chunked(65_536):
            document += part
            if len(document) > MAX_BYTES:
                raise ValueError("too large")
        return document
