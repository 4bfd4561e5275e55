"""How one request's answers are read: which parsers, from which state, and held to which grammar.

It joins what a model's template shows, what the prompt's end says, and what the request asks for.
It knows no dialect and no engine.
"""

from collections.abc import Sequence

import msgspec
from forebay_shared.sampling import Grammar

from forebay_gateway.output import Output, OutputOptions, Vocabulary
from forebay_gateway.prompt import Renderer
from forebay_gateway.reasoning.base import Opened, ReasoningParser
from forebay_gateway.reasoning.registry import (
    AUTO,
    check_reasoning_parser,
    reasoning_parser,
)
from forebay_gateway.speech import Speech
from forebay_gateway.tools.base import ToolParser, ToolUse
from forebay_gateway.tools.grammars import (
    answer_or_calls,
    forced_calls,
    held_parser,
    thought_and_answer,
)
from forebay_gateway.tools.registry import check_tool_parser, tool_parser

_JSON = ("json_schema", "json_object")
_TAIL = 16
"""Tokens at the end of a prompt, enough for a tag and the space behind it."""


class Reading(msgspec.Struct, frozen=True):
    """How the answers of one request are read. `grammar`, when it is given, forces calls, or allows
    them, and thinking, beside an answer in JSON."""

    vocabulary: Vocabulary
    reasoning: type[ReasoningParser] | None = None
    opened: Opened = Opened.UNSAID
    tools: type[ToolParser] | None = None
    use: ToolUse | None = None
    grammar: Grammar | None = None

    def output(self, options: OutputOptions) -> Output | Speech:
        """The text side of one sequence."""
        if self.reasoning is None and self.tools is None:
            return Output(self.vocabulary, options)
        return Speech(
            self.vocabulary,
            options,
            reasoning=self.reasoning(self.opened) if self.reasoning else None,
            tools=self.tools(self.use.tools) if self.tools and self.use else None,
            one_call=self.use is not None and self.use.one_call,
            forced=self.use is not None and bool(self.use.forced),
        )


class Interpreter:
    """The server's choice of parsers. Raises StartError for a name that is none."""

    def __init__(self, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO) -> None:
        check_tool_parser(tool_call_parser)
        check_reasoning_parser(reasoning_parser)
        self._tools = tool_call_parser
        self._reasoning = reasoning_parser

    def reading(
        self,
        renderer: Renderer,
        prompt: Sequence[int],
        use: ToolUse | None,
        *,
        thinks: bool = True,
        answer: Grammar | None = None,
    ) -> Reading:
        """`thinks` is false when the answer cannot hold any thinking; `answer` is what it is held
        to. Where that is JSON, the model may think before, and calls that it may make are allowed
        in its place; another constraint leaves no room for either.

        Raises InvalidRequestError when the tools are too large for a grammar.
        """
        held = answer if answer is not None and answer.kind in _JSON else None
        thinks = thinks and (answer is None or held is not None)
        reasoning = self._reasoning_parser(renderer, held) if thinks else None
        opened = reasoning.opened(renderer.decode(prompt[-_TAIL:])) if reasoning else Opened.UNSAID
        reading = Reading(renderer.vocabulary, reasoning, opened)
        state = reasoning(opened) if reasoning else None
        if use is not None:
            return self._with_tools(reading, renderer, use, held, state)
        if held is None or state is None or not state.undecided:
            return reading
        return msgspec.structs.replace(reading, grammar=thought_and_answer(held, state))

    def _reasoning_parser(
        self, renderer: Renderer, held: Grammar | None
    ) -> type[ReasoningParser] | None:
        """None as well where the answer is held to JSON and the end of thinking is a control token:
        a grammar over text could never let the model end it."""
        parser = reasoning_parser(self._reasoning, renderer.template)
        if parser is None or held is None:
            return parser
        return None if parser.end in renderer.vocabulary.special_texts else parser

    def _with_tools(
        self,
        reading: Reading,
        renderer: Renderer,
        use: ToolUse,
        held: Grammar | None,
        state: ReasoningParser | None,
    ) -> Reading:
        family = tool_parser(self._tools, renderer.template)
        parser = held_parser(family, renderer.vocabulary.special_texts)
        several = not use.one_call
        if use.forced:
            grammar = forced_calls(parser, use.forced, several=several, reasoning=state)
        elif held is not None:
            grammar = answer_or_calls(parser, use.tools, held, several=several, reasoning=state)
        else:
            return msgspec.structs.replace(reading, tools=family, use=use)
        return msgspec.structs.replace(reading, tools=parser, use=use, grammar=grammar)
