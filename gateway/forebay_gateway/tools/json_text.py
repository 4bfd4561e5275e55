"""JSON over pieces of text: where a value ends, and calls written as `{"name": …, "arguments": …}`.

Nothing is decoded but names: arguments go out as the model wrote them. Constant work per character.
"""

import re
from collections.abc import Callable

import msgspec

from forebay_gateway.tools.base import MAX_NAME, Sink, skip_space

_IN_STRING = re.compile(r'["\\]')
_STRUCTURE = re.compile(r'["{}\[\]<]')
_SCALAR_END = re.compile(r"[,}\]\s<]")
_MAX_TEXT = MAX_NAME + len('""')
_CLOSES = {"{": "}", "[": "]"}


class JsonValue:
    """Finds the end of one value. `done` or `broken` says that it is there.

    Brackets must match and markup (`<`) stands only in strings; the rest is the model's affair.
    """

    __slots__ = ("_closers", "_escaped", "_in_string", "_scalar", "broken", "done")

    def __init__(self) -> None:
        self._closers: list[str] = []
        self._in_string = False
        self._escaped = False
        self._scalar = False
        self.done = False
        self.broken = False

    def feed(self, text: str, at: int) -> int:
        """Where, from `at` on, the part of `text` that belongs to the value ends."""
        while at < len(text) and not (self.done or self.broken):
            if self._escaped:
                self._escaped = False
                at += 1
            elif self._in_string:
                at = self._string(text, at)
            elif self._scalar:
                match = _SCALAR_END.search(text, at)
                self.done = match is not None
                at = match.start() if match else len(text)
            elif not self._closers and text[at] not in '"{[':
                self._scalar = True
            else:
                at = self._structure(text, at)
        return at

    def _string(self, text: str, at: int) -> int:
        match = _IN_STRING.search(text, at)
        if match is None:
            return len(text)
        if match.group() == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.done = not self._closers
        return match.end()

    def _structure(self, text: str, at: int) -> int:
        match = _STRUCTURE.search(text, at)
        if match is None:
            return len(text)
        char = match.group()
        if char == '"':
            self._in_string = True
        elif char in _CLOSES:
            self._closers.append(_CLOSES[char])
        elif self._closers[-1] == char:
            self._closers.pop()
            self.done = not self._closers
        else:
            self.broken = True
            return match.start()
        return match.end()


class CallObject:
    """One call written as an object with `name` and `arguments` (or `parameters`), in any order.

    Members of other names are left out. `done` says that the object is complete, `broken` that it
    is no call or went wrong. The call starts, for the sink, once its name and the first character
    of its arguments are known; a call that breaks later ends there.
    """

    def __init__(self, out: Sink, accepts: Callable[[str], bool]) -> None:
        self._out = out
        self._accepts = accepts
        self._raw: list[str] = []
        self._state = self._open
        self._value = JsonValue()
        self._end_of_value: Callable[[], None] = self._end_of_key
        self._pieces: list[str] = []
        self._short = False
        self._key = ""
        self._name: str | None = None
        self._arguments: list[str] | None = None
        """Held until the name is known."""
        self.started = False
        self.done = False
        self.broken = False

    def feed(self, text: str, at: int) -> int:
        """Where, from `at` on, the part of `text` that belongs to the call ends."""
        while at < len(text) and not (self.done or self.broken):
            begin = at
            at = self._state(text, at)
            if not self.started:
                self._raw.append(text[begin:at])
        if self.broken and self.started:
            self._out.end()
        return at

    def abandon(self) -> None:
        """Ends what has started; what has not is said as text."""
        if not self.started:
            self._out.say("".join(self._raw))
        elif not (self.done or self.broken):
            self._out.end()

    def _open(self, text: str, at: int) -> int:
        return self._expect(text, at, "{", self._member)

    def _member(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        char = text[at : at + 1]
        if char == "}":
            self._close()
            return at + 1
        if char == ",":
            return at + 1
        if char == '"':
            self._follow(self._end_of_key, short=True)
        elif char:
            self.broken = True
        return at

    def _colon(self, text: str, at: int) -> int:
        return self._expect(text, at, ":", self._value_start)

    def _value_start(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        char = text[at : at + 1]
        if not char:
            return at
        if self._key == "name" and self._name is None:
            self.broken = char != '"'
            self._follow(self._end_of_name, short=True)
        elif self._key in ("arguments", "parameters") and self._arguments is None:
            self._arguments = []
            self._start_arguments(char)
        else:
            self._follow(self._pieces.clear)
        return at

    def _start_arguments(self, char: str) -> None:
        if char == "{":
            self._try_start()
            self._value = JsonValue()
            self._state = self._stream
        elif char in '"n':
            self._follow(self._end_of_text)
        else:
            self.broken = True

    def _stream(self, text: str, at: int) -> int:
        end = self._value.feed(text, at)
        self._argue(text[at:end])
        self._after_value()
        return end

    def _collect(self, text: str, at: int) -> int:
        if self._short:
            text = text[: at + _MAX_TEXT - sum(map(len, self._pieces))]
        end = self._value.feed(text, at)
        self._pieces.append(text[at:end])
        if self._after_value():
            self._end_of_value()
            self._pieces.clear()
        elif self._short and sum(map(len, self._pieces)) == _MAX_TEXT:
            self.broken = True
        return end

    def _follow(self, then: Callable[[], None], *, short: bool = False) -> None:
        self._value = JsonValue()
        self._end_of_value = then
        self._short = short
        self._state = self._collect

    def _after_value(self) -> bool:
        self.broken = self._value.broken
        if self._value.done:
            self._state = self._member
        return self._value.done

    def _expect(self, text: str, at: int, char: str, then: Callable[[str, int], int]) -> int:
        at = skip_space(text, at)
        if at == len(text):
            return at
        if text[at] != char:
            self.broken = True
            return at
        self._state = then
        return at + 1

    def _end_of_key(self) -> None:
        self._key = self._decoded()
        self._state = self._colon

    def _end_of_name(self) -> None:
        name = self._decoded()
        if not name or not self._accepts(name):
            self.broken = True
            return
        self._name = name
        if self._arguments is not None:
            self._try_start()

    def _end_of_text(self) -> None:
        """Arguments as a string that holds JSON, or null."""
        arguments = "{}" if self._pieces[0].startswith("n") else self._decoded()
        if not self.broken:
            self._try_start()
            self._argue(arguments)

    def _decoded(self) -> str:
        try:
            return msgspec.json.decode("".join(self._pieces), type=str)
        except (msgspec.DecodeError, UnicodeEncodeError):
            self.broken = True
            return ""

    def _argue(self, text: str) -> None:
        if self.started:
            self._out.argue(text)
        elif self._arguments is not None:
            self._arguments.append(text)

    def _try_start(self) -> None:
        if self._name is not None and not self.started:
            self.started = True
            self._out.start(self._name)
            self._out.argue("".join(self._arguments or ()))

    def _close(self) -> None:
        if self._name is None:
            self.broken = True
            return
        self.done = True
        if not self.started:
            self._try_start()
            self._out.argue("{}")
        self._out.end()
