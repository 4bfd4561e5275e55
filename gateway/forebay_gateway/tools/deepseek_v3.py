"""DeepSeek V3, R1 and V3.1: calls between control tokens, arguments in a code block or bare.

`<｜tool▁call▁begin｜>function<｜tool▁sep｜>name⏎```json⏎{…}⏎```<｜tool▁call▁end｜>` (V3, R1) or
`<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>` (V3.1), all of it within
`<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`.
"""

from collections.abc import Sequence

from forebay_gateway.tools.base import MAX_NAME, Markers, Tool
from forebay_gateway.tools.json_text import JsonValue
from forebay_gateway.tools.markup import MarkupParser

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"

_FENCE = "```"
_STARTS = Markers(CALLS_BEGIN, CALL_BEGIN)
_MAX_HEAD = MAX_NAME + 64


class DeepSeekV3Parser(MarkupParser):
    markers = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self._head: list[str] = []

    @classmethod
    def writes(cls, template: str) -> bool:
        return CALLS_BEGIN in template

    def _begin(self) -> bool:
        marker = self._say_until(_STARTS)
        if not marker:
            return False
        self._raw = [marker]
        return self._goto(self._between if marker == CALLS_BEGIN else self._in_head)

    def _between(self) -> bool:
        """Where a call may begin."""
        if not self._space():
            return False
        for marker in (CALL_BEGIN, CALLS_END):
            seen = self._sees(marker)
            if seen is None:
                return False
            if seen:
                self._raw.append(marker)
                if marker == CALL_BEGIN:
                    return self._goto(self._in_head)
                self._raw.clear()
                return self._leave()
        return self._leave()

    def _in_head(self) -> bool:
        """What stands before the arguments' brace: kind, separator, name, the fence of a block."""
        brace = self._text.find("{", self._at)
        length = (len(self._text) if brace < 0 else brace) - self._at
        room = _MAX_HEAD - sum(map(len, self._head))
        self._head.append(self._text[self._at : self._at + min(length, room)])
        self._at += min(length, room)
        if length > room:
            return self._leave()
        if brace < 0:
            return False
        name = _name("".join(self._head))
        if not name:
            return self._leave()
        self._head.clear()
        self._raw.clear()
        self._out.start(name)
        self._json = JsonValue()
        return self._goto(self._in_arguments)

    def _in_arguments(self) -> bool:
        return self._argue() and self._goto(self._behind)

    def _behind(self) -> bool:
        """Behind the arguments: the fence, then the end of the call, or text."""
        if not self._skip_space():
            return False
        for marker, then in ((_FENCE, self._behind), (CALL_END, self._between)):
            seen = self._sees(marker)
            if seen is None:
                return False
            if seen:
                return self._goto(then)
        return self._goto(self._begin)

    def _leave(self) -> bool:
        self._abandon()
        return self._goto(self._begin)

    def _abandon(self) -> None:
        if self._json is not None:
            self._out.end()
        self._out.say("".join([*self._raw, *self._head]))
        self._raw.clear()
        self._head.clear()
        self._json = None


def _name(head: str) -> str:
    """The name in a call's head; empty when it is no head."""
    kind, separator, rest = head.partition(SEPARATOR)
    name, fence, block = rest.partition(_FENCE)
    if not separator:
        return ""
    if not rest.strip():
        return _single(kind)
    if not fence or block.strip() not in ("json", ""):
        return ""
    return _single(name)


def _single(text: str) -> str:
    """The only word of a text; empty when there is none or more than one."""
    words = text.split()
    return words[0] if len(words) == 1 and "<" not in words[0] else ""
