"""Llama 3: the whole answer is `{"name": …, "parameters": {…}}`, or such behind `<|python_tag|>`.

Several calls are parted by semicolons. Any answer in JSON looks alike, so only the names of the
request's tools make a call.
"""

from collections.abc import Sequence

from forebay_gateway.tools.base import Markers, Tool, ToolParser
from forebay_gateway.tools.json_text import CallObject

TAG = "<|python_tag|>"

_STARTS = Markers(TAG)


class Llama3JsonParser(ToolParser):
    markers = (TAG,)

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self._call: CallObject | None = None
        self._opener: list[str] = []

    @classmethod
    def writes(cls, template: str) -> bool:
        return TAG in template or '{"name": function name, "parameters"' in template

    def _begin(self) -> bool:
        space = self._at
        char = self._skip_space()
        self._out.say(self._text[space : self._at])
        if char == "{":
            return self._open()
        return bool(char) and self._goto(self._outside)

    def _outside(self) -> bool:
        if not self._say_until(_STARTS):
            return False
        self._opener.append(TAG)
        return self._open()

    def _open(self) -> bool:
        self._call = CallObject(self._out, self._tools.__contains__)
        return self._goto(self._inside)

    def _inside(self) -> bool:
        call = self._call
        assert call is not None
        self._at = call.feed(self._text, self._at)
        if call.broken:
            self._abandon()
            return self._goto(self._outside)
        if call.done:
            self._call = None
            self._opener.clear()
            return self._goto(self._behind)
        return False

    def _behind(self) -> bool:
        """Behind a call: another one, or text."""
        char = self._skip_space()
        if not char:
            return False
        if char == "{":
            return self._open()
        if char in ";,":
            self._at += 1
            self._opener.append(char)
            return self._goto(self._next)
        return self._goto(self._outside)

    def _next(self) -> bool:
        """Behind what parts two calls."""
        char = self._skip_space()
        if not char:
            return False
        if char == "{":
            return self._open()
        self._say_opener()
        return self._goto(self._outside)

    def _abandon(self) -> None:
        self._say_opener()
        if self._call is not None:
            self._call.abandon()
            self._call = None

    def _say_opener(self) -> None:
        if self._call is None or not self._call.started:
            self._out.say("".join(self._opener))
        self._opener.clear()
