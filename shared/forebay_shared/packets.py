"""Packets to bytes and back, whatever the bytes hold: one codec per stream kind.

The fast path decodes a whole packet at once. When that fails (a message type of a newer version, a
damaged message, random bytes) each message is tried alone, what cannot be read is counted, and
nothing is ever raised: a poisoned entry must not stop a reader. It knows no Redis.
"""

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar, cast

import msgspec

from forebay_shared.wire import (
    WIRE_VERSION,
    CacheEvent,
    CachePacket,
    Changed,
    ChangesPacket,
    Reply,
    ReplyPacket,
    RosterEvent,
    RosterPacket,
    Work,
    WorkPacket,
)

M = TypeVar("M")

_UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)


class Packet(Protocol[M]):
    """What the packets of all streams have in common."""

    def __init__(self, version: int, sender: str, messages: list[M]) -> None: ...

    @property
    def sender(self) -> str: ...

    @property
    def messages(self) -> list[M]: ...


class _Loose(msgspec.Struct, array_like=True):
    """A packet whose messages are not looked into yet."""

    version: int
    sender: str
    messages: list[msgspec.Raw]


class Codec(Generic[M]):
    """Packets of type `packet`, whose messages are of the union `message`."""

    def __init__(self, packet: type[Packet[M]], message: Any) -> None:
        self._packet = packet
        self._encode = msgspec.msgpack.Encoder().encode
        self._whole = msgspec.msgpack.Decoder(packet).decode
        self._loose = msgspec.msgpack.Decoder(_Loose).decode
        self._single = cast(Callable[[msgspec.Raw], M], msgspec.msgpack.Decoder(message).decode)

    def encode(self, sender: str, messages: list[M]) -> bytes:
        return self._encode(self._packet(WIRE_VERSION, sender, messages))

    def decode(self, data: bytes) -> tuple[list[M], int]:
        """The messages that could be read, and how many could not."""
        try:
            return self._whole(data).messages, 0
        except _UNREADABLE:
            return self._salvage(data)

    def _salvage(self, data: bytes) -> tuple[list[M], int]:
        try:
            raws = self._loose(data).messages
        except _UNREADABLE:
            return [], 1
        messages: list[M] = []
        for raw in raws:
            try:
                messages.append(self._single(raw))
            except _UNREADABLE:
                continue
        return messages, len(raws) - len(messages)


WORK: Codec[Work] = Codec(WorkPacket, Work)
REPLY: Codec[Reply] = Codec(ReplyPacket, Reply)
ROSTER: Codec[RosterEvent] = Codec(RosterPacket, RosterEvent)
CACHE: Codec[CacheEvent] = Codec(CachePacket, CacheEvent)
CHANGES: Codec[Changed] = Codec(ChangesPacket, Changed)
