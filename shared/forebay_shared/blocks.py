"""The chained block hash, for the worker's prefix cache and the gateway's router. Exists once.

h_0 = H(model revision, adapter, cache salt); h_i = H(h_{i-1}, token ids of block i), with H the
first 8 bytes of BLAKE2b. An engine compares the tokens on a hit, so a collision costs time, never a
wrong answer.
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

HASH_BYTES = 8


def root_hash(revision: str, adapter: str = "", cache_salt: str = "") -> bytes:
    """The parent of a sequence's first block. Parts are length-prefixed: none can forge another."""
    digest = blake2b(digest_size=HASH_BYTES)
    for part in (revision, adapter, cache_salt):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(4, "little") + data)
    return digest.digest()


def chain(parent: bytes, token_ids: Sequence[int], block_size: int) -> Iterator[bytes]:
    """Hashes of the full blocks of `token_ids`, in order; a last partial block has none."""
    packed = array("I", token_ids)
    width = block_size * packed.itemsize
    view = memoryview(packed).cast("B")
    for start in range(0, len(view) - width + 1, width):
        parent = blake2b(
            parent + view[start : start + width].tobytes(), digest_size=HASH_BYTES
        ).digest()
        yield parent
