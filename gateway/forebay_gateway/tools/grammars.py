"""Grammars that the gateway writes: calls in the form of a family as Lark, arguments by the tool's
schema, and thinking before them.

They force a call, or allow it in place of an answer that is held to a schema of its own; or allow
no more than thinking before that. Two forms do for all families: tagged (Hermes) and bare JSON
(Llama 3). Markup made of control tokens, as Mistral and DeepSeek have it, cannot stand in a grammar
over text; their models are held to bare JSON, which is read back by the parser of that form. It
knows no engine.
"""

import json
import re
from collections.abc import Sequence
from typing import cast

from forebay_shared.errors import InvalidRequestError
from forebay_shared.sampling import JSON_FORM, MAX_GRAMMAR_BYTES, Grammar
from forebay_shared.template import Json
from msgspec.structs import replace

from forebay_gateway.reasoning.base import ReasoningParser
from forebay_gateway.schemas import bearable, is_sound, plain
from forebay_gateway.tools.base import Tool, ToolParser
from forebay_gateway.tools.hermes import OPEN, HermesParser
from forebay_gateway.tools.llama3_json import Llama3JsonParser
from forebay_gateway.tools.qwen3_coder import Qwen3CoderParser

_SPELLING: dict[str, Json] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""As templates write JSON, and no endless white space."""
_ELSEWHERE = ("$ref", "allOf", "anyOf", "oneOf", "if")
"""Keywords by which a schema names properties that are not its own."""
_DEFINITIONS = ("$defs", "definitions")
_OF_DEFINITIONS = re.compile(r"#/(\$defs|definitions)/([\w.-]+)\Z")
_REFERENCE = re.compile(r'"\$ref": "([^"]*)"')


def held_parser(family: type[ToolParser], control_tokens: Sequence[str]) -> type[ToolParser]:
    """The parser of the form that a grammar holds the calls of a model of this family to."""
    tagged = issubclass(family, HermesParser | Qwen3CoderParser) and OPEN not in control_tokens
    return HermesParser if tagged else Llama3JsonParser


def forced_calls(
    parser: type[ToolParser],
    tools: Sequence[Tool],
    *,
    several: bool,
    reasoning: ReasoningParser | None = None,
) -> Grammar:
    """A grammar that allows calls of these tools only: one, or also several.

    With `reasoning`, in its first state, the model may think before, or must end its thinking.
    Raises InvalidRequestError when the tools are too large for a grammar.
    """
    tagged = parser is HermesParser
    repeated = f" ({_separator(tagged=tagged)} call)*" if several else ""
    names = " | ".join(f"call{i}" for i in range(len(tools)))
    lines = [f"start: {_thinking(reasoning)}call{repeated}", f"call: {names}"]
    for i, tool in enumerate(tools):
        head, tail = _around(tool.name, tagged=tagged)
        lines.append(f"call{i}: {_literal(head)} arguments{i} {_literal(tail)}")
        lines.append(f"arguments{i}: %json {json.dumps(_schema(tool))}")
    return _joined([*lines, *_thought(reasoning)], "tools", "when a call is required")


def thought_and_answer(answer: Grammar, reasoning: ReasoningParser) -> Grammar:
    """A grammar that allows thinking, as `forced_calls` does, before an answer in JSON."""
    lines = [f"start: {_thinking(reasoning)}answer", f"answer: %json {json.dumps(_answer(answer))}"]
    return Grammar("lark", "\n".join([*lines, *_thought(reasoning), ""]), field=answer.field)


def answer_or_calls(
    parser: type[ToolParser],
    tools: Sequence[Tool],
    answer: Grammar,
    *,
    several: bool,
    reasoning: ReasoningParser | None = None,
) -> Grammar:
    """A grammar that allows an answer in JSON, by its own grammar, or calls of these tools; and
    thinking before either, as `forced_calls` does.

    Both are written as JSON of a schema: a call that began with a literal of its own could not be
    told from an answer in the middle of a word, and the lexer never looks back. The model chooses
    to call, so nobody is refused for tools that are many: then only their names are held to.

    Raises InvalidRequestError when both are too large for a grammar even so.
    """
    tagged = parser is HermesParser
    given = "arguments" if tagged else "parameters"
    around = '"<tool_call>\\n" object "\\n</tool_call>"' if tagged else "object"
    repeated = f" ({_separator(tagged=tagged)} call)*" if several else ""
    lines = [
        f"start: {_thinking(reasoning)}(answer | call{repeated})",
        f"answer: %json {json.dumps(_answer(answer))}",
        f"call: {around}",
    ]
    calls = [_call([tool], given, _nested(tool)) for tool in tools]
    if len("".join([*lines, *calls])) > MAX_GRAMMAR_BYTES * 3 // 4:
        calls = [_call(tools, given, {"type": "object"})]
    lines.append("object: " + " | ".join(f"object{i}" for i in range(len(calls))))
    lines += [f"object{i}: %json {call}" for i, call in enumerate(calls)]
    lines += _thought(reasoning)
    return _joined(lines, answer.field, "together with the schema of the answer")


def _answer(answer: Grammar) -> dict[str, Json]:
    said: dict[str, Json] = {"type": "object"}
    if answer.kind == "json_schema":
        said = cast("dict[str, Json]", json.loads(answer.source))
    return {**said, "x-guidance": {**JSON_FORM}}


def _call(tools: Sequence[Tool], given: str, arguments: dict[str, Json]) -> str:
    """The schema of a whole call of one of the tools, as text; with the definitions of its
    arguments at its root, where their references look for them."""
    inner = {name: value for name, value in arguments.items() if name not in _DEFINITIONS}
    schema: dict[str, Json] = {
        "type": "object",
        "properties": {"name": {"enum": [tool.name for tool in tools]}, given: inner},
        "required": ["name", given],
        "additionalProperties": False,
        **{name: arguments[name] for name in _DEFINITIONS if name in arguments},
        "x-guidance": {**JSON_FORM, "lenient": True},
    }
    return json.dumps(schema)


def _nested(tool: Tool) -> dict[str, Json]:
    """The schema of a tool's arguments for inside of another; that of any object, where it refers
    to itself by its root, or is none: hosts of tools write what they like, and nobody is forced to
    call this one."""
    schema = _without_form(replace(tool, strict=False))
    references = _REFERENCE.findall(json.dumps(schema))
    holds = is_sound(schema) and all(_leads(reference, schema) for reference in references)
    return schema if holds else {"type": "object"}


def _leads(reference: str, schema: dict[str, Json]) -> bool:
    """Whether a reference leads to one of the schema's definitions."""
    found = _OF_DEFINITIONS.match(reference)
    definitions = schema.get(found[1]) if found else None
    return found is not None and isinstance(definitions, dict) and found[2] in definitions


