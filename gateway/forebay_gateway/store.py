"""Tokenizers and templates by the hash of their content: fetched once, kept in a small LRU."""

import zlib
from collections import OrderedDict

from forebay_shared import keys
from forebay_shared.bus import Publisher
from forebay_shared.errors import BusError
from forebay_shared.models import content_hash

MAX_BLOBS = 16


class Store:
    """Content-addressed blobs."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._blobs: OrderedDict[str, bytes] = OrderedDict()

    async def blob(self, sha256: str) -> bytes:
        """The content whose SHA-256 (hex) is `sha256`, uncompressed.

        Raises:
            BusError: Redis is away, holds no such blob, or holds other content under this name.
        """
        if sha256 in self._blobs:
            self._blobs.move_to_end(sha256)
            return self._blobs[sha256]
        packed = await self._publisher.call("GET", keys.blob(sha256))
        content = _unpacked(packed) if isinstance(packed, bytes) else None
        if content is None or content_hash(content) != sha256:
            raise BusError("The model's files are not available yet.", retry_after_s=1.0)
        self._blobs[sha256] = content
        if len(self._blobs) > MAX_BLOBS:
            self._blobs.popitem(last=False)
        return content


def _unpacked(packed: bytes) -> bytes | None:
    try:
        return zlib.decompress(packed)
    except zlib.error:
        return None
