"""What it costs that a key belongs to a team: authorize, admit and settle, limits in four scopes.

    python benchmarks/teams.py [--rounds 5] [--quick] [--only revocation "alias change"] [--no-save]

    alone     one call at a time, a real Redis: p50 of authorize + admit + settle; processor time of
              the gateway for each; beside it one PING through the same publisher
    busy      32 callers at once: processor time of gateway and Redis for each, the books included
    trips     commands that one admitted and settled request takes: round trips to wait for
    flood     admissions per second of one Redis core at four scopes, by 256 at once from pipelines
    revocation, alias change
              from the admin call's answer until each of three gateways refuses the key, serves the
              new target: of 60 changes a round, see `teams_changes.py`

Goals: 0.4 ms, 60 us, 2 trips, 20,000 admissions/s, 1 s. What a gateway has to do for HTTP is in the
last two alone.
"""

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import uvloop
from bus import _process
from common import Figures, Results, cpu_seconds, parser
from forebay_gateway.backend import Backend, connect
from forebay_gateway.teams import keymaker
from forebay_gateway.teams.caller import Caller
from forebay_gateway.teams.limiter import Limiter
from forebay_gateway.teams.records import (
    Budget,
    Key,
    Limits,
    Model,
    Organisation,
    Price,
    Team,
    place_of,
)
from forebay_gateway.teams.secrets import split
from forebay_gateway.teams.store import Change
from forebay_shared.books import Hold, Rates, UsageRecord, admission
from forebay_shared.embedded import find_server
from forebay_shared.link import Link
from forebay_shared.scripts import Script
from forebay_shared.settings import GatewaySettings, Secret
from forebay_shared.wire import Usage
from teams_changes import alias_change, revocation

CALLERS, PIPELINE = 32, 256
MANY = 10**9
WIDE = Limits(requests_per_minute=MANY, tokens_per_minute=MANY)


class Size(NamedTuple):
    """Of one round: calls one at a time, of each caller, batches of a pipeline, changes."""

    calls: int
    calls_of_one: int
    batches: int
    changes: int


FULL, QUICK = Size(2_000, 200, 200, 60), Size(200, 20, 10, 6)


