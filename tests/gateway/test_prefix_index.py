"""The prefix index against a model made of sets: what workers say, what a prompt finds."""

import random

import pytest
from forebay_gateway.block_table import MAX_SLOTS, BlockTable
from forebay_gateway.prefix_index import PrefixIndex
from hypothesis import given, settings
from hypothesis import strategies as st

ROOM = 1 << 30
EVERYBODY = (1 << 16) - 1
hashes = st.integers(0, 40).map(lambda n: (n * 0x9E3779B97F4A7C15) % 2**64)
"""Few enough to meet again, spread as real ones are; 0 is among them."""


def _random_hashes(count: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.getrandbits(64) for _ in range(count)]


@given(st.lists(st.tuples(hashes, st.integers(0, 3)), max_size=200), st.integers(0, 7))
def test_the_table_is_a_dict(changes: list[tuple[int, int]], place: int) -> None:
    table, model = BlockTable(), dict[int, int]()
    for key, value in changes:
        key = key or 1
        assert table.put(key, value) == model.get(key, 0)
        model[key] = value
        assert table.get(key) == value
    table.compact(place % table.places)
    model = {key: value for key, value in model.items() if value}
    assert dict(table) == model
    assert len(table) == len(model)


def test_the_table_splits_shrinks_and_counts_its_bytes() -> None:
    table, keys = BlockTable(), _random_hashes(20 * MAX_SLOTS)
    for key in keys:
        table.put(key, 7)
    assert table.places > 8
    assert dict(table) == dict.fromkeys(keys, 7)
    assert table.nbytes / len(table) <= 24
    full = table.nbytes
    for key in keys[100:]:
        assert table.put(key, 0) == 7
    for _ in range(12):
        for place in range(table.places):
            table.compact(place)
    assert dict(table) == dict.fromkeys(keys[:100], 7)
    assert table.nbytes < full / 10


def _longest(chain: list[int], holds: set[int]) -> int:
    count = 0
    for key in chain:
        if key not in holds:
            break
        count += 1
    return count


def _found(index: PrefixIndex, chain: list[int], workers: int = EVERYBODY) -> dict[int, int]:
    """Worker -> blocks, from the tiers, which must be disjoint and longest first."""
    tiers = index.match(chain, workers)
    assert [tier.blocks for tier in tiers] == sorted((t.blocks for t in tiers), reverse=True)
    found: dict[int, int] = {}
    for blocks, members in tiers:
        assert blocks >= 1
        for worker in range(members.bit_length()):
            if members >> worker & 1:
                assert worker not in found
                found[worker] = blocks
    return found


chains = st.lists(st.integers(0, 3), min_size=1, max_size=40)
"""Paths in a tree of prompts; a block's hash is that of its path."""


def _chain(path: list[int]) -> list[int]:
    state, keys = 1, list[int]()
    for step in path:
        state = (state * 6364136223846793005 + step + 1442695040888963407) % 2**64
        keys.append(state)
    return keys


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(0, 5), chains, st.integers(0, 40)), max_size=25),
    st.sets(st.integers(0, 5)),
    chains,
    st.integers(0, 63),
)
def test_the_longest_prefix_of_each_worker_is_found(
    stored: list[tuple[int, list[int], int]], removed: set[int], asked: list[int], among: int
) -> None:
    """While each worker holds whole prefixes: leaves are evicted first."""
    index = PrefixIndex(ROOM)
    model: dict[int, set[int]] = {worker: set() for worker in range(6)}
    for worker, path, keep in stored:
        chain = _chain(path)
        index.store(worker, chain)
        model[worker].update(chain)
        if not any(_chain(other)[keep : keep + 1] for _, other, _ in stored if other != path):
            index.evict(worker, chain[keep:])
            model[worker].difference_update(chain[keep:])
    for worker in removed:
        index.remove(worker)
        model[worker].clear()
    for worker, holds in model.items():
        assert set(index.held(worker)) == holds
    chain = _chain(asked)
    expected = {
        worker: length
        for worker, holds in model.items()
        if among >> worker & 1 and (length := _longest(chain, holds))
    }
    assert _found(index, chain, among) == expected
    while index.sweep():
        pass
    assert len(index) == len(set[int]().union(*model.values()))


