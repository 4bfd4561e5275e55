"""Python literals over pieces of text, as JSON: strings, numbers, constants, lists, dicts, tuples.

Pieces of JSON come out as soon as they are certain. Constant work per character.
"""

import json
import math
import re

import msgspec

from forebay_gateway.tools.base import MAX_NAME, skip_space

_encode = msgspec.json.Encoder().encode

_WORD_END = re.compile(r"[^\w.+\-]")
_IN_STRING = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}
_JSON_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_CLOSES = {"[": "]", "(": ")", "{": "}"}
_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "a": "\a",
    "v": "\v",
    "0": "\0",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "\n": "",
}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


def json_string(text: str) -> str:
    return _encode(text).decode()


class PythonValue:
    """Turns one literal into JSON. `done` or `broken` says that its end is there.

    The character that ends a word (a comma, a bracket) is left to the caller.
    """

    def __init__(self) -> None:
        self._levels: list[str] = []
        self._wants_value = True
        self._is_key = False
        self._comma = False
        self._quote = ""
        self._escape = ""
        self._word: list[str] = []
        self._out: list[str] = []
        self.done = False
        self.broken = False

    def feed(self, text: str, at: int) -> tuple[int, str]:
        """Where the part of `text` that belongs to the value ends, and its JSON."""
        while at < len(text) and not (self.done or self.broken):
            if self._escape:
                at = self._escaped(text, at)
            elif self._quote:
                at = self._string(text, at)
            elif self._word:
                at = self._in_word(text, at)
            else:
                at = self._structure(text, at)
        piece = "".join(self._out)
        self._out.clear()
        return at, piece

    def _structure(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        char = text[at : at + 1]
        if not char:
            return at
        if self._may_close(char):
            self._levels.pop()
            self._comma = self._is_key = False
            self._out.append("}" if char == "}" else "]")
            self._end()
        elif not self._wants_value:
            self._between(char)
        elif char in "\"'":
            self._begin()
            self._quote = char
            self._out.append('"')
        elif char in _CLOSES and not self._is_key:
            self._begin()
            self._levels.append(_CLOSES[char])
            self._out.append("{" if char == "{" else "[")
            self._is_key = char == "{"
        elif not _WORD_END.match(char):
            self._begin()
            return self._in_word(text, at)
        else:
            self.broken = True
        return at + 1

    def _may_close(self, char: str) -> bool:
        """Whether `char` closes what is open: a dict only behind a value, a comma or its begin."""
        if not self._levels or char != self._levels[-1]:
            return False
        return char != "}" or self._wants_value == self._is_key

    def _between(self, char: str) -> None:
        in_dict = self._levels[-1] == "}"
        if char == ":" and in_dict and self._is_key:
            self._out.append(": ")
            self._is_key = False
        elif char == "," and not (in_dict and self._is_key):
            self._comma = True
            self._is_key = in_dict
        else:
            self.broken = True
        self._wants_value = True

    def _begin(self) -> None:
        if self._comma:
            self._out.append(", ")
        self._comma = False

    def _end(self) -> None:
        """A value or a key is complete."""
        self._wants_value = False
        self.done = not self._levels

    def _string(self, text: str, at: int) -> int:
        found = _IN_STRING[self._quote].search(text, at)
        end = found.start() if found else len(text)
        self._out.append(json_string(text[at:end])[1:-1])
        if found is None:
            return end
        if found.group() == "\\":
            self._escape = "\\"
        else:
            self._quote = ""
            self._out.append('"')
            self._end()
        return end + 1

    def _escaped(self, text: str, at: int) -> int:
        escape = self._escape + text[at]
        digits = _HEX_DIGITS.get(escape[1])
        if digits is None:
            char = _ESCAPES.get(escape[1], escape)
            self._out.append(json_string(char)[1:-1])
            self._escape = ""
        elif len(escape) == 2 + digits:
            self._out.append(self._character(escape[2:]))
            self._escape = ""
        else:
            self._escape = escape
        return at + 1

    def _character(self, digits: str) -> str:
        """A character by its number, as JSON; half of a surrogate pair stays an escape."""
        if not re.fullmatch("[0-9a-fA-F]+", digits) or int(digits, 16) > 0x10FFFF:
            self.broken = True
            return ""
        return json.dumps(chr(int(digits, 16)))[1:-1]

    def _in_word(self, text: str, at: int) -> int:
        found = _WORD_END.search(text, at)
        length = (found.start() if found else len(text)) - at
        room = MAX_NAME - sum(map(len, self._word))
        self._word.append(text[at : at + min(length, room)])
        if length > room:
            self.broken = True
        elif found:
            word = _word_json("".join(self._word))
            self.broken = word is None
            self._word.clear()
            self._out.append(json_string(word or "") if self._is_key else word or "")
            self._end()
        return at + min(length, room)


def _word_json(word: str) -> str | None:
    """A constant or a number as JSON; None when it is neither."""
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    if _JSON_NUMBER.fullmatch(word):
        return word
    try:
        return str(int(word, 0))
    except ValueError:
        pass
    try:
        value = float(word)
    except ValueError:
        return None
    return json.dumps(value) if math.isfinite(value) else None
