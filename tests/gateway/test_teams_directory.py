"""Every gateway's mirror of the directory in Redis, and who writes what is there."""

import asyncio
import re
import tracemalloc

import pytest
from forebay_gateway.admin.bootstrap import first_key
from forebay_gateway.backend import Backend, connect
from forebay_gateway.teams import store, sync
from forebay_gateway.teams.conditions import NONE
from forebay_gateway.teams.directory import Directory, decoded, encode
from forebay_gateway.teams.guards import Actor
from forebay_gateway.teams.records import Key, Organisation, Team, User, place_of
from forebay_gateway.teams.secrets import split
from forebay_gateway.teams.store import Change
from forebay_gateway.teams.sync import POLL_S, DirectorySync
from forebay_shared import keys
from forebay_shared.errors import (
    AuthenticationError,
    BusError,
    ConflictError,
    PermissionDeniedError,
)
from forebay_shared.settings import GatewaySettings, Secret, StartError
from forebay_shared.wire import Changed
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from patience import PATIENCE_S
from redis_house import RedisServer, WaitUntil
from registry_house import total
from teams_house import BASICS, PEPPER, gateways, key_of, write

names = st.sampled_from(["acme", "beta", "gamma"])
steps = st.lists(st.tuples(names, st.booleans()), max_size=30)


@given(steps, st.integers(0, 30))
def test_a_mirror_that_loads_at_any_moment_and_follows_ends_like_all_others(
    steps: list[tuple[str, bool]], joins_at: int
) -> None:
    """One mirror follows all changes, one loads a snapshot in between and follows the rest."""
    changes: list[Changed] = []
    stored: dict[str, str] = {}
    snapshot, at = dict(stored), 0
    for number, (name, kept) in enumerate(steps, 1):
        if number == joins_at:
            snapshot, at = dict(stored), number - 1
        value = encode(Organisation(id=name, name=str(number))) if kept else ""
        changes.append(Changed(number, f"organisation/{name}", value))
        stored.pop(f"organisation/{name}", None)
        if kept:
            stored[f"organisation/{name}"] = f"{number} {value}"
    first, second = Directory(), Directory()
    second.replace(at, decoded(snapshot.items()))
    for change in changes:
        assert first.follow(change)
        assert second.follow(change)
    assert first.everything() == second.everything()
    assert {place: first.revision_of(place) for place in stored} == {
        place: second.revision_of(place) for place in stored
    }
    assert not first.follow(Changed(len(changes) + 2, "organisation/acme", ""))


