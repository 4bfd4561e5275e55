"""What an answer is made of once it is understood: text, reasoning, tool calls, in their order.

The parsers of `tools` and `reasoning` make these, every dialect writes them. It knows no dialect.
"""

from collections.abc import Sequence
from typing import TypeAlias

import msgspec
from msgspec.structs import replace


class Text(msgspec.Struct, frozen=True, gc=False):
    """Text of the visible answer."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """Text of the model's thinking."""

    text: str


class CallStart(msgspec.Struct, frozen=True, gc=False):
    """A tool call begins. `index` counts the calls of one answer."""

    index: int
    id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """A piece of a call's arguments: all of them joined are the JSON text."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True, gc=False):
    """A call is over; at the end of a cut answer its arguments may be incomplete."""

    index: int


Part: TypeAlias = Text | Reasoning | CallStart | CallArguments | CallEnd


def merged(parts: list[Part]) -> list[Part]:
    """The same with neighbours of one kind joined: fewer and larger pieces for a client."""
    if len(parts) < 2:
        return parts
    joined: list[Part] = []
    run: list[str] = []
    for part, after in zip(parts, [*parts[1:], None], strict=True):
        if isinstance(part, CallStart | CallEnd):
            joined.append(part)
            continue
        run.append(part.text)
        if type(after) is not type(part):
            joined.append(part if len(run) == 1 else replace(part, text="".join(run)))
            run.clear()
    return joined


class Call:
    """A tool call as a whole."""

    __slots__ = ("_pieces", "id", "name")

    def __init__(self, id_: str, name: str) -> None:
        self.id = id_
        self.name = name
        self._pieces: list[str] = []

    def add(self, piece: str) -> None:
        self._pieces.append(piece)

    @property
    def arguments(self) -> str:
        return "".join(self._pieces)


class Collected:
    """One answer, put together from its parts."""

    __slots__ = ("_reasoning", "_text", "calls")

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[Call] = []

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    def add_text(self, text: str) -> None:
        self._text.append(text)

    def add(self, parts: Sequence[Part]) -> None:
        for part in parts:
            match part:
                case Text():
                    self._text.append(part.text)
                case Reasoning():
                    self._reasoning.append(part.text)
                case CallStart():
                    self.calls.append(Call(part.id, part.name))
                case CallArguments():
                    self.calls[part.index].add(part.text)
                case CallEnd():
                    pass
