"""The block manager: what is reused, what is evicted, and that nothing leaks."""

import pytest
from engine_fakes import make_sequence
from forebay_worker.engine.block_manager import BlockManager
from forebay_worker.engine.sequence import Sequence

SIZE = 4


def pool(num_blocks: int = 8, **options: object) -> BlockManager:
    return BlockManager(num_blocks, SIZE, revision="fake", **options)


def admit(blocks: BlockManager, tokens: list[int], salt: str = "") -> tuple[Sequence, int]:
    """A sequence with its blocks, and the tokens that it found in the cache."""
    sequence = make_sequence(tokens, cache_salt=salt)
    assert blocks.admit(sequence, blocks.match(sequence), spare=0)
    return sequence, sequence.num_computed


def compute(blocks: BlockManager, sequence: Sequence) -> None:
    sequence.num_computed = len(sequence.token_ids)
    blocks.publish(sequence, sequence.num_computed)


def cached(blocks: BlockManager, tokens: list[int], salt: str = "") -> int:
    return len(blocks.match(make_sequence(tokens, cache_salt=salt))) * SIZE


def leave(blocks: BlockManager, tokens: list[int]) -> None:
    """Leaves `tokens` in the cache, referenced by nobody."""
    sequence, _ = admit(blocks, tokens)
    compute(blocks, sequence)
    blocks.release(sequence)


def test_a_later_sequence_reuses_full_blocks_of_an_equal_prefix() -> None:
    blocks = pool()
    first, _ = admit(blocks, list(range(10)))
    compute(blocks, first)
    second, hit = admit(blocks, [*range(9), 99])
    assert hit == 8
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    blocks.check_integrity([first, second])


def test_the_last_prompt_token_is_always_computed_again() -> None:
    blocks = pool()
    leave(blocks, list(range(8)))
    assert cached(blocks, list(range(8))) == 4
    assert cached(blocks, list(range(9))) == 8


def test_a_block_is_no_hit_before_its_kv_is_computed() -> None:
    blocks = pool()
    first, _ = admit(blocks, list(range(12)))
    assert cached(blocks, list(range(12))) == 0
    first.num_computed = 7
    blocks.publish(first, first.num_computed)
    assert cached(blocks, list(range(12))) == 4


def test_a_cache_salt_keeps_prefixes_apart() -> None:
    blocks = pool()
    leave(blocks, list(range(8)))
    assert cached(blocks, list(range(9)), salt="mine") == 0


def test_no_block_is_reused_when_caching_is_off() -> None:
    blocks = pool(caching=False)
    leave(blocks, list(range(8)))
    assert cached(blocks, list(range(9))) == 0
    assert blocks.num_free == 8


def test_the_least_recently_used_block_is_evicted_first() -> None:
    blocks = pool(num_blocks=4)
    old, new = [1] * SIZE, [2] * SIZE
    leave(blocks, old)
    leave(blocks, new)
    leave(blocks, [*old, 9])  # a hit: the old one is now the newer
    sequence, _ = admit(blocks, [3] * 3 * SIZE)
    assert cached(blocks, [*old, 9]) == SIZE
    assert cached(blocks, [*new, 9]) == 0
    blocks.check_integrity([sequence])


def test_a_prefix_outlives_what_follows_it() -> None:
    blocks = pool(num_blocks=4)
    leave(blocks, list(range(12)))
    sequence, _ = admit(blocks, [7] * 2 * SIZE)
    assert cached(blocks, list(range(13))) == 8
    blocks.check_integrity([sequence])


def test_a_referenced_block_is_never_evicted() -> None:
    blocks = pool(num_blocks=4)
    first, _ = admit(blocks, list(range(12)))
    compute(blocks, first)
    rival = make_sequence([7] * 2 * SIZE)
    assert not blocks.admit(rival, blocks.match(rival), spare=0)
    assert rival.block_table == []
    assert blocks.num_free == 1


def test_idle_hits_are_not_counted_as_room() -> None:
    blocks = pool(num_blocks=4)
    leave(blocks, list(range(8)))
    holder, _ = admit(blocks, [7] * SIZE)
    wide = make_sequence(list(range(16)))
    assert len(blocks.match(wide)) == 2
    assert not blocks.admit(wide, blocks.match(wide), spare=0)
    blocks.check_integrity([holder])


def test_equal_hashes_of_different_prefixes_are_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "forebay_worker.engine.block_manager.chain",
        lambda parent, tokens, size: [b"same"] * (len(tokens) // size),
    )
    blocks = pool()
    leave(blocks, [1] * SIZE)
    assert cached(blocks, [1] * SIZE + [9]) == SIZE
    assert cached(blocks, [2] * SIZE + [9]) == 0
    assert cached(blocks, [1] * 2 * SIZE + [9]) == SIZE
    leave(blocks, [2] * SIZE)  # takes the name over
    assert cached(blocks, [1] * SIZE + [9]) == 0
    assert cached(blocks, [2] * SIZE + [9]) == SIZE
    blocks.check_integrity()


def test_a_prefix_computed_twice_at_once_is_kept_once() -> None:
    blocks = pool()
    twins = [admit(blocks, list(range(9)))[0] for _ in range(2)]
    for twin in twins:
        compute(blocks, twin)
    for twin in twins:
        twin.token_ids += range(20, 24)
        assert blocks.grow(twin, len(twin.token_ids))
        compute(blocks, twin)
    assert cached(blocks, [*range(9), *range(20, 24)]) == 12
    for twin in twins:
        blocks.release(twin)
    blocks.check_integrity()
    assert blocks.num_free == 8


def test_nothing_of_a_poisoned_sequence_is_reused() -> None:
    blocks = pool()
    leave(blocks, list(range(8)))
    sequence, hit = admit(blocks, list(range(12)))
    assert hit == 8
    compute(blocks, sequence)
    blocks.release(sequence, poisoned=True)
    assert cached(blocks, list(range(13))) == 0
    blocks.check_integrity()


def test_changes_of_the_cache_are_told_one_by_one() -> None:
    told: set[bytes] = set()

    def changed(digest: bytes, stored: bool) -> None:
        assert (digest in told) != stored
        (told.add if stored else told.remove)(digest)

    blocks = pool(num_blocks=3, changed=changed)
    first = make_sequence(list(range(8)))
    leave(blocks, list(range(8)))
    blocks.match(first)
    assert told == set(first.block_hashes)
    leave(blocks, [7] * 2 * SIZE)
    assert len(told) == 3
    assert first.block_hashes[0] in told


def test_growing_without_room_changes_nothing() -> None:
    blocks = pool(num_blocks=2)
    sequence, _ = admit(blocks, list(range(8)))
    assert not blocks.grow(sequence, 9)
    assert len(sequence.block_table) == 2
    blocks.check_integrity([sequence])


def test_the_integrity_check_finds_a_leak_and_a_double_release() -> None:
    blocks = pool()
    sequence, _ = admit(blocks, list(range(8)))
    with pytest.raises(AssertionError, match="leaked"):
        blocks.check_integrity([])
    sequence.block_table *= 2
    with pytest.raises(AssertionError, match="ref count"):
        blocks.check_integrity([sequence])
