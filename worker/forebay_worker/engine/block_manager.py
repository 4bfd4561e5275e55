"""BlockManager: who holds which block of the KV cache, and which computed blocks can be used again.

A block is blank, referenced by sequences, or idle: referenced by none but published in the prefix
cache, where it waits for a hit or, least recently used first, for eviction. It knows block ids and
tokens; it has never seen a tensor, a queue or a request.

Published blocks form a tree. A block's hash finds it; its tokens and the serial of the block before
it prove it, so that equal hashes of different prefixes cost time and never give a wrong answer.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from forebay_shared.blocks import chain, root_hash

from forebay_worker.engine.sequence import Origin, Sequence

Changed = Callable[[bytes, bool], None]
"""Takes a block hash and whether it was stored (True) or evicted (False)."""
Freed = Callable[[int], None]
"""Takes a block whose KV nobody may read any more."""


@dataclass(slots=True)
class Block:
    """One block; `hash` is None until it is published.

    `parent` is the serial of the block before it, or the origin of a first block.
    """

    refs: int = 0
    hash: bytes | None = None
    token_ids: list[int] = field(default_factory=list[int])
    parent: int | Origin = ("", "")
    serial: int = 0


class BlockManager:
    """The pool. All operations take time in proportion to the blocks that they touch."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        revision: str = "",
        caching: bool = True,
        changed: Changed | None = None,
        freed: Freed | None = None,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._revision = revision
        self._caching = caching
        self._changed = changed
        self._freed = freed
        self._blocks = [Block() for _ in range(num_blocks)]
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._published: dict[bytes, int] = {}
        self._promised: dict[bytes, Sequence] = {}
        self._serial = 0

    @property
    def num_free(self) -> int:
        """Blocks that can be had: blank ones and idle ones."""
        return len(self._blank) + len(self._idle)

    @property
    def usage(self) -> float:
        """The referenced share of the pool."""
        return 1 - self.num_free / self.num_blocks

    def match(self, sequence: Sequence) -> list[int]:
        """The cached blocks that `sequence` begins with; always short of its last token, which has
        to be computed for its logits. None while its prompt is scored: that takes all logits."""
        if not self._caching:
            return []
        self._extend_hashes(sequence)
        if sequence.is_scoring:
            return []
        tokens, size = sequence.token_ids, self.block_size
        parent: int | Origin = sequence.origin
        hits: list[int] = []
        for start, digest in zip(
            range(0, len(tokens) - size, size), sequence.block_hashes, strict=False
        ):
            held = self._published.get(digest)
            if held is None:
                break
            block = self._blocks[held]
            if block.parent != parent or block.token_ids != tokens[start : start + size]:
                break
            hits.append(held)
            parent = block.serial
        return hits

    def is_promised(self, sequence: Sequence, num_hits: int) -> bool:
        """Whether a running sequence is computing the block that this one needs after its hits."""
        if num_hits >= (len(sequence.token_ids) - 1) // self.block_size or not self._caching:
            return False
        if sequence.is_scoring:
            return False
        return sequence.block_hashes[num_hits] in self._promised

    def admit(self, sequence: Sequence, hits: list[int], spare: int) -> bool:
        """Gives `sequence` its hits and blocks for all its other tokens, when `spare` stay free.

        What it is going to compute is promised to others until it is published or given back.
        """
        need = -(-len(sequence.token_ids) // self.block_size) - len(hits)
        idle_hits = sum(self._blocks[block].refs == 0 for block in hits)
        if need + idle_hits + spare > self.num_free:
            return False
        for block in hits:
            self._acquire(block)
        sequence.block_table = hits + [self._take() for _ in range(need)]
        sequence.num_computed = len(hits) * self.block_size
        sequence.num_published = len(hits)
        sequence.chain = self._blocks[hits[-1]].serial if hits else sequence.origin
        for digest in sequence.block_hashes[len(hits) :]:
            self._promised.setdefault(digest, sequence)
        return True

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Makes the block table cover `num_tokens` positions; False, unchanged, without room."""
        need = -(-num_tokens // self.block_size) - len(sequence.block_table)
        if need > self.num_free:
            return False
        for _ in range(need):
            sequence.block_table.append(self._take())
        return True

    def publish(self, sequence: Sequence, num_computed: int) -> None:
        """Lets others reuse the full blocks of `sequence` among its first `num_computed` positions,
        whose KV has been computed and whose tokens are known."""
        size = self.block_size
        full = num_computed // size
        if full == sequence.num_published or not self._caching:
            return
        self._extend_hashes(sequence)
        for at in range(sequence.num_published, full):
            digest = sequence.block_hashes[at]
            tokens = sequence.token_ids[at * size : (at + 1) * size]
            sequence.chain = self._publish(sequence.block_table[at], digest, tokens, sequence.chain)
            self._keep_promise(digest, sequence)
        sequence.num_published = full

    def release(self, sequence: Sequence, *, poisoned: bool = False) -> None:
        """Takes back all blocks of `sequence`; of a poisoned one none stays in the cache."""
        for digest in sequence.block_hashes[sequence.num_published :]:
            self._keep_promise(digest, sequence)
        for block_id in reversed(sequence.block_table):  # a prefix outlives what follows it
            block = self._blocks[block_id]
            if poisoned and block.hash is not None:
                self._retract(block)
            block.refs -= 1
            if block.refs == 0 and block.hash is not None:
                self._idle[block_id] = None
            elif block.refs == 0:
                self._blank.append(block_id)
                self._forget(block_id)
        sequence.block_table = []
        sequence.num_computed = sequence.num_published = 0

    def published(self) -> list[bytes]:
        """The hashes of all blocks in the prefix cache."""
        return list(self._published)

    def check_integrity(self, sequences: Iterable[Sequence] = ()) -> None:
        """Counts everything again, given all sequences that hold blocks. Raises AssertionError."""
        held = Counter(block for sequence in sequences for block in sequence.block_table)
        blank, idle = set(self._blank), set(self._idle)
        assert len(blank) == len(self._blank), "a block is blank twice"
        assert not blank & idle, "a block is blank and idle"
        assert set(held) == set(range(self.num_blocks)) - blank - idle, "a block leaked"
        for block_id, block in enumerate(self._blocks):
            assert block.refs == held[block_id], f"block {block_id} has a wrong ref count"
            if block.hash is not None:
                assert self._published.get(block.hash) == block_id, f"block {block_id} is lost"
                assert block_id not in blank, f"block {block_id} is blank but published"
            else:
                assert block_id not in idle, f"block {block_id} is idle but not published"
        for digest, block_id in self._published.items():
            assert self._blocks[block_id].hash == digest, "the cache names a wrong block"
        for promiser in self._promised.values():
            assert promiser.block_table, "a promise outlived its sequence"

    def _extend_hashes(self, sequence: Sequence) -> None:
        hashes, size = sequence.block_hashes, self.block_size
        if (len(hashes) + 1) * size > len(sequence.token_ids):
            return
        parent = hashes[-1] if hashes else root_hash(self._revision, *sequence.origin)
        hashes.extend(chain(parent, sequence.token_ids[len(hashes) * size :], size))

    def _acquire(self, block_id: int) -> None:
        block = self._blocks[block_id]
        if block.refs == 0:
            del self._idle[block_id]
        block.refs += 1

    def _take(self) -> int:
        """A block for new KV; the caller has made sure that there is one."""
        if self._blank:
            block_id = self._blank.pop()
        else:
            block_id, _ = self._idle.popitem(last=False)
            self._retract(self._blocks[block_id])
            self._forget(block_id)
        self._blocks[block_id].refs = 1
        return block_id

    def _publish(
        self, block_id: int, digest: bytes, tokens: list[int], parent: int | Origin
    ) -> int:
        """Publishes one block, unless the cache holds its twin; the serial of the published one."""
        held = self._published.get(digest)
        if held is not None:
            twin = self._blocks[held]
            if twin.parent == parent and twin.token_ids == tokens:
                return twin.serial
            self._retract(twin)  # a collision, or a branch whose root was evicted: the newer stays
            if twin.refs == 0:
                del self._idle[held]
                self._blank.append(held)
                self._forget(held)
        block = self._blocks[block_id]
        self._serial += 1
        block.hash, block.token_ids, block.parent = digest, tokens, parent
        block.serial = self._serial
        self._published[digest] = block_id
        if self._changed is not None:
            self._changed(digest, True)
        return block.serial

    def _retract(self, block: Block) -> None:
        assert block.hash is not None
        del self._published[block.hash]
        if self._changed is not None:
            self._changed(block.hash, False)
        block.hash = None

    def _forget(self, block_id: int) -> None:
        if self._freed is not None:
            self._freed(block_id)

    def _keep_promise(self, digest: bytes, sequence: Sequence) -> None:
        if self._promised.get(digest) is sequence:
            del self._promised[digest]
