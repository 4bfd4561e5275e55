"""What all tool parsers share: tools, the sink for what they find, and the loop over their states.

A parser is a state machine over text. It never looks back: what it holds between two pieces is a
marker's length at most, or lists that are joined once, so its work is linear in the text. Whatever
is no well-formed call comes out as text. It knows no dialect and no tokens.
"""

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import msgspec
from forebay_shared.template import Json

from forebay_gateway.parts import CallArguments, CallEnd, CallStart, Part, Text

MAX_NAME = 128
"""Longer names, keys and heads of calls are no calls: text is not held back for them."""

_SPACE = re.compile(r"[ \t\r\n]*")


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may call. `parameters` is a JSON schema of an object."""

    name: str
    description: str | None = None
    parameters: dict[str, Json] = {}
    strict: bool = False

    def described(self) -> dict[str, Json]:
        """The function as chat templates read it."""
        described: dict[str, Json] = {"name": self.name}
        if self.description is not None:
            described["description"] = self.description
        described["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return described


class ToolUse(msgspec.Struct, frozen=True):
    """The tools that the model gets, and those of them that it must call: none when it is free."""

    tools: tuple[Tool, ...]
    forced: tuple[Tool, ...] = ()
    one_call: bool = False

    def described(self) -> list[Json]:
        """The tools as chat templates read them."""
        return [{"type": "function", "function": tool.described()} for tool in self.tools]


class Sink:
    """Collects what a parser finds. White space between text and a call belongs to the markup."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._run: list[str] = []
        self._arguing = False
        self._blank: list[str] = []
        self._calls = 0

    def say(self, text: str) -> None:
        bare = text.rstrip()
        if bare:
            self._add("".join([*self._blank, bare]), arguing=False)
            self._blank.clear()
        if len(bare) < len(text):
            self._blank.append(text[len(bare) :])

    def start(self, name: str) -> None:
        self._flush()
        self._blank.clear()
        self._parts.append(CallStart(self._calls, f"call_{secrets.token_hex(12)}", name))
        self._calls += 1

    def argue(self, text: str) -> None:
        if text:
            self._add(text, arguing=True)

    def end(self) -> None:
        self._flush()
        self._parts.append(CallEnd(self._calls - 1))

    def close(self) -> None:
        """No text follows."""
        if not self._calls and self._blank:
            self._add("".join(self._blank), arguing=False)
        self._blank.clear()

    def take(self) -> list[Part]:
        """All that was found since the last time."""
        self._flush()
        parts, self._parts = self._parts, []
        return parts

    def _add(self, text: str, *, arguing: bool) -> None:
        if arguing != self._arguing:
            self._flush()
            self._arguing = arguing
        self._run.append(text)

    def _flush(self) -> None:
        if self._run:
            text = "".join(self._run)
            self._run.clear()
            self._parts.append(
                CallArguments(self._calls - 1, text) if self._arguing else Text(text)
            )


class ToolParser(ABC):
    """One sequence's tool calls. A family says its markers and its states.

    A state is a method that reads from `self._text` at `self._at`; it answers whether there may be
    more to do before the next piece of text.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    """Control tokens of the markup, which must stay in the text that the parser gets."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._out = Sink()
        self._text = ""
        self._at = 0
        self._state: Callable[[], bool] = self._begin

    @classmethod
    @abstractmethod
    def writes(cls, template: str) -> bool:
        """Whether a model with this chat template writes its calls in this form."""

    @abstractmethod
    def _begin(self) -> bool:
        """The first state."""

    @abstractmethod
    def _abandon(self) -> None:
        """The text is over: says or ends what is still held, but for the rest of `self._text`."""

    def push(self, text: str) -> list[Part]:
        """What is certain after this piece."""
        self._text = self._text[self._at :] + text
        self._at = 0
        while self._at < len(self._text) and self._state():
            pass
        return self._out.take()

    def finish(self) -> list[Part]:
        """The rest, once no text follows."""
        self._abandon()
        self._out.say(self._text[self._at :])
        self._text, self._at = "", 0
        self._out.close()
        return self._out.take()

    def _goto(self, state: Callable[[], bool]) -> bool:
        self._state = state
        return True

    def _skip_space(self) -> str:
        """The next character that is no white space; empty when there is none yet."""
        self._at = skip_space(self._text, self._at)
        return self._text[self._at : self._at + 1]

    def _sees(self, marker: str) -> bool | None:
        """Whether the text goes on with `marker`, which is consumed; None: not known yet."""
        if self._text.startswith(marker, self._at):
            self._at += len(marker)
            return True
        rest = len(self._text) - self._at
        if rest < len(marker) and marker.startswith(self._text[self._at :]):
            return None
        return False

    def _say_until(self, markers: "Markers") -> str:
        """Says the text before the first of the markers and consumes the marker; empty when there
        is none yet: then only what may become one is held."""
        found = markers.search(self._text, self._at)
        end = found.start() if found else len(self._text) - markers.held(self._text, self._at)
        self._out.say(self._text[self._at : end])
        self._at = found.end() if found else end
        return found.group() if found else ""


class Markers:
    """Finds the first of some literal texts, and what may become one."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts
        self._pattern = re.compile("|".join(map(re.escape, texts)))

    def search(self, text: str, at: int) -> re.Match[str] | None:
        return self._pattern.search(text, at)

    def held(self, text: str, at: int) -> int:
        """How many characters at the end of `text`, from `at` on, may be the begin of one."""
        longest = 0
        for marker in self._texts:
            for length in range(min(len(marker) - 1, len(text) - at), longest, -1):
                if text.endswith(marker[:length]):
                    longest = length
                    break
        return longest


def skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at
