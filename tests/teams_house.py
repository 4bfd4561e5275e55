"""What the tests of teams share: a directory with a few teams, and gateways that mirror it."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from forebay_gateway.backend import Backend, connect
from forebay_gateway.teams import keymaker
from forebay_gateway.teams.directory import Directory, decoded, encode
from forebay_gateway.teams.records import Entry, Key, Organisation, Team, User, place_of
from forebay_gateway.teams.store import Change
from forebay_shared.settings import GatewaySettings, Secret
from redis_house import WaitUntil

NOW = 1_800_000_000.0
PEPPER = b"p" * 32

BASICS: tuple[Entry, ...] = (
    Organisation(id="acme"),
    Team(id="red", organisation="acme"),
    Team(id="blue", organisation="acme"),
    User(id="ann", team="red", role="admin"),
)


def filled(*entries: Entry) -> Directory:
    """A directory with the basics and these."""
    directory = Directory()
    values = [(place_of(e), f"{n + 1} {encode(e)}") for n, e in enumerate((*BASICS, *entries))]
    directory.replace(len(values), decoded(values))
    return directory


def key_of(team: str = "red", **fields: Any) -> tuple[Key, str]:
    """A key's record and what its owner sends."""
    return keymaker.make(Key(id="0", team=team, **fields), PEPPER, NOW)


@asynccontextmanager
async def gateways(
    url: str, count: int, wait_until: WaitUntil, **settings: Any
) -> AsyncIterator[list[Backend]]:
    """Gateways' backends that have loaded the directory and read the stream of its changes."""
    async with contextlib.AsyncExitStack() as stack:
        given = GatewaySettings(
            **{"redis_url": Secret(url), "key_pepper": Secret(PEPPER.decode()), **settings}
        )
        backends = [await stack.enter_async_context(connect(given)) for _ in range(count)]
        for backend in backends:
            await wait_until(lambda backend=backend: backend.teams.sync.fresh_at is not None)
            await wait_until(lambda backend=backend: backend.connected)
        yield backends


async def write(backend: Backend, entries: Sequence[Entry]) -> int:
    changes = [Change(place_of(entry), entry) for entry in entries]
    return await backend.teams.store.commit(changes, who="test", what="{}")
