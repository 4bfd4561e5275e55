"""The thinking of a model between two tags, over pieces of text.

Linear, and it holds a tag's length or line feeds at most. Line feeds at the tags belong to them.
Where it begins is decided by the prompt, whose template may have opened or closed the tag. It knows
no dialect and no tokens.
"""

from collections.abc import Callable
from enum import Enum
from typing import ClassVar

from forebay_gateway.parts import Part, Reasoning, Text
from forebay_gateway.tools.base import Markers, skip_space

_PATIENCE = 64
"""White space, in characters, that may stand before an opening tag."""


class Opened(Enum):
    """What the end of the prompt says of the thinking."""

    YES = 1
    CLOSED = 2
    UNSAID = 3


class ReasoningParser:
    """One sequence's thinking. `thinking` says that what comes now is part of it."""

    begin: ClassVar[str] = "<think>"
    end: ClassVar[str] = "</think>"
    starts_thinking: ClassVar[bool] = False
    """Whether the model thinks from its first token on, when the prompt says nothing."""

    def __init__(self, opened: Opened = Opened.UNSAID) -> None:
        self._ends = Markers(self.end)
        self._text = ""
        self._at = 0
        self._blank: list[str] = []
        """Line feeds that may stand before the end tag."""
        self._spoken = False
        self._parts: list[Part] = []
        self.thinking = opened is Opened.YES or (opened is Opened.UNSAID and self.starts_thinking)
        self._state: Callable[[], bool] = (
            self._answering if opened is Opened.CLOSED else self._undecided
        )

    @property
    def undecided(self) -> bool:
        """Whether thinking is going on or may still begin; before the first text, by the prompt."""
        return self.thinking or self._state == self._undecided

    @property
    def answering(self) -> bool:
        """Whether all text from here on is the answer, and none is held."""
        return self._state == self._answering and self._at == len(self._text)

    @classmethod
    def opened(cls, tail: str) -> Opened:
        """What a prompt with this end says."""
        bare = tail.rstrip()
        if bare.endswith(cls.begin):
            return Opened.YES
        return Opened.CLOSED if bare.endswith(cls.end) else Opened.UNSAID

    def push(self, text: str) -> list[Part]:
        """Reasoning and Text that is certain after this piece."""
        if self.answering:
            return [Text(text)] if text else []
        self._text = self._text[self._at :] + text
        self._at = 0
        while self._at < len(self._text) and self._state():
            pass
        return self._take()

    def finish(self) -> list[Part]:
        """The rest, once no text follows."""
        rest = "".join([*self._blank, self._text[self._at :]])
        self._text, self._at = "", 0
        self._blank.clear()
        if rest:
            self._parts.append(Reasoning(rest) if self.thinking else Text(rest))
        return self._take()

    def _undecided(self) -> bool:
        """At the begin: an opening tag, or the thinking or the answer itself."""
        at = skip_space(self._text, self._at)
        if at - self._at < _PATIENCE:
            if self._text.startswith(self.begin, at):
                self._at = at + len(self.begin)
                self.thinking = True
            elif self.begin.startswith(self._text[at:]):
                return False
        self._state = self._thinking if self.thinking else self._answering
        return True

    def _thinking(self) -> bool:
        found = self._ends.search(self._text, self._at)
        end = found.start() if found else len(self._text) - self._ends.held(self._text, self._at)
        self._think(self._text[self._at : end])
        self._at = found.end() if found else end
        if found is None:
            return False
        self._blank.clear()
        self.thinking = False
        self._state = self._behind
        return True

    def _think(self, text: str) -> None:
        text = text if self._spoken else text.lstrip("\n")
        bare = text.rstrip("\n")
        if bare:
            self._parts.append(Reasoning("".join([*self._blank, bare])))
            self._blank.clear()
            self._spoken = True
        if len(bare) < len(text):
            self._blank.append(text[len(bare) :])

    def _behind(self) -> bool:
        """Behind the thinking: line feeds before the answer."""
        while self._at < len(self._text) and self._text[self._at] == "\n":
            self._at += 1
        if self._at == len(self._text):
            return False
        self._state = self._answering
        return True

    def _answering(self) -> bool:
        self._parts.append(Text(self._text[self._at :]))
        self._at = len(self._text)
        return False

    def _take(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts
