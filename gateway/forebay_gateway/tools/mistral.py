"""Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]` or `[TOOL_CALLS]name[ARGS]{…}`.

The second form, since v11, has one `[TOOL_CALLS]` per call, and may hold `[CALL_ID]id` before its
arguments.
"""

import re
from collections.abc import Sequence

from forebay_gateway.tools.base import MAX_NAME, Markers, Tool
from forebay_gateway.tools.json_text import CallObject, JsonValue
from forebay_gateway.tools.markup import MarkupParser

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

_NAME_END = re.compile(r"[^\w.\-]")

_STARTS = Markers(CALLS)


class MistralParser(MarkupParser):
    markers = (CALLS, ARGS, CALL_ID)

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self._call: CallObject | None = None
        self._word: list[str] = []
        self._name = ""
        self._listed = False

    @classmethod
    def writes(cls, template: str) -> bool:
        return CALLS in template

    def _begin(self) -> bool:
        if not self._say_until(_STARTS):
            return False
        self._raw = [CALLS]
        self._listed = False
        self._name = ""
        return self._goto(self._opened)

    def _opened(self) -> bool:
        char = self._space()
        if char == "[":
            self._listed = True
            self._take(1)
            return self._goto(self._between)
        if char == "{":
            return self._open()
        return bool(char) and self._goto(self._read_name)

    def _between(self) -> bool:
        """In a list, where a call may begin."""
        char = self._space()
        if char == "{":
            return self._open()
        if char == ",":
            self._take(1)
            return True
        if char == "]":
            self._at += 1
            return self._leave(whole=True)
        return bool(char) and self._leave(whole=False)

    def _open(self) -> bool:
        self._call = CallObject(self._out, lambda name: True)
        return self._goto(self._in_object)

    def _in_object(self) -> bool:
        call = self._call
        assert call is not None
        self._at = call.feed(self._text, self._at)
        if call.broken:
            return self._leave(whole=False)
        if not call.done:
            return False
        self._call = None
        self._raw.clear()
        return self._goto(self._between) if self._listed else self._leave(whole=True)

    def _read_name(self) -> bool:
        found = _NAME_END.search(self._text, self._at)
        length = (found.start() if found else len(self._text)) - self._at
        room = MAX_NAME - sum(map(len, self._word))
        self._word.append(self._text[self._at : self._at + min(length, room)])
        self._take(min(length, room))
        if length > room:
            return self._leave(whole=False)
        if found is None:
            return False
        word = "".join(self._word)
        self._word.clear()
        self._name = self._name or word
        return self._goto(self._behind_name) if self._name else self._leave(whole=False)

    def _behind_name(self) -> bool:
        char = self._space()
        if char == "{":
            self._out.start(self._name)
            self._raw.clear()
            self._json = JsonValue()
            return self._goto(self._in_arguments)
        if not char:
            return False
        for marker, then in ((ARGS, self._behind_name), (CALL_ID, self._read_name)):
            begin = self._at
            seen = self._sees(marker)
            if seen is None:
                return False
            if seen:
                self._raw.append(self._text[begin : self._at])
                return self._goto(then)
        return self._leave(whole=False)

    def _in_arguments(self) -> bool:
        return self._argue() and self._leave(whole=True)

    def _leave(self, *, whole: bool) -> bool:
        if whole:
            self._raw.clear()
        self._abandon()
        return self._goto(self._begin)

    def _abandon(self) -> None:
        if self._call is None or not self._call.started:
            self._out.say("".join(self._raw))
        if self._call is not None:
            self._call.abandon()
        if self._json is not None:
            self._out.end()
        self._raw.clear()
        self._word.clear()
        self._call = self._json = None
