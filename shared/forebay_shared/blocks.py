"""The chained block hash, for the worker's prefix cache and the gateway's router. Exists once.

h_0 = H(model revision, adapter, cache salt); h_i = H(h_{i-1}, token ids of block i), with H the
first 8 bytes of BLAKE2b. An engine compares the tokens on a hit, so a collision costs time, never a
wrong answer.
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import islice

HASH_BYTES = 8
ID_BYTES = 4


def root_hash(revision: str, adapter: str = "", cache_salt: str = "") -> bytes:
    """The parent of a sequence's first block. Parts are length-prefixed: none can forge another."""
    digest = blake2b(digest_size=HASH_BYTES)
    for part in (revision, adapter, cache_salt):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(4, "little") + data)
    return digest.digest()


def chain(parent: bytes, token_ids: Sequence[int], block_size: int) -> Iterator[bytes]:
    """Hashes of the full blocks of `token_ids`, in order; a last partial block has none."""
    return _chain(parent, array("I", token_ids).tobytes(), block_size)


def _chain(parent: bytes, packed: bytes, block_size: int) -> Iterator[bytes]:
    width = block_size * ID_BYTES
    for start in range(0, len(packed) - width + 1, width):
        parent = blake2b(parent + packed[start : start + width], digest_size=HASH_BYTES).digest()
        yield parent


class PromptBlocks:
    """The hashes of a prompt's blocks that a cache may serve, as whole numbers, computed when asked
    for. The block with the last token is never served: its logits have to be computed.

    `packed` holds the ids as `wire.pack_ids` has them, `root` is the prompt's `root_hash`.
    """

    __slots__ = ("_hashes", "_length", "_rest")

    def __init__(self, packed: bytes, block_size: int, root: bytes) -> None:
        self._length = max(0, len(packed) // ID_BYTES - 1) // block_size
        self._rest = _chain(root, packed, block_size)
        self._hashes: list[int] = []

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, at: int) -> int:
        """The hash of block `at`. Raises IndexError beyond the last one."""
        if at >= self._length:
            raise IndexError(at)
        hashes = self._hashes
        if at >= len(hashes):
            more = islice(self._rest, at + 1 - len(hashes))
            hashes.extend(int.from_bytes(digest, "little") for digest in more)
        return hashes[at]