@asynccontextmanager
async def house() -> AsyncIterator[tuple[Backend, str, int]]:
    """A gateway's backend with one team, a key that belongs to it, and Redis's process id."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fb-")))
        url = f"unix://{directory}/redis.sock"
        options = ["--port", "0", "--unixsocket", f"{directory}/redis.sock", "--dir"]
        options += [str(directory), "--save", "", "--appendonly", "yes"]
        redis = _process(stack, [str(find_server()), *options])
        async with connect(GatewaySettings(redis_url=Secret(url))) as backend:
            while not backend.connected:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await backend.teams.sync.loaded()
            pepper = await backend.teams.sync.make_pepper()
            budget = Budget(amount=10**6)
            key, token = keymaker.make(Key(id="0", team="t", limits=WIDE), pepper, 0.0)
            entries = [
                Organisation(id="o", limits=WIDE, budgets=(budget,)),
                Team(id="t", organisation="o", limits=WIDE, budgets=(budget,)),
                Model(id="echo", limits=WIDE, price=Price(input=1, output=2)),
                key,
            ]
            changes = [Change(place_of(entry), entry) for entry in entries]
            await backend.teams.store.commit(changes, who="benchmark", what="{}")
            yield backend, token, redis


def identified(backend: Backend, token: str) -> Caller:
    parts = split(token.encode())
    assert parts is not None
    return backend.teams.identify(parts, "")


async def alone(calls: int) -> Figures:
    async with house() as (backend, token, redis):
        whole: list[float] = []
        pings: list[float] = []
        authorize = 0.0

        async def one(number: int) -> None:
            nonlocal authorize
            began = time.perf_counter()
            caller = identified(backend, token)
            authorize += time.perf_counter() - began
            toll = caller.toll("echo", "echo")
            assert toll is not None
            permit = await toll.admit(f"r{number}", 100, 100)
            permit.settle(Usage(100, 0, 50, 1.0, 1.0, 1.0), "completed", 1)
            whole.append(time.perf_counter() - began)

        for number in range(200):
            await one(-number)
        await backend.teams.limiter.drained(5)
        whole.clear()
        authorize = 0.0
        before, theirs = cpu_seconds([os.getpid()]), cpu_seconds([redis])
        for number in range(calls):
            await one(number)
        await backend.teams.limiter.drained(5)
        after, later = cpu_seconds([os.getpid()]), cpu_seconds([redis])
        for _ in range(calls):
            began = time.perf_counter()
            await backend.publisher.call("PING")
            pings.append(time.perf_counter() - began)
        return {
            "ping p50 ms": median(pings) * 1e3,
            "authorize us": authorize / calls * 1e6,
            "authorize+admit+settle p50 ms": median(whole) * 1e3,
            "gateway us/request": (after - before) / calls * 1e6,
            "redis us/request": (later - theirs) / calls * 1e6,
        }


async def busy(of_one: int) -> Figures:
    async with house() as (backend, token, redis):

        async def caller(name: str) -> None:
            for number in range(of_one):
                toll = identified(backend, token).toll("echo", "echo")
                assert toll is not None
                permit = await toll.admit(f"{name}-{number}", 100, 100)
                permit.settle(Usage(100, 0, 50, 1.0, 1.0, 1.0), "completed", 1)

        await asyncio.gather(*(caller(f"warm{n}") for n in range(CALLERS)))
        await backend.teams.limiter.drained(5)
        before, theirs = cpu_seconds([os.getpid()]), cpu_seconds([redis])
        await asyncio.gather(*(caller(f"{n}") for n in range(CALLERS)))
        await backend.teams.limiter.drained(5)
        after, later = cpu_seconds([os.getpid()]), cpu_seconds([redis])
        calls = CALLERS * of_one
        return {
            "gateway us/request": (after - before) / calls * 1e6,
            "redis us/request": (later - theirs) / calls * 1e6,
        }


async def trips() -> Figures:
    async with house() as (backend, token, _):
        toll = identified(backend, token).toll("echo", "echo")
        assert toll is not None
        permit = await toll.admit("first", 1, 1)  # it loads the script
        permit.settle(Usage(1, 0, 1), "completed", 1)
        await backend.teams.limiter.drained(5)
        calls = 0
        real = backend.publisher.call

        def counted(*command, **options):
            nonlocal calls
            calls += str(command[0]).startswith("EVAL")
            return real(*command, **options)

        backend.publisher.call = counted  # type: ignore[method-assign]
        permit = await toll.admit("second", 1, 1)
        waited = calls
        permit.settle(Usage(1, 0, 1), "completed", 1)
        return {"waited for": float(waited), "in all": float(calls)}


async def flood(batches: int) -> Figures:
    """The script alone: the gateway's own time would hide what Redis can do."""
    async with house() as (backend, token, redis):
        limiter: Limiter = backend.teams.limiter
        access = identified(backend, token).access
        assert access is not None
        plan = limiter._plan(access, "echo", time.time())
        hold = Hold(
            record=UsageRecord(id="x", team="t"), rates=Rates(), slots=plan.slots,
            input_tokens=100, output_tokens=100, cost=1, plan=plan.packed,
        )  # fmt: skip
        admit = Script("admit")
        names, arguments = admission(hold)
        assert len(plan.scopes) == 4
        link = Link(backend.teams.bookkeeper._url)
        await link.run([("SCRIPT", "LOAD", admit.text)], 5)

        def command(number: int):
            arguments[1] = f"f{number}"
            return ("EVALSHA", admit.sha, len(names), *names, *arguments)

        before = cpu_seconds([redis])
        for batch in range(batches):
            commands = [command(batch * PIPELINE + n) for n in range(PIPELINE)]
            answers = await link.run(commands, 10)
            assert all(answer[0] == 1 for answer in answers)  # type: ignore[index]
        busy = cpu_seconds([redis]) - before
        await link.close()
        return {"admissions/s of one core": PIPELINE * batches / busy}


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--quick", action="store_true", help="one round of few: under a minute")
    flags.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    options = flags.parse_args()
    rounds, size = (1, QUICK) if options.quick else (options.rounds, FULL)
    results = Results("teams", options)
    for name in options.only:
        results.add(name, {"forebay": [CASES[name](size) for _ in range(rounds)]}, "forebay")
    results.write()


CASES: dict[str, Callable[[Size], Figures]] = {
    "alone": lambda size: uvloop.run(alone(size.calls)),
    "busy": lambda size: uvloop.run(busy(size.calls_of_one)),
    "trips": lambda size: uvloop.run(trips()),
    "flood": lambda size: uvloop.run(flood(size.batches)),
    "revocation": lambda size: revocation(size.changes),
    "alias change": lambda size: alias_change(size.changes),
}

if __name__ == "__main__":
    main()
