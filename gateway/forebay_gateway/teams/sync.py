"""Keeps the directory's mirror in step with Redis: loads it, follows the changes, and asks.

A change is pushed on a stream, which the gateway's reader reads with the others. The revision is
also asked for 2.5 times a second, over a connection of its own; a change that was there the last
time and has not come since is fetched, so a push that is lost costs 0.8 s and no more.
It knows no HTTP.
"""

import asyncio
import logging
import math
import secrets
from collections.abc import Sequence
from typing import cast

from forebay_shared import keys
from forebay_shared.errors import BusError
from forebay_shared.link import LINK_ERRORS, ROUND_TRIP_S, Backoff, Link
from forebay_shared.packets import CHANGES
from forebay_shared.reader import Feed
from forebay_shared.wire import Changed

from forebay_gateway.teams.directory import Directory, decoded
from forebay_gateway.teams.secrets import fingerprint
from forebay_gateway.teams.stream import ask

log = logging.getLogger(__name__)

POLL_S = 0.4
STALE_S = 60.0
"""So long the mirror speaks for a Redis that is away. After it, nobody knows what holds."""
SCAN_COUNT = 1_000


class DirectorySync:
    """The one that writes the mirror.

    `fresh_at`: when the mirror was last known to be whole, in the loop's seconds; None: never yet.
    `pepper_differs`: the fleet began with another pepper, so keys made elsewhere open nothing here.
    """

    def __init__(self, url: str, directory: Directory, pepper: str = "") -> None:
        self._url = url
        self._link = Link(url, keys.directory())
        self._directory = directory
        self._given_pepper = pepper.encode()
        self._stale = asyncio.Event()
        self._advanced = asyncio.Event()
        self._polled = 0
        self._loading = False
        self._meanwhile: list[Changed] = []
        self.pepper = self._given_pepper
        self.pepper_differs = False
        self.fresh_at: float | None = None
        self.polls = 0
        self.reloads = 0

    @property
    def age_s(self) -> float:
        """Seconds since the mirror was last known to be whole; infinite before it was."""
        if self.fresh_at is None:
            return math.inf
        return asyncio.get_running_loop().time() - self.fresh_at

    def must_be_fresh(self, what: str) -> None:
        """Raises BusError, which names `what` cannot be known, where the mirror is too old."""
        if self.age_s > STALE_S:
            raise BusError(f"{what} cannot be checked now. Please retry.", retry_after_s=2.0)

    def feed(self) -> Feed[Changed]:
        """The stream of changes, for the gateway's reader."""
        return Feed(keys.changes(), CHANGES, self.receive, owned=False, reset=self._stale.set)

    def receive(self, changes: Sequence[Changed]) -> None:
        """Takes the changes of one packet; a gap makes everything be loaded again."""
        if self._loading:
            self._meanwhile.extend(changes)
        else:
            self._follow(changes)

    async def run(self) -> None:
        """Loads, then asks again and again whether it still has everything; for ever."""
        backoff = Backoff()
        try:
            while True:
                try:
                    await self._check()
                    backoff.reset()
                    await self._pause()
                except LINK_ERRORS as error:
                    log.warning("the directory's mirror lost redis: %s", type(error).__name__)
                    await backoff.wait()
        finally:
            await self._link.close()

    async def reached(self, revision: int, timeout_s: float) -> bool:
        """Waits until the mirror has a change; False when the time runs out."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._directory.revision < revision:
                    await self._advanced.wait()
        except TimeoutError:
            return False
        return True

    async def loaded(self) -> None:
        """Waits until the mirror was loaded a first time."""
        while self.fresh_at is None:
            await self._advanced.wait()

    async def make_pepper(self) -> bytes:
        """The key of the digests; the first caller of an installation draws it.

        Raises one of LINK_ERRORS.
        """
        if not self.pepper:
            drawn = secrets.token_hex(32)
            link = Link(self._url, keys.pepper())  # the other one is in the midst of a poll
            try:
                commands = [("SET", keys.pepper(), drawn, "NX"), ("GET", keys.pepper())]
                _, pepper = await ask(link, commands, ROUND_TRIP_S)
                self.pepper = cast(bytes, pepper)
                await self._compare_pepper(link)
            finally:
                await link.close()
        return self.pepper

    async def _check(self) -> None:
        before = self._directory.revision
        [answer] = await ask(self._link, [("GET", keys.directory_revision())], ROUND_TRIP_S)
        revision = int(cast(bytes, answer or b"0"))
        # A change that was there the last time and is not here will come by no push; and a Redis
        # that has fewer changes than we do has been put back.
        lags = self._directory.revision < self._polled or revision < before
        self._polled = revision
        self.polls += 1
        if self.fresh_at is None or self._stale.is_set() or lags:
            await self._load()
        self.fresh_at = asyncio.get_running_loop().time()

    async def _load(self) -> None:
        """Reads everything. The revision comes first: what changes meanwhile is followed after."""
        self._stale.clear()
        self._loading = True
        try:
            commands = [("GET", keys.directory_revision()), ("GET", keys.pepper())]
            first = await ask(self._link, commands, ROUND_TRIP_S)
            values = await self._scan()
            self.pepper = self._given_pepper or cast("bytes | None", first[1]) or b""
            await self._compare_pepper(self._link)
            records = await asyncio.to_thread(decoded, values.items())
            self._directory.replace(int(cast(bytes, first[0] or b"0")), records)
            self.fresh_at = asyncio.get_running_loop().time()
        finally:
            self._loading = False
            meanwhile, self._meanwhile = self._meanwhile, []
            self._follow(meanwhile)
        self.reloads += 1
        if self._directory.unreadable:
            log.warning("%d records of the directory are unreadable", self._directory.unreadable)

    async def _compare_pepper(self, link: Link) -> None:
        """The first gateway of a fleet leaves the fingerprint of its pepper for the others."""
        if not self.pepper:
            return
        mark, name = fingerprint(self.pepper), keys.pepper_mark()
        _, known = await ask(link, [("SET", name, mark, "NX"), ("GET", name)], ROUND_TRIP_S)
        differs = known != mark.encode()
        if differs and not self.pepper_differs:
            log.error(
                "the pepper of this gateway is not its fleet's: no key that another one made opens "
                "anything here. Give all of them one FOREBAY_KEY_PEPPER; where it was changed on "
                "purpose, delete %s from Redis",
                name,
            )
        self.pepper_differs = differs

    async def _scan(self) -> dict[str, str]:
        values: dict[str, str] = {}
        cursor = b"0"
        while True:
            scan = ("HSCAN", keys.directory(), cursor, "COUNT", SCAN_COUNT)
            [page] = await ask(self._link, [scan], ROUND_TRIP_S)
            cursor, pairs = cast("tuple[bytes, list[bytes]]", page)
            for name, record in zip(pairs[::2], pairs[1::2], strict=True):
                # Bytes that are no text make one record unreadable, not this process end.
                values[name.decode(errors="replace")] = record.decode(errors="replace")
            if cursor == b"0":
                return values

    def _follow(self, changes: Sequence[Changed]) -> None:
        whole = True
        for change in changes:
            whole = self._directory.follow(change) and whole
        if not whole or (changes and not self.pepper):
            self._stale.set()
        self._advanced.set()
        self._advanced = asyncio.Event()

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(POLL_S):
                await self._stale.wait()
        except TimeoutError:
            pass