def _joined(lines: Sequence[str], field: str, where: str) -> Grammar:
    source = "\n".join([*lines, ""])
    if len(source.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(
            f"tools may have at most {MAX_GRAMMAR_BYTES} bytes {where}.", param="tools"
        )
    return Grammar("lark", source, field=field)


def _separator(*, tagged: bool) -> str:
    return _literal("\n" if tagged else "; ")


def _around(name: str, *, tagged: bool) -> tuple[str, str]:
    if tagged:
        return f'<tool_call>\n{{"name": "{name}", "arguments": ', "}\n</tool_call>"
    return f'{{"name": "{name}", "parameters": ', "}"


def _thinking(reasoning: ReasoningParser | None) -> str:
    """What comes before the calls or the answer, in Lark."""
    if reasoning is None or not reasoning.undecided:
        return ""
    if reasoning.thinking:
        return r"thought /\n*/ "
    return rf"({_literal(reasoning.begin)} thought /\n*/)? "


def _thought(reasoning: ReasoningParser | None) -> list[str]:
    """The rule that it needs."""
    if reasoning is None or not reasoning.undecided:
        return []
    return [f"thought[suffix={_literal(reasoning.end)}]: /(.|\\n)*/"]


def _literal(text: str) -> str:
    return json.dumps(text)


def _schema(tool: Tool) -> dict[str, Json]:
    """The tool's schema; what it does not name is left out, where it names all that it asks for.
    Keywords that no grammar can hold a model to are an error for a strict tool alone: hosts of
    tools write what they like."""
    return {**_without_form(tool), "x-guidance": {**_SPELLING, "lenient": not tool.strict}}


def _without_form(tool: Tool) -> dict[str, Json]:
    parameters = plain(tool.parameters if tool.strict else bearable(tool.parameters))
    schema: dict[str, Json] = {"type": "object", "properties": {}, **parameters}
    if _names_all(schema):
        schema.setdefault("additionalProperties", False)
    return schema


def _names_all(schema: dict[str, Json]) -> bool:
    """Whether every property that the schema requires is among its own."""
    if any(keyword in schema for keyword in _ELSEWHERE):
        return False
    properties, required = schema["properties"], schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return True
    return all(isinstance(name, str) and name in properties for name in required)
