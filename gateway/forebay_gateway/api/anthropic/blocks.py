"""An answer's parts as content blocks: one block is open at a time, and each says its own JSON.

Streamed and whole answers are made of the same blocks, so they hold the same. It knows no HTTP.
"""

from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Iterator
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from forebay_gateway.api.transcript import Update
from forebay_gateway.parts import CallArguments, CallEnd, CallStart, Reasoning, Text

_encode = msgspec.json.Encoder().encode
_EMPTY_OBJECT = b"{}"


class Block(ABC):
    """A content block that grows. `pieces` holds its text where the whole of it is wanted."""

    def __init__(self) -> None:
        self.pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @abstractmethod
    def start(self) -> bytes:
        """Its JSON before anything came."""

    @abstractmethod
    def delta(self, text: str) -> bytes:
        """The JSON of what came; empty when the client is not to see it."""

    @abstractmethod
    def whole(self) -> bytes:
        """Its JSON once it is complete."""

    def last(self) -> bytes:
        """The JSON of what comes last, when something does."""
        return b""


class TextBlock(Block):
    def start(self) -> bytes:
        return b'{"type":"text","text":""}'

    def delta(self, text: str) -> bytes:
        return b'{"type":"text_delta","text":%b}' % _encode(text)

    def whole(self) -> bytes:
        return b'{"type":"text","text":%b}' % _encode(self.text)


class ThinkingBlock(Block):
    """Thinking. Clients send a block back only if it is signed; the signature is a digest of the
    text, which nobody here checks. `shown` is false when the client wants to know only that it was.
    """

    def __init__(self, *, shown: bool) -> None:
        super().__init__()
        self._shown = shown
        self._digest = blake2b(digest_size=32)

    def start(self) -> bytes:
        return b'{"type":"thinking","thinking":"","signature":""}'

    def delta(self, text: str) -> bytes:
        self._digest.update(text.encode())
        return b'{"type":"thinking_delta","thinking":%b}' % _encode(text) if self._shown else b""

    def last(self) -> bytes:
        return b'{"type":"signature_delta","signature":"%b"}' % self._signature

    def whole(self) -> bytes:
        self._digest.update(self.text.encode())
        text = _encode(self.text if self._shown else "")
        return b'{"type":"thinking","thinking":%b,"signature":"%b"}' % (text, self._signature)

    @property
    def _signature(self) -> bytes:
        return b64encode(self._digest.digest())


class ToolUseBlock(Block):
    def __init__(self, call: CallStart) -> None:
        super().__init__()
        id_ = _encode("toolu_" + call.id.removeprefix("call_"))
        self._head = b'{"type":"tool_use","id":%b,"name":%b' % (id_, _encode(call.name))

    def start(self) -> bytes:
        return self._head + b',"input":{}}'

    def delta(self, text: str) -> bytes:
        return b'{"type":"input_json_delta","partial_json":%b}' % _encode(text)

    def whole(self) -> bytes:
        return b'%b,"input":%b}' % (self._head, _object(self.text))


def _object(text: str) -> bytes:
    """The arguments, which an answer that was cut may leave incomplete: then there are none."""
    try:
        found = msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError):
        return _EMPTY_OBJECT
    return text.strip().encode() if found else _EMPTY_OBJECT


class Move(NamedTuple):
    """What happens to a block: it begins, it gets `text`, or it ends."""

    block: Block
    number: int
    text: str = ""
    begins: bool = False
    ends: bool = False


class Blocks:
    """The blocks of one answer."""

    def __init__(self, *, shows_thinking: bool) -> None:
        self._shows_thinking = shows_thinking
        self._open: Block | None = None
        self._index = -1

    def moves(self, update: Update) -> Iterator[Move]:
        """What an update does to the blocks."""
        if update.text:
            yield from self._say(TextBlock, update.text)
        for part in update.parts:
            match part:
                case Text():
                    yield from self._say(TextBlock, part.text)
                case Reasoning():
                    yield from self._say(ThinkingBlock, part.text)
                case CallStart():
                    yield from self._begin(ToolUseBlock(part))
                case CallArguments():
                    yield from self._say(ToolUseBlock, part.text)
                case CallEnd():
                    yield from self._end()
        if update.reason is not None:
            yield from self._end()

    def _say(self, kind: type[Block], text: str) -> Iterator[Move]:
        block = self._open
        if not isinstance(block, kind):
            new = TextBlock()
            if kind is ThinkingBlock:
                new = ThinkingBlock(shown=self._shows_thinking)
            yield from self._begin(new)
            block = new
        yield Move(block, self._index, text)

    def _begin(self, block: Block) -> Iterator[Move]:
        yield from self._end()
        self._open = block
        self._index += 1
        yield Move(block, self._index, begins=True)

    def _end(self) -> Iterator[Move]:
        if self._open is not None:
            yield Move(self._open, self._index, ends=True)
            self._open = None
