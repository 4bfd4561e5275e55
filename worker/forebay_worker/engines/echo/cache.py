"""The echo engine's stand-in for a prefix cache: hashes of blocks, least recently used first."""

from collections import OrderedDict
from collections.abc import Sequence

from forebay_shared.blocks import chain, root_hash

from forebay_worker.engines.base import CacheLog


class EchoCache:
    """Holds at most `num_blocks`; a prefix outlives what follows it."""

    def __init__(self, num_blocks: int, block_size: int, revision: str, log: CacheLog) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._revision = revision
        self._log = log
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        log.everything = lambda: list(self._blocks)

    def take(self, prompt: Sequence[int], cache_salt: str, adapter_revision: str = "") -> int:
        """Prompt tokens found in the cache, short of the last one; then it holds all of them."""
        root = root_hash(self._revision, adapter_revision, cache_salt)
        hashes = list(chain(root, prompt, self._block_size))[: self._num_blocks]
        hits = next((at for at, key in enumerate(hashes) if key not in self._blocks), len(hashes))
        for key in reversed(hashes):
            if key not in self._blocks:
                self._log.note(key, True)
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._num_blocks:
            evicted, _ = self._blocks.popitem(last=False)
            self._log.note(evicted, False)
        return min(hits, (len(prompt) - 1) // self._block_size) * self._block_size