@given(st.data())
def test_a_hole_in_a_prefix_never_promises_a_block_that_was_looked_up_and_missing(
    data: st.DataObject,
) -> None:
    chain = _random_hashes(data.draw(st.integers(1, 60)))
    index = PrefixIndex(ROOM)
    holds: dict[int, set[int]] = {}
    for worker in range(3):
        places = data.draw(st.sets(st.integers(0, len(chain) - 1)))
        holds[worker] = {chain[at] for at in places}
        index.store(worker, holds[worker])
    looked: set[int] = set()

    class Watched(list[int]):
        def __getitem__(self, at: int) -> int:  # type: ignore[override]
            looked.add(at)
            return super().__getitem__(at)

    for blocks, members in index.match(Watched(chain), 7):
        for worker in range(3):
            if members >> worker & 1:
                missing = [at for at in looked if at < blocks and chain[at] not in holds[worker]]
                assert missing == []


@pytest.mark.parametrize("length", [1, 2, 3, 64, 1000, 8192])
def test_a_match_takes_logarithmic_time_and_hashes_no_further_than_needed(length: int) -> None:
    chain = _random_hashes(length)
    index = PrefixIndex(ROOM)
    index.store(3, chain[: length // 2])
    asked: list[int] = []

    class Counted(list[int]):
        def __getitem__(self, at: int) -> int:  # type: ignore[override]
            asked.append(at)
            return super().__getitem__(at)

    assert _found(index, Counted(chain)) == ({3: length // 2} if length > 1 else {})
    assert len(asked) <= 2 * length.bit_length() + 2
    asked.clear()
    assert _found(index, Counted(_random_hashes(length, seed=1))) == {}
    assert asked == [0]


def test_what_a_dead_worker_held_is_given_back() -> None:
    index = PrefixIndex(ROOM)
    empty = index.nbytes
    shared, own = _random_hashes(3000), _random_hashes(6000, seed=1)
    index.store(0, shared)
    alone = index.nbytes
    index.store(1, shared + own)
    index.remove(1)
    assert _found(index, own) == {}
    assert _found(index, shared) == {0: 3000}
    index.store(1, own[:10])  # its number is used again before the sweep is through
    sweeps = 0
    while index.sweep():
        sweeps += 1
    assert sweeps < 200
    assert _found(index, own) == {1: 10}
    assert index.nbytes < 1.6 * alone
    index.remove(0)
    index.remove(1)
    while index.sweep():
        pass
    assert len(index) == 0
    assert index.nbytes < empty + 8192


def test_a_full_index_takes_nothing_new_but_still_learns_of_evictions() -> None:
    index = PrefixIndex(100_000)
    keys = _random_hashes(20_000)
    for start in range(0, len(keys), 500):
        index.store(0, keys[start : start + 500])
    assert index.refused > 0
    assert index.nbytes < 110_000
    held = len(index)
    index.store(1, keys[:100])
    assert len(index) == held
    assert index.holders(keys[0]) == 0b11
    index.evict(0, keys)
    assert index.holders(keys[0]) == 0b10
    assert list(index.held(0)) == []


def test_expected_blocks_count_until_the_second_ageing() -> None:
    index = PrefixIndex(ROOM)
    chain = _random_hashes(8)
    index.expect(2, chain)
    index.age()
    index.expect(4, chain[:4])
    assert _found(index, chain) == {2: 8, 4: 4}
    index.age()
    assert _found(index, chain) == {4: 4}
    index.remove(4)
    assert _found(index, chain) == {}


@pytest.mark.parametrize("workers", [1, 16])
def test_an_entry_takes_at_most_24_bytes_per_block_and_worker(workers: int) -> None:
    """Each block on one worker; sets of several workers take less."""
    index = PrefixIndex(ROOM)
    for at, key in enumerate(_random_hashes(60_000)):
        index.store(at % workers, [key])
    assert index.nbytes / 60_000 <= 24