async def test_a_change_is_on_every_gateway_at_once_and_in_the_audit_log(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    async with gateways(redis_server.url, 3, wait_until) as backends:
        assert not backends[0].teams.closed
        key, sent = key_of()
        revision = await write(backends[0], [*BASICS, key])
        token = split(sent.encode())
        assert token is not None
        for backend in backends:
            assert await backend.teams.sync.reached(revision, PATIENCE_S)
            assert backend.teams.closed
            assert backend.teams.identify(token, "").access.team_id == "red"
        revision = await write(backends[1], [replace(key, disabled=True)])
        for backend in backends:
            assert await backend.teams.sync.reached(revision, PATIENCE_S)
            with pytest.raises(PermissionDeniedError):
                backend.teams.identify(token, "")
        assert all(backend.teams.sync.reloads == 1 for backend in backends)
        audit = redis_server.client.xrange(keys.audit())
        assert [fields[b"who"] for _, fields in audit] == [b"test", b"test"]


async def test_the_first_key_can_be_made_while_the_mirror_asks_for_news(
    redis_server: RedisServer, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "POLL_S", 0.0)  # a poll is always under way
    async with gateways(redis_server.url, 1, wait_until, key_pepper=Secret("")) as [backend]:
        mirror = backend.teams.sync
        drawn = await mirror.make_pepper()
        assert len(drawn) == 64
        for _ in range(50):
            mirror.pepper = b""
            assert await mirror.make_pepper() == drawn
        assert redis_server.client.get(keys.pepper()) == drawn


async def test_a_gateway_with_another_pepper_says_so(
    redis_server: RedisServer, wait_until: WaitUntil, caplog: pytest.LogCaptureFixture
) -> None:
    url = redis_server.url
    async with gateways(url, 1, wait_until) as [first], gateways(url, 1, wait_until) as [same]:
        assert not first.teams.sync.pepper_differs
        assert not same.teams.sync.pepper_differs
        assert not caplog.records
        for other in (Secret("another"), Secret("")):
            caplog.clear()
            async with gateways(url, 1, wait_until, key_pepper=other) as [odd]:
                await odd.teams.sync.make_pepper()
                assert odd.teams.sync.pepper_differs
                gauge = f'forebay_pepper_differs{{gateway="{odd.gateway}"}} 1.0'
                assert gauge in await odd.metrics()
                lines = [each for each in caplog.records if "pepper" in each.message]
                assert len(lines) == 1
        assert not first.teams.sync.pepper_differs


async def test_a_fleet_gets_its_first_owner_once(
    redis_server: RedisServer, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_KEY_PEPPER", PEPPER.decode())
    sent = await asyncio.to_thread(first_key, redis_server.url)
    with pytest.raises(StartError, match="there are keys already"):
        await asyncio.to_thread(first_key, redis_server.url)
    token = split(sent.encode())
    assert token is not None
    async with gateways(redis_server.url, 1, wait_until) as [backend]:
        access = backend.teams.identify(token, "").access
        assert access is not None
        assert (access.role, access.team, access.organisation) == ("owner", None, None)


async def test_a_lost_push_costs_a_second_and_a_redis_put_back_is_followed(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    async with gateways(redis_server.url, 1, wait_until) as [backend]:
        teams = backend.teams
        await write(backend, BASICS)
        client = redis_server.client
        client.hset(keys.directory(), "organisation/beta", '9 {"id":"beta"}')
        client.set(keys.directory_revision(), 9)
        await wait_until(lambda: teams.directory.organisation("beta") is not None)
        client.delete(keys.directory(), keys.directory_revision(), keys.changes())
        await wait_until(lambda: len(teams.directory) == 0)


async def test_bytes_that_are_no_text_are_a_record_that_cannot_be_read(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    records = {"organisation/beta": b'1 {"id":"beta"}', b"team/\xe9": b"2 {}", "team/x": b"3 \xe9"}
    redis_server.client.hset(keys.directory(), mapping=records)
    async with gateways(redis_server.url, 1, wait_until) as [backend]:
        directory = backend.teams.directory
        assert (len(directory), directory.unreadable) == (1, 2)


async def test_records_are_written_together_and_only_at_the_expected_revision(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    async with gateways(redis_server.url, 1, wait_until) as [backend]:
        store = backend.teams.store
        await write(backend, BASICS)
        acme = Organisation(id="acme", name="Acme")
        at = backend.teams.directory.revision_of("organisation/acme")
        await store.commit([Change("organisation/acme", acme, at)], who="w", what="")
        stale = [Change("organisation/beta", Organisation(id="beta"), 0)]
        stale += [Change("organisation/acme", acme, at)]
        with pytest.raises(ConflictError, match="organisation/acme"):
            await store.commit(stale, who="w", what="")
        assert backend.teams.directory.organisation("beta") is None
        with pytest.raises(ConflictError, match="needs team/none"):
            await store.commit([Change("key/1", Key(id="1", team="none"))], who="w", what="")
        with pytest.raises(ConflictError, match="user/ann needs team/red"):
            await store.commit([Change("team/red", None)], who="w", what="")
        one, _ = key_of(name="ci")
        two, _ = key_of(name="ci")
        await write(backend, [one])
        with pytest.raises(ConflictError, match="named 'ci'"):
            await write(backend, [two])


async def test_a_key_counts_for_a_user_of_its_own_team_alone(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    async with gateways(redis_server.url, 1, wait_until) as [one]:
        await write(one, BASICS)
        foreign, _ = key_of("blue", user="ann")
        with pytest.raises(ConflictError, match="user/ann to be of its team, blue"):
            await write(one, [foreign])
        own, _ = key_of("red", user="ann")
        await write(one, [own])
        moved = User(id="ann", team="blue")
        with pytest.raises(ConflictError, match="to be of its team, red"):
            await write(one, [moved])
        await write(one, [moved, replace(own, team="blue")])  # together they may go


async def test_two_gateways_that_change_at_once_break_nothing_between_them(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    fleet = Actor("boss", "owner")
    async with gateways(redis_server.url, 2, wait_until) as [one, two]:
        await write(one, BASICS)
        for number in range(20):
            team = Team(id=f"t{number}", organisation="acme")
            revision = await write(one, [team])
            assert await two.teams.sync.reached(revision, PATIENCE_S)
            outcomes = await asyncio.gather(
                one.teams.admin.delete(fleet, "team", team.id, NONE),
                two.teams.admin.make_key(fleet, {"team": team.id, "name": "late"}),
                return_exceptions=True,
            )
            failed = [each for each in outcomes if isinstance(each, ConflictError)]
            assert len(failed) == 1, outcomes
        directory = one.teams.directory
        await wait_until(lambda: directory.revision == two.teams.directory.revision)
        assert (
            directory.missing_parent({place_of(each): each for each in directory.everything()})
            is None
        )


async def test_many_changes_at_once_are_all_made(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    fleet = Actor("boss", "owner")
    async with gateways(redis_server.url, 3, wait_until) as backends:
        revision = await write(backends[0], BASICS)
        for backend in backends:
            assert await backend.teams.sync.reached(revision, PATIENCE_S)
        made = await asyncio.gather(
            *(
                backends[number % 3].teams.admin.make_key(
                    fleet, {"team": "red", "name": f"k{number // 2}"}
                )
                for number in range(60)
            ),
            return_exceptions=True,
        )
        keys_made = [each for each in made if isinstance(each, dict)]
        assert sorted(key["name"] for key in keys_made) == sorted({f"k{n}" for n in range(30)})
        assert sum(isinstance(each, ConflictError) for each in made) == 30


async def test_a_new_keys_token_is_told_though_its_gateway_does_not_see_it_yet(
    redis_server: RedisServer, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Actor("boss", "owner")
    async with gateways(redis_server.url, 1, wait_until) as [backend]:
        teams = backend.teams
        await write(backend, BASICS)
        monkeypatch.setattr(store, "MIRRORED_S", 0.0)
        monkeypatch.setattr(DirectorySync, "receive", lambda *_: None)
        made = [await teams.admin.make_key(fleet, {"team": "red"})]
        await wait_until(lambda: len(teams.directory.all("key")) == 1)
        made.append(await teams.admin.rotate_key(fleet, made[0]["id"], 60.0))
        await wait_until(lambda: len(teams.directory.key(made[0]["id"]).secrets) == 2)
        tree = {"organisations": [{"id": "acme", "keys": [{"name": "new", "role": "owner"}]}]}
        applied = await teams.admin.apply(fleet, tree, dry_run=False, prune=False)
        await wait_until(lambda: len(teams.directory.all("key")) == 2)
        for token in (*(each["token"] for each in made), applied["tokens"]["key/acme/new"]):
            assert teams.identify(split(token.encode()), "")


async def test_a_document_of_many_keys_holds_nobody_up(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    fleet = Actor("boss", "owner")
    names = [{"name": f"k{number}"} for number in range(5_000)]
    tree = {"organisations": [{"id": "acme", "teams": [{"id": "red", "keys": names}]}]}
    async with gateways(redis_server.url, 1, wait_until) as [backend]:
        admin, turns = backend.teams.admin, 0
        for dry_run in (True, False, True):
            applying = asyncio.create_task(admin.apply(fleet, tree, dry_run=dry_run, prune=False))
            before = turns
            while not applying.done():
                await asyncio.sleep(0.001)
                turns += 1
            assert turns - before > 4  # one, had it been read at one go
            steps = (await applying)["changes"]
            await wait_until(lambda: len(backend.teams.directory) in (0, 5_002))
        assert steps == []
        [team] = (await admin.export(fleet))["organisations"][0]["teams"]
        assert sorted(key["name"] for key in team["keys"]) == sorted(key["name"] for key in names)


async def test_apply_writes_over_nothing_that_changed_while_it_was_read(
    redis_server: RedisServer, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Actor("boss", "owner")
    async with gateways(redis_server.url, 1, wait_until) as [backend]:
        await write(backend, BASICS)

        async def meanwhile() -> bytes:
            await write(backend, [Team(id="red", organisation="acme", name="theirs")])
            return PEPPER

        monkeypatch.setattr(backend.teams.sync, "make_pepper", meanwhile)
        red = {"id": "red", "name": "ours"}
        tree = {"organisations": [{"id": "acme", "teams": [red]}]}
        with pytest.raises(ConflictError, match="team/red is not as it was"):
            await backend.teams.admin.apply(fleet, tree, dry_run=False, prune=False)
        assert backend.teams.directory.team("red").name == "theirs"


async def test_a_gateway_that_has_asked_for_keys_goes_on_when_redis_has_lost_them(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    async with gateways(redis_server.url, 1, wait_until) as [backend]:
        assert not backend.teams.closed
        await write(backend, BASICS)
        redis_server.client.flushall()
        await wait_until(lambda: len(backend.teams.directory) == 0)
        assert backend.teams.closed


async def test_a_gateway_that_does_not_know_of_keys_yet_is_not_open(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    redis_server.kill()
    async with connect(GatewaySettings(redis_url=Secret(redis_server.url))) as backend:
        with pytest.raises(BusError, match="Keys cannot be checked"):
            assert backend.teams.closed
        redis_server.start()
        await wait_until(lambda: backend.teams.sync.fresh_at is not None)
        assert not backend.teams.closed


async def test_unknown_keys_are_neither_remembered_nor_asked_for(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    async with gateways(redis_server.url, 1, wait_until) as [backend]:
        await write(backend, BASICS)
        asked = redis_server.client.info("commandstats")
        series = re.findall(r"^[^# ]+", await backend.metrics(), re.M)
        refuse(backend, 1_000)
        tracemalloc.start()
        before = tracemalloc.take_snapshot()
        refuse(backend, 100_000)
        grown = tracemalloc.take_snapshot().compare_to(before, "filename")
        tracemalloc.stop()
        ours = [each for each in grown if "forebay_gateway/teams" in each.traceback[0].filename]
        assert sum(each.size_diff for each in ours) < 10_000
        assert re.findall(r"^[^# ]+", await backend.metrics(), re.M) == series
        after = redis_server.client.info("commandstats")
        assert asked.get("cmdstat_hget") == after.get("cmdstat_hget")


def refuse(backend: Backend, count: int) -> None:
    """Asks with so many keys that nobody knows."""
    for number in range(count):
        with pytest.raises(AuthenticationError):
            backend.teams.identify(split(b"sk-fb-%012x-x" % number), "")


async def test_a_key_ends_within_a_second_on_three_gateways_that_hear_no_push(
    redis_server: RedisServer, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DirectorySync, "receive", lambda *_: None)  # the push is cut
    key, sent = key_of()
    token = split(sent.encode())
    assert token is not None
    assert 2 * POLL_S < 1.0, "it is seen by one poll and fetched by the next"
    async with gateways(redis_server.url, 3, wait_until) as backends:
        begun = await write(backends[0], [*BASICS, key])
        assert await backends[1].teams.sync.reached(begun, PATIENCE_S)
        for changed, error in (
            (replace(key, disabled=True), PermissionDeniedError),
            (key, None),
            (None, AuthenticationError),
        ):
            polls = [backend.teams.sync.polls for backend in backends]
            change = Change(place_of(key), changed)
            revision = await backends[1].teams.store.write([change], who="test", what="{}")
            for backend, before in zip(backends, polls, strict=True):
                assert await backend.teams.sync.reached(revision, PATIENCE_S)
                assert backend.teams.sync.polls - before <= 3, "one may have been under way"
                if error is None:
                    assert backend.teams.identify(token, "")
                    continue
                with pytest.raises(error):
                    backend.teams.identify(token, "")


async def test_a_mirror_that_is_too_old_says_neither_yes_nor_no(
    redis_server: RedisServer, wait_until: WaitUntil
) -> None:
    async with gateways(redis_server.url, 1, wait_until) as [backend]:
        key, sent = key_of()
        await write(backend, [*BASICS, key])
        token = split(sent.encode())
        redis_server.kill()
        await wait_until(lambda: not backend.connected)
        assert backend.teams.identify(token, "")
        backend.teams.sync.fresh_at = asyncio.get_running_loop().time() - 61
        assert total(backend.telemetry.registry, "forebay_directory_age_seconds") > 60
        with pytest.raises(BusError):
            backend.teams.identify(token, "")
        fleet = Actor("boss", "owner")
        with pytest.raises(BusError):
            backend.teams.admin.list(fleet, "team", "", 100, "")
        with pytest.raises(BusError):
            backend.teams.admin.get(fleet, "team", "red")
        with pytest.raises(BusError):
            await backend.teams.admin.export(fleet)
        with pytest.raises(BusError):
            await backend.teams.admin.apply(fleet, {}, dry_run=True, prune=True)
