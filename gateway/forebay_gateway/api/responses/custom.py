"""The input of custom tools: free text that a model writes as the one argument of a function.

It knows no item and no event.
"""

import re

import msgspec

NAME = "input"
"""The argument's."""

_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_PLAIN = re.compile(r'[^"\\]+')
_HEX = "[0-9a-fA-F]"
_PAIR = rf"u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}"
_ESCAPE = re.compile(rf"\\(?:{_PAIR}|u{_HEX}{{4}}|[^u])")
_HALF = re.compile(rf"\\u[dD][89abAB]{_HEX}{{2}}")
_OTHER_HALF_BEGINS = re.compile(rf"(?:\\(?:u(?:[dD](?:[c-fC-F]{_HEX}{{0,2}})?)?)?)?")


class _Arguments(msgspec.Struct):
    input: str


def as_arguments(text: str) -> str:
    """An input as the arguments of its function."""
    return msgspec.json.encode(_Arguments(text)).decode()


class InputReader:
    """Reads the input from its function's arguments, as they come: text is given out as soon as it
    is complete, half an escape is kept."""

    def __init__(self) -> None:
        self._all: list[str] = []
        self._rest = ""
        self._begun = False
        self._ended = False

    def push(self, piece: str) -> str:
        """What of the input is new."""
        self._all.append(piece)
        if self._ended:
            return ""
        self._rest += piece
        if not self._begun:
            head = _HEAD.match(self._rest)
            if head is None:
                return ""
            self._begun = True
            self._rest = self._rest[head.end() :]
        return self._read()

    def finish(self) -> str:
        """What is left to say. Arguments of another form are the input themselves, so that nothing
        of what a model wrote is lost."""
        if self._begun:
            return ""
        arguments = "".join(self._all)
        try:
            return msgspec.json.decode(arguments, type=_Arguments).input
        except (msgspec.DecodeError, RecursionError):
            return arguments

    def _read(self) -> str:
        read: list[str] = []
        at = 0
        while at < len(self._rest):
            if plain := _PLAIN.match(self._rest, at):
                read.append(plain.group())
                at = plain.end()
            elif self._rest[at] == '"':
                self._ended = True
                break
            elif (escape := _ESCAPE.match(self._rest, at)) and self._is_whole(escape):
                read.append(_decoded(escape.group()))
                at = escape.end()
            else:
                break
        self._rest = self._rest[at:]
        return "".join(read)

    def _is_whole(self, escape: re.Match[str]) -> bool:
        """Not the first half of a pair whose second half may yet come."""
        if not _HALF.fullmatch(escape.group()):
            return True
        return not _OTHER_HALF_BEGINS.fullmatch(self._rest, escape.end())


def _decoded(escape: str) -> str:
    try:
        return msgspec.json.decode(f'"{escape}"', type=str)
    except msgspec.DecodeError:
        return "\ufffd"  # half a pair, or an escape that JSON does not have
