"""Tokenizers and templates by the hash of their content: fetched once from Redis, kept in a small
LRU.
"""


class Store:
    """Content-addressed blobs."""

    async def blob(self, sha256: str) -> bytes:
        """The content whose SHA-256 (hex) is `sha256`, uncompressed.

        Raises:
            BusError: Redis is away, holds no such blob, or holds other content under this name.
        """
        raise NotImplementedError
