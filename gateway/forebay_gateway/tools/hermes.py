"""Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one tag per call."""

from collections.abc import Sequence

from forebay_gateway.tools.base import Markers, Tool, ToolParser
from forebay_gateway.tools.json_text import CallObject

OPEN, CLOSE = "<tool_call>", "</tool_call>"

_STARTS = Markers(OPEN)


class HermesParser(ToolParser):
    markers = (OPEN, CLOSE)

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self._call: CallObject | None = None
        self._opener = ""

    @classmethod
    def writes(cls, template: str) -> bool:
        return OPEN in template and "<function=" not in template

    def _begin(self) -> bool:
        if not self._say_until(_STARTS):
            return False
        return self._open(OPEN)

    def _open(self, opener: str) -> bool:
        self._opener = opener
        self._call = CallObject(self._out, lambda name: True)
        return self._goto(self._inside)

    def _inside(self) -> bool:
        call = self._call
        assert call is not None
        self._at = call.feed(self._text, self._at)
        if not (call.broken or call.done):
            return False
        self._abandon()
        return self._goto(self._behind if call.started else self._begin)

    def _behind(self) -> bool:
        """Behind a call: its closing tag, another call in the same tag, or text."""
        if self._skip_space() == "{":
            return self._open("")
        if self._sees(CLOSE) is None:
            return False
        return self._goto(self._begin)

    def _abandon(self) -> None:
        if self._state == self._behind and CLOSE.startswith(self._text[self._at :].lstrip()):
            self._at = len(self._text)  # the tag of a whole call, cut off
        if self._call is not None:
            if not self._call.started:
                self._out.say(self._opener)
            self._call.abandon()
            self._call = None
