"""vLLM's KV events as changes of our CacheLog: its blocks under our hashes.

An event names a block by vLLM's hash, its parent, and its tokens; so ours is made as the gateway
makes it, from the root of model, adapter and salt on. Blocks whose parent is not known are left
out: the router then expects less than there is, never more. It knows no engine.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Hashable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, cast

import msgspec
from forebay_shared.blocks import chain, root_hash

from forebay_worker.engines.base import CacheLog
from forebay_worker.engines.vllm_sampling import ADAPTER, SALT

log = logging.getLogger(__name__)

GPU = (None, "GPU")
"""Where blocks count: what was moved to a slower place has to be fetched first."""


class BlockStored(msgspec.Struct, tag="BlockStored"):
    """As vLLM packs it; fields that are of no use here are left out."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_name: str | None = None
    medium: str | None = None
    extra_keys: list[list[Any] | None] | None = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


_NO_ADAPTERS: Mapping[str, str] = MappingProxyType({})

decode = msgspec.msgpack.Decoder(Batch).decode


class CacheEvents:
    """What vLLM's cache holds. A block may be there more than once; its hash is, while any is.
    `adapters` are revisions by name."""

    def __init__(
        self, cache_log: CacheLog, revision: str, adapters: Mapping[str, str] = _NO_ADAPTERS
    ) -> None:
        self._log = cache_log
        self._revision = revision
        self._adapters = adapters
        self._ours: dict[Hashable, bytes] = {}
        self._copies: Counter[Hashable] = Counter()
        cache_log.everything = lambda: list(dict.fromkeys(self._ours.values()))

    def __len__(self) -> int:
        return len(self._ours)

    def take(self, batch: Batch) -> None:
        """The events of one step."""
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._stored(event)
            elif isinstance(event, BlockRemoved):
                self._removed(event)
            else:
                self.clear()
        self._log.flush()

    def clear(self) -> None:
        """Nothing is known to be there any more."""
        for ours in self._ours.values():
            self._log.note(ours, False)
        self._ours.clear()
        self._copies.clear()
        self._log.flush()

    def _stored(self, event: BlockStored) -> None:
        name = (event.lora_name or "").removeprefix(ADAPTER)
        adapter = self._adapters.get(name, "")
        if event.medium not in GPU or (name and not adapter):
            return
        parent = event.parent_block_hash
        if parent is None:
            above = root_hash(self._revision, adapter, _salt(event.extra_keys))
        elif (known := self._ours.get(parent)) is not None:
            above = known
        else:
            return
        hashes = chain(above, event.token_ids, event.block_size)
        for theirs, ours in zip(event.block_hashes, hashes, strict=False):
            self._copies[theirs] += 1
            if self._copies[theirs] == 1:
                self._ours[theirs] = ours
                self._log.note(ours, True)

    def _removed(self, event: BlockRemoved) -> None:
        if event.medium not in GPU:
            return
        for theirs in event.block_hashes:
            if theirs not in self._ours:
                continue
            self._copies[theirs] -= 1
            if self._copies[theirs] <= 0:
                del self._copies[theirs]
                self._log.note(self._ours.pop(theirs), False)


async def listen(endpoint: str, cache: CacheEvents) -> None:
    """Takes what vLLM publishes at `endpoint`, until cancelled. A gap empties what is known."""
    zmq: Any = import_module("zmq")
    context: Any = import_module("zmq.asyncio").Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(endpoint)
    expected = 0
    try:
        while True:
            _, number, payload = await socket.recv_multipart()
            if (came := int.from_bytes(number, "big")) != expected:
                log.warning("%d batches of cache events were missed", came - expected)
                cache.clear()
            expected = came + 1
            try:
                cache.take(decode(payload))
            except msgspec.MsgspecError:
                log.warning("a batch of cache events cannot be read")
                cache.clear()
    except asyncio.CancelledError:
        pass
    finally:
        socket.close()
        context.term()


def _salt(extra_keys: list[list[Any] | None] | None) -> str:
    """The cache salt, which stands with a sequence's first block alone, as it is or behind a word
    that says so."""
    first = extra_keys[0] if extra_keys else None
    salts = [text for text in map(_text, first or ()) if text.startswith(SALT)]
    return salts[0].removeprefix(SALT) if salts else ""


def _text(key: Any) -> str:
    words = cast("list[Any]", key) if isinstance(key, list) else [key]
    return words[-1] if words and isinstance(words[-1], str) else ""
