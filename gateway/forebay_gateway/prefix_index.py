"""PrefixIndex: which workers hold which blocks, by what they last said.

A block's entry names a set of workers, and equal sets exist once: a chain of blocks that the same
workers hold costs its table entries alone. It is a hint that may be old or wrong. It knows numbers
of workers and hashes of blocks; no Redis, no clock, no request.

A worker that holds a block nearly always holds the blocks before it: a hit needs them all, and the
engine evicts a prefix after what follows it. So the longest prefix is found by binary search, in
O(log blocks) look-ups per distinct set of workers. Where a block in the middle has gone all the
same, the search may promise too much for that worker, or too little; either costs time, never a
wrong answer.
"""

import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

from forebay_gateway.block_table import BlockTable

MAX_LOOKUPS = 64
"""Look-ups of one match at most: where a chain has very many different sets, some stay rough."""
MAX_EXPECTED = 32_768
"""Expected blocks at most, in each of two generations: 5 MB."""
_SET_BYTES = 220
"""A set's entries in dict and lists, beside its mask."""


class Chain(Protocol):
    """The block hashes of a prompt, in order; they may be computed as they are asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, at: int, /) -> int: ...


class Tier(NamedTuple):
    """Workers (bit w of `workers` is worker number w) that hold exactly the first `blocks`."""

    blocks: int
    workers: int


class PrefixIndex:
    """Worker numbers are small and may be used again once `remove` has returned."""

    def __init__(self, max_bytes: int) -> None:
        self._table = BlockTable()
        self._sets = _Sets()
        self._max_bytes = max_bytes
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._sweep_at = 0
        self.refused = 0
        """Blocks that were not taken in for want of room."""

    def __len__(self) -> int:
        """Blocks that some worker holds."""
        return len(self._table) - self._sets.garbage

    @property
    def nbytes(self) -> int:
        """Memory in use."""
        return self._table.nbytes + self._sets.nbytes

    def store(self, worker: int, hashes: Iterable[int]) -> None:
        """The worker holds these blocks. Beyond `max_bytes` new ones are left out and counted."""
        table, sets, bit = self._table, self._sets, 1 << worker
        for key in hashes:
            before = table.get(key)
            if not before and table.nbytes + sets.nbytes >= self._max_bytes:
                self.refused += 1
                continue
            after = sets.joined(before, bit)
            if after != before:
                table.put(key, after)

    def evict(self, worker: int, hashes: Iterable[int]) -> None:
        """The worker has dropped these blocks."""
        table, sets, bit = self._table, self._sets, 1 << worker
        for key in hashes:
            before = table.get(key)
            after = sets.left(before, bit)
            if after != before:
                table.put(key, after)

    def expect(self, worker: int, hashes: Iterable[int]) -> None:
        """The worker is about to hold these blocks: counts as held until the second `age`."""
        bit = 1 << worker
        for key in hashes:
            self._young[key] = self._young.get(key, 0) | bit
        if len(self._young) > MAX_EXPECTED:
            self.age()

    def age(self) -> None:
        """Forgets what was expected before the last call."""
        self._old, self._young = self._young, {}

    def remove(self, worker: int) -> None:
        """The worker is gone, or what it said holds no more. `sweep` gives the memory back."""
        bit = 1 << worker
        self._sets.remove(bit)
        for expected in (self._young, self._old):
            for key in [key for key, workers in expected.items() if workers & bit]:
                expected[key] ^= bit

    def sweep(self) -> bool:
        """Cleans one bucket of the table of what nobody holds; False when all is clean.

        Call it now and then.
        """
        if self._sets.garbage == 0:
            return False
        place = self._sweep_at % self._table.places
        self._sweep_at = place + 1
        for key, number in self._table.bucket(place):
            if not self._sets.masks[number]:
                self._sets.discard(number)
                self._table.put(key, 0)
        self._table.compact(place)
        return True

    def holders(self, key: int) -> int:
        """The workers that hold a block or are expected to, one bit each."""
        held = self._sets.masks[self._table.get(key)]
        return held | self._young.get(key, 0) | self._old.get(key, 0)

    def held(self, worker: int) -> Iterator[int]:
        """The hashes of all blocks that a worker holds: for tests, in time O(index)."""
        masks, bit = self._sets.masks, 1 << worker
        return (key for key, number in self._table if masks[number] & bit)

    def match(self, chain: Chain, workers: int) -> list[Tier]:
        """How much of a chain each of `workers` holds, longest first; who holds nothing is in none.

        Computes the chain's hashes about twice as far as anybody holds it.
        """
        if not len(chain):
            return []
        return _Search(self, chain, workers).tiers()


class _Search:
    """One match. Sets only shrink along the chain: who lacks a block has no use for the next."""

    def __init__(self, index: PrefixIndex, chain: Chain, workers: int) -> None:
        self._index = index
        self._chain = chain
        self._workers = workers
        self._left = MAX_LOOKUPS
        self._tiers: list[Tier] = []

    def tiers(self) -> list[Tier]:
        (low, has), *steps = self._gallop()
        for high, keeps in steps:
            has = self._split(low, has, high, keeps)
            low = high
        self._tiers.reverse()
        return self._tiers

    def _look(self, at: int, among: int) -> int:
        self._left -= 1
        return self._index.holders(self._chain[at]) & among

    def _gallop(self) -> list[tuple[int, int]]:
        """(blocks, workers that hold so many) at 0, 1, 2, 4, … blocks, to where nobody is left."""
        steps = [(0, self._workers)]
        end = len(self._chain)
        blocks, among = 1, self._workers
        while among:
            among = self._look(blocks - 1, among)
            steps.append((blocks, among))
            if blocks == end:
                break
            blocks = min(2 * blocks, end)
        if among:
            steps.append((end + 1, 0))
        return steps

    def _split(self, low: int, has: int, high: int, keeps: int) -> int:
        """Finds where, between `low` and `high` blocks, `has` becomes `keeps`; who is left then."""
        keeps &= has
        if has == keeps:
            return keeps
        if high - low == 1 or self._left <= 0:
            if low:
                self._tiers.append(Tier(low, has & ~keeps))
            return keeps
        middle = (low + high) // 2
        has = self._split(low, has, middle, self._look(middle - 1, has))
        return self._split(middle, has, high, keeps)


class _Sets:
    """Sets of workers as bit masks, each once, by number. Number 0 is the empty set.

    `refs` counts the table's entries with a number. A worker that is removed is taken out of all
    sets at once; entries of sets that got empty so are `garbage`.
    """

    def __init__(self) -> None:
        self.masks = [0]
        self.garbage = 0
        self.nbytes = _SET_BYTES
        self._refs = [0]
        self._numbers = {0: 0}
        self._free: list[int] = []

    def joined(self, number: int, bit: int) -> int:
        """The set with a worker more, for an entry that changes to it."""
        mask = self.masks[number]
        return number if mask & bit else self._move(number, mask | bit)

    def left(self, number: int, bit: int) -> int:
        """The set with a worker less, likewise."""
        mask = self.masks[number]
        return self._move(number, mask ^ bit) if mask & bit else number

    def discard(self, number: int) -> None:
        """An entry with this number was deleted."""
        self._move(number, 0)

    def remove(self, bit: int) -> None:
        """Takes a worker out of every set, in time O(sets)."""
        for number, mask in enumerate(self.masks):
            if mask & bit:
                if self._numbers.get(mask) == number:
                    del self._numbers[mask]
                self.masks[number] = rest = mask ^ bit
                self.nbytes += sys.getsizeof(rest) - sys.getsizeof(mask)
                if rest:
                    self._numbers.setdefault(rest, number)
                else:
                    self.garbage += self._refs[number]

    def _move(self, number: int, mask: int) -> int:
        """Moves one entry from a set to the set `mask`."""
        if number:
            self._release(number)
        if not mask:
            return 0
        other = self._numbers.get(mask)
        if other is None:
            other = self._add(mask)
        self._refs[other] += 1
        return other

    def _add(self, mask: int) -> int:
        number = self._free.pop() if self._free else len(self.masks)
        if number == len(self.masks):
            self.masks.append(mask)
            self._refs.append(0)
        self.masks[number] = mask
        self._numbers[mask] = number
        self.nbytes += _SET_BYTES + sys.getsizeof(mask)
        return number

    def _release(self, number: int) -> None:
        self._refs[number] -= 1
        mask = self.masks[number]
        if not mask:
            self.garbage -= 1
        if not self._refs[number]:
            if self._numbers.get(mask) == number:
                del self._numbers[mask]
            self.nbytes -= _SET_BYTES + sys.getsizeof(mask)
            self.masks[number] = 0
            self._free.append(number)
