"""Pythonic calls (Llama 4 and others): the answer is `[name(key="value", n=1), other()]`.

Only the names of the request's tools make a call: any list would look alike.
"""

import re
from collections.abc import Sequence

from forebay_gateway.tools.base import MAX_NAME, Markers, Tool
from forebay_gateway.tools.markup import MarkupParser
from forebay_gateway.tools.python_text import PythonValue, json_string

START, END = "<|python_start|>", "<|python_end|>"

_STARTS = Markers(START)
_WORD_END = re.compile(r"[^\w.\-]")


class PythonicParser(MarkupParser):
    markers = (START, END)

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self._word: list[str] = []
        self._called = False
        """Whether the list holds a call."""
        self._separator = ""
        """What goes before the next argument; empty outside of calls."""
        self._value = PythonValue()

    @classmethod
    def writes(cls, template: str) -> bool:
        return START in template or "func_name1(" in template

    def _begin(self) -> bool:
        space = self._at
        char = self._skip_space()
        self._out.say(self._text[space : self._at])
        if char == "[":
            return self._open()
        return bool(char) and self._goto(self._outside)

    def _outside(self) -> bool:
        if not self._say_until(_STARTS):
            return False
        self._raw = [START]
        return self._goto(self._tagged)

    def _tagged(self) -> bool:
        char = self._space()
        if char == "[":
            return self._open()
        return bool(char) and self._leave()

    def _open(self) -> bool:
        self._take(1)
        self._called = False
        return self._goto(self._between)

    def _between(self) -> bool:
        """In the list, where a call may begin."""
        char = self._space()
        if char == ",":
            self._take(1)
            return True
        if char == "]":
            self._take(1)
            if self._called:
                self._raw.clear()
            return self._goto(self._behind)
        return bool(char) and self._goto(self._name)

    def _name(self) -> bool:
        name = self._read_word()
        if name is None:
            return False
        if name not in self._tools or self._text[self._at] != "(":
            return self._leave()
        self._at += 1
        self._raw.clear()
        self._out.start(name)
        self._separator = "{"
        self._called = True
        return self._goto(self._arguments)

    def _arguments(self) -> bool:
        """In a call, where an argument or the call's end may stand."""
        char = self._skip_space()
        if char == ")":
            self._at += 1
            self._out.argue("{}" if self._separator == "{" else "}")
            self._separator = ""
            self._out.end()
            return self._goto(self._between)
        if char == ",":
            self._at += 1
            return True
        return bool(char) and self._goto(self._key)

    def _key(self) -> bool:
        key = self._read_word()
        if key is None:
            return False
        if not key or self._text[self._at] != "=":
            return self._leave()
        self._at += 1
        self._raw.clear()
        self._out.argue(f"{self._separator}{json_string(key)}: ")
        self._separator = ", "
        self._value = PythonValue()
        return self._goto(self._in_value)

    def _in_value(self) -> bool:
        self._at, piece = self._value.feed(self._text, self._at)
        self._out.argue(piece)
        if self._value.broken:
            return self._leave()
        return self._value.done and self._goto(self._arguments)

    def _behind(self) -> bool:
        """Behind the list: its end tag, or text."""
        if not self._skip_space():
            return False
        if self._sees(END) is None:
            return False
        return self._leave()

    def _read_word(self) -> str | None:
        """A name; None: its end is not there yet; empty: it is none."""
        found = _WORD_END.search(self._text, self._at)
        length = (found.start() if found else len(self._text)) - self._at
        room = MAX_NAME - sum(map(len, self._word))
        self._word.append(self._text[self._at : self._at + min(length, room)])
        self._take(min(length, room))
        if length > room:
            return ""
        if found is None:
            return None
        word = "".join(self._word)
        self._word.clear()
        return word

    def _leave(self) -> bool:
        self._abandon()
        return self._goto(self._outside)

    def _abandon(self) -> None:
        if self._separator:
            self._out.end()
        self._out.say("".join(self._raw))
        self._raw.clear()
        self._word.clear()
        self._separator = ""
