"""Blobs by content: right or not at all, fetched once."""

import zlib
from collections.abc import AsyncIterator

import pytest
from forebay_gateway.store import MAX_BLOBS, Store
from forebay_shared import keys
from forebay_shared.bus import Publisher
from forebay_shared.errors import BusError
from forebay_shared.models import content_hash
from forebay_shared.supervise import Supervisor


@pytest.fixture
async def publisher(redis_url: str) -> AsyncIterator[Publisher]:
    one = Publisher(redis_url)
    async with Supervisor("test") as tasks:
        tasks.start("publisher", one.run())
        yield one


async def _put(publisher: Publisher, name: str, packed: bytes) -> None:
    await publisher.call("SET", keys.blob(name), packed, "PX", keys.BLOB_TTL_MS)


async def test_a_blob_is_fetched_once_and_the_least_used_is_forgotten(
    publisher: Publisher,
) -> None:
    store = Store(publisher)
    contents = [f"tokenizer {number}".encode() for number in range(MAX_BLOBS + 1)]
    for content in contents:
        await _put(publisher, content_hash(content), zlib.compress(content))
        assert await store.blob(content_hash(content)) == content
        await publisher.call("DEL", keys.blob(content_hash(content)))
        assert await store.blob(content_hash(content)) == content
    assert await store.blob(content_hash(contents[1])) == contents[1]
    with pytest.raises(BusError):
        await store.blob(content_hash(contents[0]))


@pytest.mark.parametrize(
    "packed", [None, b"no zlib", zlib.compress(b"other content")], ids=["none", "torn", "foreign"]
)
async def test_missing_or_foreign_content_is_never_given_out(
    publisher: Publisher, packed: bytes | None
) -> None:
    name = content_hash(b"wanted")
    if packed is not None:
        await _put(publisher, name, packed)
    with pytest.raises(BusError):
        await Store(publisher).blob(name)
