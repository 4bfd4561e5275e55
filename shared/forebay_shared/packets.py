"""Packets to bytes and back, whatever the bytes hold: one codec per stream kind.

The fast path decodes a whole packet at once. When that fails (a message type of a newer version, a
damaged message, random bytes) each message is tried alone, what cannot be read is counted, and
nothing is ever raised: a poisoned entry must not stop a reader. It knows no Redis.
"""

from collections.abc import Callable
from typing import Annotated, Any, Generic, NamedTuple, Protocol, TypeVar, cast

import msgspec
from msgspec import Meta

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

MAX_NAME = 256
"""Characters of a request's or a gateway's name that are believed."""

_UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)


class Packet(Protocol[M]):
    """What the packets of all streams have in common."""

    def __init__(self, version: int, sender: str, messages: list[M]) -> None: ...

    @property
    def sender(self) -> str: ...

    @property
    def messages(self) -> list[M]: ...


class Unread(NamedTuple):
    """A message that cannot be read, and whose it seems to be: "" and 0 where not even that can be
    told."""

    request_id: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    attempt: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    gateway: Annotated[str, Meta(max_length=MAX_NAME)] = ""


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

    def unread(self, data: bytes) -> list[Unread]:
        """What can be told of the messages that `decode` could not read."""
        try:
            raws = self._loose(data).messages
        except _UNREADABLE:
            return [Unread()]
        return [_told(raw) for raw in raws if not self._reads(raw)]

    def _reads(self, raw: msgspec.Raw) -> bool:
        try:
            self._single(raw)
        except _UNREADABLE:
            return False
        return True


def _told(raw: msgspec.Raw) -> Unread:
    """Whose message it is, in either of the two forms that messages have."""
    try:
        value = msgspec.msgpack.decode(raw)
    except _UNREADABLE:
        return Unread()
    if isinstance(value, dict):
        fields = cast(dict[Any, Any], value)
        told = [fields.get("request_id"), fields.get("attempt"), fields.get("gateway")]
    elif isinstance(value, list):
        told = [*cast(list[Any], value)[1:3], ""]
    else:
        return Unread()
    try:
        return msgspec.convert(told, Unread)
    except msgspec.ValidationError:
        return Unread()


WORK: Codec[Work] = Codec(WorkPacket, Work)
REPLY: Codec[Reply] = Codec(ReplyPacket, Reply)
ROSTER: Codec[RosterEvent] = Codec(RosterPacket, RosterEvent)
CACHE: Codec[CacheEvent] = Codec(CachePacket, CacheEvent)
CHANGES: Codec[Changed] = Codec(ChangesPacket, Changed)
