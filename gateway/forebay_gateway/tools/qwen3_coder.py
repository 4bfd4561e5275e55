"""Qwen3 Coder: calls in a kind of XML, one tag per parameter, values as plain text.

`<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>`; the outer tag
may be missing. The arguments' JSON is made here: the tool's schema says what a value's text means.
"""

import re
from collections.abc import Sequence

import msgspec
from forebay_shared.template import Json

from forebay_gateway.tools.base import MAX_NAME, Markers, Tool, ToolParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"

_STARTS = Markers(OPEN, FUNCTION)
_VALUE_END = Markers("\n" + PARAMETER_END, PARAMETER_END)
_WORD_END = re.compile(r"[><\n]")
_encode = msgspec.json.Encoder().encode


class Qwen3CoderParser(ToolParser):
    markers = (OPEN, CLOSE)

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self._raw: list[str] = []
        """The markup before a call starts."""
        self._word: list[str] = []
        self._properties: dict[str, Json] = {}
        self._inside = False
        self._separator = "{"
        self._text_value = False
        self._fresh = False
        self._value: list[str] = []

    @classmethod
    def writes(cls, template: str) -> bool:
        return FUNCTION in template and PARAMETER in template

    def _begin(self) -> bool:
        marker = self._say_until(_STARTS)
        if not marker:
            return False
        self._raw = [marker]
        return self._goto(self._before_function if marker == OPEN else self._name)

    def _before_function(self) -> bool:
        begin = self._at
        self._skip_space()
        self._raw.append(self._text[begin : self._at])
        seen = self._sees(FUNCTION)
        if seen:
            self._raw.append(FUNCTION)
            return self._goto(self._name)
        return seen is not None and self._leave()

    def _name(self) -> bool:
        name = self._read_word()
        if not name:
            return name is not None and self._leave()
        self._raw.clear()
        tool = self._tools.get(name)
        properties = tool.parameters.get("properties") if tool else None
        self._properties = properties if isinstance(properties, dict) else {}
        self._inside = True
        self._separator = "{"
        self._out.start(name)
        return self._goto(self._between)

    def _between(self) -> bool:
        """In a call, where a parameter or the call's end may stand."""
        if not self._skip_space():
            return False
        for marker, then in ((PARAMETER, self._key), (FUNCTION_END, self._behind)):
            seen = self._sees(marker)
            if seen is None:
                return False
            if seen:
                if marker == FUNCTION_END:
                    self._end()
                return self._goto(then)
        return self._leave()

    def _key(self) -> bool:
        key = self._read_word()
        if not key:
            return key is not None and self._leave()
        self._out.argue(f"{self._separator}{_json(key)}: ")
        self._separator = ", "
        self._text_value = _types(self._properties.get(key, {"type": "string"})) == {"string"}
        if self._text_value:
            self._out.argue('"')
        self._fresh = True
        return self._goto(self._in_value)

    def _in_value(self) -> bool:
        """One line feed at either end of a value belongs to the markup."""
        if self._fresh:
            self._fresh = False
            if self._text[self._at] == "\n":
                # It may be the line feed before the end tag, too: then the value is empty.
                self._at += 1
                return True
        found = _VALUE_END.search(self._text, self._at)
        held = _VALUE_END.held(self._text, self._at)
        end = found.start() if found else len(self._text) - held
        piece = self._text[self._at : end]
        if self._text_value:
            self._out.argue(_json(piece)[1:-1])
        else:
            self._value.append(piece)
        self._at = found.end() if found else end
        if not found:
            return False
        self._end_value()
        return self._goto(self._between)

    def _end_value(self) -> None:
        if self._text_value:
            self._out.argue('"')
        else:
            self._out.argue(_typed("".join(self._value)))
            self._value.clear()

    def _behind(self) -> bool:
        """Behind a call: another one in the same tag, the tag's end, or text."""
        if not self._skip_space():
            return False
        if self._sees(CLOSE) is None:
            return False
        return self._goto(self._begin)

    def _end(self) -> None:
        self._out.argue("{}" if self._separator == "{" else "}")
        self._out.end()
        self._inside = False

    def _read_word(self) -> str | None:
        """What stands before the next `>`; None: not there yet; empty: it is no word."""
        found = _WORD_END.search(self._text, self._at)
        length = (found.start() if found else len(self._text)) - self._at
        room = MAX_NAME - sum(map(len, self._word))
        self._word.append(self._text[self._at : self._at + min(length, room)])
        self._at += min(length, room)
        if length > room or (found and found.group() != ">"):
            return ""
        if found is None:
            return None
        word = "".join(self._word).strip()
        if word:
            self._at += 1
            self._word.clear()
        return word

    def _leave(self) -> bool:
        self._abandon()
        return self._goto(self._begin)

    def _abandon(self) -> None:
        if self._value:
            self._out.argue(_json("".join(self._value)))
        if self._inside:
            self._out.end()
        self._out.say("".join([*self._raw, *self._word]))
        self._raw.clear()
        self._word.clear()
        self._value.clear()
        self._inside = False


def _json(value: str) -> str:
    return _encode(value).decode()


def _types(schema: Json) -> set[str]:
    """The JSON types that a schema allows; `any` when it does not say."""
    if not isinstance(schema, dict):
        return {"any"}
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {item for item in kind if isinstance(item, str)}
    return {"any"}


def _typed(text: str) -> str:
    """The JSON of a value that need not be a string; what is no JSON is one after all."""
    bare = text.strip()
    lowered = bare.lower()
    if lowered in ("true", "false", "null", "none"):
        return "null" if lowered == "none" else lowered
    try:
        msgspec.json.decode(bare)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return _json(text)
    return bare
