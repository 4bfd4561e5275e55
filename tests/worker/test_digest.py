"""A worker's digests: what its engine notes, as gateways will hear it."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import cast

import pytest
from engine_fakes import FakeRunner, Recorded
from forebay_shared.blocks import PromptBlocks, chain, root_hash
from forebay_shared.bus import Publisher
from forebay_shared.models import Adapter
from forebay_shared.packets import CACHE
from forebay_shared.sampling import SamplingParams
from forebay_shared.settings import WorkerSettings
from forebay_shared.wire import CacheEvent, Digest, Load, Snapshot, Submit, pack_ids
from forebay_worker import digest as module
from forebay_worker.digest import Digests
from forebay_worker.engine.cache_log import CacheLog
from forebay_worker.engine.core import EngineCore
from forebay_worker.engine.intake import Limits
from forebay_worker.engine.rates import Rates
from forebay_worker.engines.base import Engine
from forebay_worker.engines.echo.cache import EchoCache
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE_S


class LoggingEngine:
    def __init__(self, log: CacheLog | None) -> None:
        self.cache_log = log

    def load(self) -> Load:
        return Load(running=3)


class Heard:
    """A publisher that keeps the events."""

    def __init__(self) -> None:
        self.events: list[CacheEvent] = []

    def call(self, *command: object) -> asyncio.Future[object]:
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        future.set_result(b"1700000000000-0")
        if command[0] == "XADD":
            events, bad = CACHE.decode(cast(bytes, command[-1]))
            assert bad == 0
            self.events += events
        return future

    def held(self) -> set[bytes]:
        """What a gateway that heard everything would have."""
        held: set[bytes] = set()
        number = 0
        for event in self.events:
            if isinstance(event, Snapshot):
                if event.number > number and event.part == 0:
                    held.clear()
                    number = event.number
                held |= set(_unpack(event.hashes))
            else:
                assert event.number == number + 1
                number = event.number
                assert not set(_unpack(event.evicted)) - held
                held = held - set(_unpack(event.evicted)) | set(_unpack(event.stored))
        return held


def _unpack(packed: bytes) -> list[bytes]:
    assert len(packed) % 8 == 0
    return [packed[at : at + 8] for at in range(0, len(packed), 8)]


def _digests(log: CacheLog | None) -> tuple[Digests, Heard]:
    heard = Heard()
    engine = cast(Engine, LoggingEngine(log))
    return Digests("w", engine, cast(Publisher, heard)), heard


def _in_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _key(number: int) -> bytes:
    return number.to_bytes(8, "little")


async def _until(heard: Heard, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while len(heard.events) < count:  # noqa: ASYNC110  it is a count
            await asyncio.sleep(0.001)


async def test_steps_share_a_digest_and_what_came_and_went_between_is_not_told() -> None:
    log = CacheLog()
    digests, heard = _digests(log)

    def steps() -> None:
        log.note(_key(1), True)
        log.flush()
        log.note(_key(2), True)
        log.flush()
        log.note(_key(2), False)
        log.note(_key(3), True)
        log.flush()
        log.flush()

    _in_thread(steps)
    await _until(heard, 1)
    (first,) = heard.events
    assert isinstance(first, Digest)
    assert first.number == digests.number == 1
    assert set(_unpack(first.stored)) == {_key(1), _key(3)}
    assert first.evicted == b""
    assert first.load == Load(running=3)
    log.note(_key(1), False)
    log.flush()
    await _until(heard, 2)
    assert heard.held() == {_key(3)}
    digests.close()


async def test_a_snapshot_comes_in_parts_and_serves_everybody_who_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PART", 4)
    log = CacheLog()
    digests, heard = _digests(log)
    for number in range(10):
        log.note(_key(number), True)
    log.flush()
    digests.sync()
    digests.sync()
    await _until(heard, 6)
    assert [type(event) for event in heard.events] == [Digest] * 3 + [Snapshot] * 3
    parts = [event for event in heard.events if isinstance(event, Snapshot)]
    assert [(part.number, part.part, part.parts) for part in parts] == [
        (3, 0, 3), (3, 1, 3), (3, 2, 3),
    ]  # fmt: skip
    assert heard.held() == {_key(number) for number in range(10)}
    digests.close()


async def test_when_too_much_waits_the_whole_cache_is_told_instead() -> None:
    log = CacheLog(max_changes=8)
    log.everything = lambda: [_key(1), _key(2)]
    digests, heard = _digests(log)
    for number in range(12):
        log.note(_key(number), True)
    log.flush()
    assert log.take() == []
    log.note(_key(50), True)
    log.flush()
    await _until(heard, 1)
    (snapshot,) = heard.events
    assert isinstance(snapshot, Snapshot)
    assert (snapshot.number, digests.number) == (1, 1)
    assert heard.held() == {_key(1), _key(2)}
    digests.close()


async def test_an_engine_without_a_log_publishes_nothing() -> None:
    digests, heard = _digests(None)
    digests.sync()
    digests.renew()
    assert (digests.number, heard.events) == (-1, [])


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=24), max_size=20))
def test_the_engine_s_log_is_its_prefix_cache(prompts: list[list[int]]) -> None:
    """Real scheduler and block manager, a pool small enough to evict."""
    log, runner = CacheLog(), FakeRunner(num_blocks=12)
    core = EngineCore(
        runner,
        Limits.of(runner, (1,)),
        WorkerSettings(),
        Recorded(),
        revision="r",
        cache_log=log,
    )
    held: set[bytes] = set()
    for number, prompt in enumerate(prompts):
        submit = Submit(
            request_id=str(number), attempt=1, gateway="g", prompt=pack_ids(prompt),
            sampling=SamplingParams(max_tokens=3),
        )  # fmt: skip
        core.submit(submit, 0.0)
        while not core.idle:
            core.step()
            log.flush()
        for changes in log.take():
            held |= {key for key, stored in changes.blocks.items() if stored}
            held -= {key for key, stored in changes.blocks.items() if not stored}
        assert held == set(core.blocks.published())
        full = PromptBlocks(pack_ids(prompt), 4, root_hash("r"))
        assert all(full[at].to_bytes(8, "little") in held for at in range(len(full)))


def test_the_gateway_computes_the_hashes_that_the_worker_does() -> None:
    ids = list(range(100, 150))
    root = root_hash("r", "", "salt")
    blocks = PromptBlocks(pack_ids(ids), 16, root)
    assert [*blocks] == [int.from_bytes(key, "little") for key in chain(root, ids, 16)][:3]
    assert len(PromptBlocks(pack_ids(ids[:48]), 16, root)) == 2  # its last token is computed
    assert len(PromptBlocks(b"", 16, root)) == 0
    other = PromptBlocks(pack_ids(ids), 16, root_hash("r", "", "other salt"))
    assert not set(blocks) & set(other)


def test_a_block_of_an_adapter_has_the_hash_that_gateways_look_for() -> None:
    log, runner, ids = CacheLog(), FakeRunner(), list(range(2, 15))
    limits = Limits.of(runner, (1,), (Adapter("law", "2f"), Adapter("sql", "1f")))
    core = EngineCore(runner, limits, WorkerSettings(), Recorded(), revision="r", cache_log=log)
    for name, revision in (("", ""), ("sql", "1f"), ("law", "2f")):
        before = set(core.blocks.published())
        core.submit(
            Submit(
                request_id=f"for {name}", attempt=1, gateway="g", prompt=pack_ids(ids),
                sampling=SamplingParams(max_tokens=1), adapter=name, cache_salt="s",
            ),
            0.0,
        )  # fmt: skip
        while not core.idle:
            core.step()
        wanted = PromptBlocks(pack_ids(ids), 4, root_hash("r", revision, "s"))
        found = set(core.blocks.published()) - before
        assert found == {wanted[at].to_bytes(8, "little") for at in range(3)}


def _take(cache: EchoCache, prompt: Sequence[int]) -> int:
    return cache.take(prompt, "")


def test_the_echo_engine_s_cache_keeps_prefixes_longest() -> None:
    log = CacheLog()
    cache = EchoCache(4, 4, "r", log)
    assert _take(cache, range(16)) == 0
    assert _take(cache, range(16)) == 12
    assert _take(cache, range(17)) == 16
    assert _take(cache, [*range(8), 99, 98, 97, 96, 95]) == 8
    log.flush()
    changes = {key: kept for change in log.take() for key, kept in change.blocks.items()}
    assert sum(changes.values()) == 4
    assert _take(cache, range(16)) == 12


def test_rates_are_those_of_recent_steps_without_the_first_ones() -> None:
    rates = Rates()
    assert (rates.prefill, rates.decode) == (0.0, 0.0)
    for _ in range(4):
        rates.step(prefilled=1000, decoded=0, seconds=30.0)
        rates.step(prefilled=0, decoded=8, seconds=30.0)
    assert (rates.prefill, rates.decode) == (0.0, 0.0)
    for _ in range(50):
        rates.step(prefilled=1000, decoded=8, seconds=0.1)
        rates.step(prefilled=3, decoded=8, seconds=9.0)
        rates.step(prefilled=0, decoded=8, seconds=0.01)
    assert rates.prefill == pytest.approx(10_000)
    assert rates.decode == pytest.approx(800)
