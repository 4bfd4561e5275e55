"""MarkupParser: one whose markup becomes text again when no call comes of it."""

from collections.abc import Sequence

from forebay_gateway.tools.base import Tool, ToolParser
from forebay_gateway.tools.json_text import JsonValue


class MarkupParser(ToolParser):
    """Keeps what it has read since a call was last whole."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self._raw: list[str] = []
        self._json: JsonValue | None = None
        """The arguments of a call, while they are read."""

    def _space(self) -> str:
        """Takes white space. The character behind it, or "" when there is none yet."""
        begin = self._at
        char = self._skip_space()
        self._raw.append(self._text[begin : self._at])
        return char

    def _take(self, length: int) -> None:
        self._raw.append(self._text[self._at : self._at + length])
        self._at += length

    def _argue(self) -> bool:
        """Passes on what there is of a call's arguments. True when that was all, or broken: then
        the call has ended."""
        value = self._json
        assert value is not None
        end = value.feed(self._text, self._at)
        self._out.argue(self._text[self._at : end])
        self._at = end
        if not (value.done or value.broken):
            return False
        self._json = None
        self._out.end()
        return True
