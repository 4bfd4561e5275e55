"""What a scrape says of limits, books and mirrors."""

import re
from collections.abc import Mapping

import pytest
from forebay_gateway.backend import Backend
from forebay_gateway.teams.records import Limits, Team
from forebay_gateway.teams.secrets import split
from forebay_shared import keys
from forebay_shared.errors import RateLimitError
from forebay_shared.wire import Usage
from patience import PATIENCE_S
from redis_house import RedisServer, WaitUntil
from teams_house import BASICS, gateways, key_of, write


async def scraped(backend: Backend) -> Mapping[str, float]:
    """Series by name and labels, without the gateway's."""
    text = re.sub(r'gateway="\w+",?', "", await backend.metrics())
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name.replace("{}", "").replace(",}", "}"): float(value) for name, _, value in lines}


async def admit(backend: Backend, sent: str, name: str) -> None:
    token = split(sent.encode())
    assert token is not None
    toll = backend.teams.identify(token, "").toll("echo", "echo")
    assert toll is not None
    permit = await toll.admit(name, 1, 1)
    permit.settle(Usage(1, 0, 1), "completed", 1)


async def test_a_scrape_tells_admissions_settlements_books_and_mirror(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    team = Team(id="red", organisation="acme", limits=Limits(requests_per_minute=3))
    key, sent = key_of()
    async with gateways(redis_server.url, 1, wait_until) as [backend]:
        await write(backend, [*BASICS, team, key])
        limiter, keeper = backend.teams.limiter, backend.teams.bookkeeper
        for number in range(3):
            await admit(backend, sent, f"r{number}")
        with pytest.raises(RateLimitError):
            await admit(backend, sent, "r3")
        await wait_until(lambda: limiter.unsettled == 0)
        await admit_and_settle_again(backend)
        await wait_until(lambda: keeper.folded >= 4 and keeper.stream_bytes > 0)
        series = await scraped(backend)
        assert series['forebay_admissions_total{outcome="admitted",scope=""}'] == 4
        assert series['forebay_admissions_total{outcome="refused",scope="team"}'] == 1
        assert series['forebay_admissions_total{outcome="refused",scope="key"}'] == 0
        assert series['forebay_settlements_total{outcome="settled"}'] == 3
        assert series['forebay_settlements_total{outcome="late"}'] == 1
        assert series['forebay_settlements_total{outcome="repeated"}'] == 1
        assert series["forebay_directory_revision"] == backend.teams.directory.revision > 0
        assert series["forebay_directory_records"] == len(BASICS) + 2
        assert series["forebay_directory_age_seconds"] < 60
        assert series["forebay_ledger_records_total"] == 4
        assert series["forebay_ledger_lag_seconds"] >= 0
        assert series["forebay_usage_stream_bytes"] > 100
        assert series["forebay_unsettled_requests"] == 0
        assert not re.search(rf"\b(red|acme|{key.id})\b", "".join(series)), "nobody is named"


async def admit_and_settle_again(backend: Backend) -> None:
    """A request whose hold is gone when it is settled, and which is settled twice."""
    key, sent = key_of("blue")
    await write(backend, [key])
    token = split(sent.encode())
    assert token is not None
    toll = backend.teams.identify(token, "").toll("echo", "echo")
    assert toll is not None
    permit = await toll.admit("gone", 1, 1)
    await backend.publisher.call("DEL", keys.holds(), keys.open_requests())
    for _ in range(2):
        permit.settle(Usage(1, 0, 1), "completed", 1)
        assert await backend.teams.limiter.drained(PATIENCE_S)
