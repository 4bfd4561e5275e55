"""Routing: a prompt's blocks, who holds them, and the router's choice among the live workers.

It brings index and router together and keeps the cost of a choice bounded: one worker needs no
look, in a large fleet a sample stands for those that hold nothing. It knows no Redis and no job.
"""

import random
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import Generic, NamedTuple, Protocol, TypeVar

from forebay_shared.blocks import ID_BYTES, PromptBlocks
from forebay_shared.telemetry import GatewayMetrics

from forebay_gateway.prefix_index import Chain, PrefixIndex, Tier
from forebay_gateway.router import Candidate, Choice, pick

SAMPLE = 32
"""Workers that stand for all of a larger fleet; the least loaded of so many is close to the least
of all."""
MAX_HOLDERS = 16
"""Holders that are looked at, those of the longest prefixes first."""


class Numbered(Candidate, Protocol):
    """A candidate as the index knows it."""

    @property
    def number(self) -> int: ...

    @property
    def block_size(self) -> int: ...


class Prompted(Protocol):
    """What the router sees of a prompt."""

    @property
    def tokens(self) -> int: ...

    def blocks(self, block_size: int) -> Chain:
        """The hashes of its blocks of that size."""
        ...


W = TypeVar("W", bound=Numbered)


class Prompt:
    """A prompt's ids, as `wire.pack_ids` has them. Under another `root` (`blocks.root_hash`) equal
    prompts share nothing; one with `whole` must be computed whole, whatever is cached."""

    __slots__ = ("_blocks", "_root", "_whole", "packed")

    def __init__(self, packed: bytes, root: bytes, *, whole: bool = False) -> None:
        self.packed = packed
        self._root = root
        self._whole = whole
        self._blocks: dict[int, Chain] = {}

    @property
    def tokens(self) -> int:
        return len(self.packed) // ID_BYTES

    def blocks(self, block_size: int) -> Chain:
        chain = self._blocks.get(block_size)
        if chain is None:
            chain = () if self._whole else PromptBlocks(self.packed, block_size, self._root)
            self._blocks[block_size] = chain
        return chain


class Uncached(NamedTuple):
    """Work that no prefix cache serves."""

    tokens: int

    def blocks(self, block_size: int) -> Chain:
        return ()


class Pool(Generic[W]):
    """The workers that may take a request, prepared: made once, used until the fleet changes."""

    def __init__(self, workers: Sequence[W]) -> None:
        self.workers = list(workers)
        self.by_number = {worker.number: worker for worker in workers}
        self.by_block_size: dict[int, int] = {}
        """The workers of each block size, as the index has them."""
        for worker in workers:
            held = self.by_block_size.get(worker.block_size, 0)
            self.by_block_size[worker.block_size] = held | 1 << worker.number


class Routing:
    """One gateway's choices: made from its index, counted, and remembered until workers tell."""

    def __init__(self, index: PrefixIndex, metrics: GatewayMetrics) -> None:
        self._index = index
        self._metrics = metrics.routing

    def choose(
        self, pool: Pool[W], prompt: Prompted, avoid: Collection[str] = ()
    ) -> Choice[W] | None:
        """The worker for a prompt; None when the pool is empty."""
        choice = route(self._index, pool, prompt, avoid=avoid, tie=random.getrandbits(16))
        if choice is not None:
            self._metrics.picked(choice.reason)
            if choice.reason != "only":
                expect(self._index, choice.worker, prompt.blocks(choice.worker.block_size))
        return choice

    def served(self, predicted_tokens: int, cached_tokens: int) -> None:
        """A prompt that had been routed was started."""
        self._metrics.predicted_tokens.inc(predicted_tokens)
        self._metrics.hit_tokens.inc(cached_tokens)


def route(
    index: PrefixIndex,
    pool: Pool[W],
    prompt: Prompted,
    *,
    avoid: Collection[str] = (),
    tie: int = 0,
) -> Choice[W] | None:
    """The choice itself, which changes nothing."""
    workers = pool.workers
    holders: list[tuple[W, int]] = []
    if len(workers) > 1:
        for block_size, members in pool.by_block_size.items():
            tiers = index.match(prompt.blocks(block_size), members)
            holders += _holders(pool, tiers, block_size, tie)
        if len(workers) > SAMPLE:
            workers = _sample(workers, tie)
    return pick(workers, holders, prompt_tokens=prompt.tokens, avoid=avoid, tie=tie)


def expect(index: PrefixIndex, worker: Numbered, chain: Chain) -> None:
    """Counts a prompt's blocks as held by the worker that it was placed on, before it says so.

    Only at the places where a match looks first.
    """
    end = len(chain)
    places = [(1 << power) - 1 for power in range(end.bit_length()) if 1 << power < end]
    index.expect(worker.number, [chain[at] for at in (*places, end - 1)] if end else [])


def _holders(
    pool: Pool[W], tiers: list[Tier], block_size: int, tie: int
) -> Iterator[tuple[W, int]]:
    left = MAX_HOLDERS
    for blocks, members in tiers:
        for number in islice(_numbers(members, tie), left):
            left -= 1
            yield pool.by_number[number], blocks * block_size


def _numbers(members: int, tie: int) -> Iterator[int]:
    """The set bits, lowest first, beginning somewhere in the middle."""
    start = tie % members.bit_length() if members else 0
    for part, base in ((members >> start, start), (members & (1 << start) - 1, 0)):
        while part:
            low = part & -part
            yield base + low.bit_length() - 1
            part ^= low


def _sample(workers: Sequence[W], tie: int) -> list[W]:
    start = tie % len(workers)
    part = list(workers[start : start + SAMPLE])
    return part + list(workers[: SAMPLE - len(part)])
