"""Token ids to the parts of a chat's answer: text, thinking, tool calls, in this order.

It has the place of `output.Output` where an answer may hold more than text. Stop strings act on the
visible text only. For any grouping of the tokens the joined parts are the same. It knows no
dialect.
"""

from collections.abc import Sequence

from forebay_gateway.output import OutputOptions, StopMatcher, Vocabulary
from forebay_gateway.parts import CallEnd, CallStart, Part, Text, merged
from forebay_gateway.reasoning.base import ReasoningParser
from forebay_gateway.tools.base import ToolParser


class Speech:
    """The parts of one sequence's answer as they come.

    `tokens` counts what the answer consumed, `reasoning_tokens` those of them that were thinking,
    the tags included (None where no thinking is told), `calls` the tool calls so far, `stop` is the
    stop string that ended it. With `one_call` the answer ends behind its first call.
    """

    __slots__ = (
        "_detokeniser",
        "_matcher",
        "_one_call",
        "_options",
        "_reasoning",
        "_tools",
        "calls",
        "reasoning_tokens",
        "stop",
        "stopped",
        "tokens",
    )

    def __init__(
        self,
        vocabulary: Vocabulary,
        options: OutputOptions,
        *,
        reasoning: ReasoningParser | None = None,
        tools: ToolParser | None = None,
        one_call: bool = False,
    ) -> None:
        keep = frozenset(tools.markers) if tools else frozenset[str]()
        if reasoning:
            keep |= {reasoning.begin, reasoning.end}
        self._detokeniser = vocabulary.detokeniser(skip_special=options.skip_special, keep=keep)
        self._options = options
        self._matcher = self._new_matcher()
        self._reasoning = reasoning
        self._tools = tools
        self._one_call = one_call
        self.tokens = 0
        self.reasoning_tokens = 0 if reasoning else None
        self.calls = 0
        self.stopped = False
        self.stop: str | None = None

    def push(self, token_ids: Sequence[int]) -> list[Part]:
        """What may go out now. Sets `stopped` when nothing may follow."""
        if self._is_plain:
            self.tokens += len(token_ids)
            return _text(self._detokeniser.push(token_ids))
        parts: list[Part] = []
        for token_id in token_ids:
            self.tokens += 1
            thinking = self._thinking
            parts += self._listen(self._detokeniser.push((token_id,)))
            if self.reasoning_tokens is not None and (thinking or self._thinking):
                self.reasoning_tokens += 1
            if self.stopped:
                break
        return merged(parts)

    def finish(self) -> list[Part]:
        """The rest, once no token follows. May set `stopped` as well."""
        parts = self._listen(self._detokeniser.flush())
        if self._reasoning and not self.stopped:
            for part in self._reasoning.finish():
                parts += self._answer(part.text) if isinstance(part, Text) else [part]
        if self._tools and not self.stopped:
            parts += self._visible(self._tools.finish())
        return parts if self.stopped else parts + self._let_go()

    @property
    def _is_plain(self) -> bool:
        """Whether nothing but text can follow: then tokens need not be looked at one by one."""
        if self._tools or self._matcher:
            return False
        return self._reasoning is None or self._reasoning.answering

    @property
    def _thinking(self) -> bool:
        return self._reasoning is not None and self._reasoning.thinking

    def _listen(self, text: str) -> list[Part]:
        if not text:
            return []
        if self._reasoning is None:
            return self._answer(text)
        parts: list[Part] = []
        for part in self._reasoning.push(text):
            parts += self._answer(part.text) if isinstance(part, Text) else [part]
        return parts

    def _answer(self, text: str) -> list[Part]:
        """Text behind the thinking."""
        return self._visible(self._tools.push(text) if self._tools else [Text(text)])

    def _visible(self, parts: list[Part]) -> list[Part]:
        """The parts up to where the answer ends: at a stop string, or behind its only call."""
        allowed: list[Part] = []
        for part in parts:
            if isinstance(part, Text):
                allowed += self._match(part.text)
            else:
                if isinstance(part, CallStart):
                    self.calls += 1
                    allowed += self._let_go()
                allowed.append(part)
                self.stopped = self._one_call and isinstance(part, CallEnd)
            if self.stopped:
                break
        return allowed

    def _match(self, text: str) -> list[Part]:
        if self._matcher is None or self.tokens <= self._options.min_tokens:
            return _text(text)
        text, self.stopped = self._matcher.push(text)
        self.stop = self._matcher.matched
        return _text(text)

    def _let_go(self) -> list[Part]:
        """The text that was held back for a stop string which cannot come any more."""
        held = self._matcher.flush() if self._matcher else ""
        self._matcher = self._new_matcher()
        return _text(held)

    def _new_matcher(self) -> StopMatcher | None:
        stops = self._options.stops
        return StopMatcher(stops, include=self._options.include_stop) if stops else None


def _text(text: str) -> list[Part]:
    return [Text(text)] if text else []
