"""Token ids to the parts of a chat's answer: text, thinking, tool calls, in this order.

It has the place of `output.Output` where an answer may hold more than text. For any grouping of the
tokens the joined parts are the same. It knows no dialect.
"""

from collections.abc import Sequence

from forebay_gateway.bounded import Bounded, text_parts
from forebay_gateway.output import OutputOptions, Vocabulary
from forebay_gateway.parts import Part, Text, merged
from forebay_gateway.reasoning.base import ReasoningParser
from forebay_gateway.tools.base import ToolParser


class Speech(Bounded):
    """The parts of one sequence's answer as they come.

    `reasoning_tokens` are those of the tokens that were thinking, the tags included; None where no
    thinking is told. With `forced` it holds nothing but calls: text that is left at its end is one
    that was cut off.
    """

    __slots__ = ("_detokeniser", "_forced", "_reasoning", "_tools")

    def __init__(
        self,
        vocabulary: Vocabulary,
        options: OutputOptions,
        *,
        reasoning: ReasoningParser | None = None,
        tools: ToolParser | None = None,
        one_call: bool = False,
        forced: bool = False,
    ) -> None:
        keep = frozenset(tools.markers) if tools else frozenset[str]()
        if reasoning:
            keep |= {reasoning.begin, reasoning.end}
        super().__init__(options, one_call=one_call)
        self._detokeniser = vocabulary.detokeniser(skip_special=options.skip_special, keep=keep)
        self._reasoning = reasoning
        self._tools = tools
        self._forced = forced
        self.reasoning_tokens = 0 if reasoning else None

    def push(self, token_ids: Sequence[int]) -> list[Part]:
        """What may go out now. Sets `stopped` when nothing may follow."""
        if self._is_plain:
            self.tokens += len(token_ids)
            return text_parts(self._detokeniser.push(token_ids))
        parts: list[Part] = []
        for token_id in token_ids:
            self.tokens += 1
            thinking = self._thinking
            text = self._detokeniser.push((token_id,))
            new = self._listen(text)
            parts += new
            self._shown.add(text)
            self._settle(bool(new))
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
            rest = self._tools.finish()
            parts += self.visible([p for p in rest if not (self._forced and isinstance(p, Text))])
        if not self.stopped:
            parts += self.let_go()
        self._settle(spoke=True)
        return parts

    @property
    def shown(self) -> int:
        """How many of the tokens may be listed: none of held text, none of a stop string."""
        return self._shown.count if self.matches else self.tokens

    @property
    def hidden(self) -> str:
        """What of the last shown token's text is a stop string's."""
        return self._shown.hidden

    def _settle(self, spoke: bool) -> None:
        """Lets tokens be listed once what they gave is out: text, or what is no text."""
        if self.stop is not None:
            self._shown.settle_last()
        elif not self._shown.complete:
            self._shown.settle()
        elif spoke:
            self._shown.settle_all()

    @property
    def _is_plain(self) -> bool:
        """Whether nothing but text can follow: then tokens need not be looked at one by one."""
        if self._tools or self.matches:
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
        return self.visible(self._tools.push(text) if self._tools else [Text(text)])
