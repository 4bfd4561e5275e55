"""Where an answer ends: at a stop string in its visible text, or behind its only call.

What an answer is made of comes from `speech.Speech`, or from an engine that speaks text itself. It
knows no tokens and no dialect.
"""

from forebay_gateway.output import OutputOptions, StopMatcher
from forebay_gateway.parts import CallEnd, CallStart, Part, Text
from forebay_gateway.shown import Shown


class Bounded:
    """The parts of one answer up to its end.

    `tokens` counts what the answer consumed, `calls` the tool calls so far, `stop` is the stop
    string that ended it. With `one_call` the answer ends behind its first call.
    """

    __slots__ = (
        "_matcher",
        "_one_call",
        "_options",
        "_shown",
        "calls",
        "reasoning_tokens",
        "stop",
        "stopped",
        "tokens",
    )

    def __init__(self, options: OutputOptions, *, one_call: bool) -> None:
        self._options = options
        self._matcher = self._new_matcher()
        self._one_call = one_call
        self._shown = Shown()
        self.tokens = 0
        self.reasoning_tokens: int | None = None
        self.calls = 0
        self.stopped = False
        self.stop: str | None = None

    @property
    def matches(self) -> bool:
        """There are stop strings to look for."""
        return self._matcher is not None

    def visible(self, parts: list[Part]) -> list[Part]:
        """What of these parts may go out; sets `stopped` when nothing may follow."""
        allowed: list[Part] = []
        for part in parts:
            if isinstance(part, Text):
                allowed += self._match(part.text)
            else:
                if isinstance(part, CallStart):
                    self.calls += 1
                    allowed += self.let_go()
                allowed.append(part)
                self.stopped = self._one_call and isinstance(part, CallEnd)
            if self.stopped:
                break
        return allowed

    def let_go(self) -> list[Part]:
        """The text that was held back for a stop string which cannot come any more."""
        held = self._matcher.flush() if self._matcher else ""
        self._shown.hear("", held)
        self._matcher = self._new_matcher()
        return text_parts(held)

    def _match(self, text: str) -> list[Part]:
        if self._matcher is None or self.tokens <= self._options.min_tokens:
            self._shown.hear(text, text)
            return text_parts(text)
        said, self.stopped = self._matcher.push(text)
        self._shown.hear(text, said)
        self.stop = self._matcher.matched
        return text_parts(said)

    def _new_matcher(self) -> StopMatcher | None:
        stops = self._options.stops
        return StopMatcher(stops, include=self._options.include_stop) if stops else None


def text_parts(text: str) -> list[Part]:
    """The text as a part; none when it is empty."""
    return [Text(text)] if text else []
