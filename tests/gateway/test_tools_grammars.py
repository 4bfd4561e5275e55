"""Grammars of calls: what one allows is exactly what its parser reads as calls of the tools."""

import json

import pytest
from forebay_gateway.output import OutputOptions, Vocabulary
from forebay_gateway.parts import Collected
from forebay_gateway.reasoning.base import Opened
from forebay_gateway.reasoning.registry import BUILT_IN as REASONING
from forebay_gateway.speech import Speech
from forebay_gateway.tools.base import Tool, ToolParser
from forebay_gateway.tools.grammars import (
    answer_or_calls,
    forced_calls,
    held_parser,
    thought_and_answer,
)
from forebay_gateway.tools.hermes import HermesParser
from forebay_gateway.tools.llama3_json import Llama3JsonParser
from forebay_gateway.tools.registry import BUILT_IN
from forebay_shared.errors import InvalidRequestError
from forebay_shared.sampling import MAX_GRAMMAR_BYTES, Grammar
from forebay_worker.engine.grammar_check import _Bytes, check, translate
from llguidance import LLMatcher, LLTokenizer
from tokenizer_house import byte_level_tokenizer

TOOLS = (
    Tool(
        "find",
        parameters={
            "type": "object",
            "properties": {"text": {"type": "string"}, "n": {"$ref": "#/$defs/n"}},
            "required": ["n"],
            "$defs": {"n": {"type": "integer"}},
        },
    ),
    Tool("other"),
)
TOKENIZER = LLTokenizer(_Bytes())
FORMS = [HermesParser, Llama3JsonParser]


def written(parser: type[ToolParser], *calls: tuple[str, object]) -> str:
    """Calls as the grammar wants them."""
    if parser is HermesParser:
        return "\n".join(
            f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
            for name, arguments in calls
        )
    return "; ".join(
        f'{{"name": "{name}", "parameters": {json.dumps(arguments)}}}' for name, arguments in calls
    )


def allows(grammar: Grammar, text: str) -> bool:
    """Whether the engine may write this text as its whole answer."""
    matcher = LLMatcher(TOKENIZER, translate(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = text.encode()
    return matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting()


@pytest.mark.parametrize("parser", FORMS)
def test_only_calls_of_the_tools_by_their_schemas_are_allowed(parser: type[ToolParser]) -> None:
    one = forced_calls(parser, TOOLS, several=False)
    good = ("find", {"text": 'a"}</tool_call>', "n": 3})
    assert allows(one, written(parser, good))
    assert allows(one, written(parser, ("other", {})))
    for bad in (
        ("find", {"text": "a"}),
        ("find", {"n": "3"}),
        ("find", {"n": 3, "more": 1}),
        ("other", {"n": 3}),
        ("nobody", {}),
    ):
        assert not allows(one, written(parser, bad)), bad
    assert not allows(one, "")
    assert not allows(one, "Sure! " + written(parser, good))
    two = written(parser, good, ("other", {}))
    assert not allows(one, two)
    assert allows(forced_calls(parser, TOOLS, several=True), two)
    answer = Collected()
    reader = parser(TOOLS)
    answer.add(reader.push(two) + reader.finish())
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == [
        good,
        ("other", {}),
    ]
    assert answer.text == ""


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ANSWERS = (Grammar("json_schema", json.dumps(CITY), field="text.format"), Grammar("json_object"))


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.kind)
@pytest.mark.parametrize("parser", FORMS)
def test_an_answer_that_is_held_to_a_schema_leaves_the_model_free_to_call(
    parser: type[ToolParser], answer: Grammar
) -> None:
    one, more = (
        answer_or_calls(parser, TOOLS, answer, several=several) for several in (False, True)
    )
    assert one.field == answer.field
    call, calls = ("find", {"text": "a", "n": 2}), [("find", {"n": 1}), ("other", {})]
    for text in ('{"city": "Oslo"}', '{\n  "city": "</tool_call>"\n}', written(parser, call)):
        assert allows(one, text), text
        assert allows(more, text), text
    assert allows(more, written(parser, *calls))
    for text in ("Sure!", "", written(parser, *calls), '{"city": 1}\n' + written(parser, call)):
        assert not allows(one, text), text
    if answer.kind == "json_schema":  # else any object is an answer, whatever it looks like
        assert not allows(more, '{"city": 1}')
        for bad in (("nobody", {}), ("find", 1), ("find", {"n": "1"}), ("other", {"n": 1})):
            assert not allows(more, written(parser, bad)), bad
    found = Collected()
    reader = parser(TOOLS)
    found.add(reader.push(written(parser, *calls)) + reader.finish())
    assert [(each.name, json.loads(each.arguments)) for each in found.calls] == calls
    found = Collected()
    reader = parser(TOOLS)
    found.add(reader.push('{"city": "Oslo"}') + reader.finish())
    assert (found.text, found.calls) == ('{"city": "Oslo"}', [])


@pytest.mark.parametrize("parser", FORMS)
def test_what_no_grammar_can_hold_to_hinders_no_call_that_is_the_models_choice(
    parser: type[ToolParser],
) -> None:
    tree = {"properties": {"n": {"$ref": "#"}}}
    odd = {"properties": {"a": {"not": {}}, "b": {"pattern": "(?=x)"}}, "required": None}
    large = {"properties": {f"p{i}": {"type": "null"} for i in range(9000)}}
    for parameters in (tree, odd, large):
        tools = [Tool("f", parameters=parameters, strict=True), *TOOLS]
        grammar = answer_or_calls(parser, tools, ANSWERS[0], several=True)
        assert not check(grammar, TOKENIZER).error
        assert allows(grammar, written(parser, ("f", {})))
        assert allows(grammar, '{"city": "Oslo"}')


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "any"},
        {"type": ["string", {}]},
        {"type": "array", "items": "string"},
        {"properties": {"b": "string"}},
        {"type": "object", "required": "b"},
        {"enum": "one, two"},
        {"anyOf": {"type": "string"}},
        {"type": "integer", "minimum": "5"},
        {"type": "string", "minLength": -1},
        {"type": "number", "multipleOf": 0},
        {"type": "string", "pattern": "(["},
        {"type": "string", "pattern": "a{,3}"},
        {"type": "string", "pattern": "(a)\\1"},
        {"patternProperties": {"[": {}}},
        {"$ref": "#/$defs/nowhere"},
        {"$ref": 1},
    ],
)
@pytest.mark.parametrize("parser", FORMS)
def test_what_is_no_schema_hinders_neither_an_answer_nor_the_calls_that_may_stand_for_it(
    parser: type[ToolParser], schema: dict
) -> None:
    tools = [Tool("f", parameters={"properties": {"a": schema}}), *TOOLS]
    grammar = answer_or_calls(parser, tools, ANSWERS[0], several=True)
    assert check(grammar, TOKENIZER).error == ""
    assert allows(grammar, '{"city": "Oslo"}')
    assert allows(grammar, written(parser, ("f", {"a": 1})))
    assert not allows(grammar, written(parser, ("find", {"n": "1"})))


def test_a_pattern_holds_calls_that_may_stand_for_an_answer_too() -> None:
    for pattern, good, bad in (
        (r"^[A-Z]{2}-\d+$", "AB-12", "AB-x"),
        (r"^[\p{L} ]+(?:\.|\+)?$", "E a.", "1"),
        (r"^[^\s@]+@[^\s@]+$", "a@b", "a b"),
    ):
        tool = Tool("f", parameters={"properties": {"a": {"type": "string", "pattern": pattern}}})
        grammar = answer_or_calls(HermesParser, [tool], ANSWERS[0], several=False)
        assert allows(grammar, written(HermesParser, ("f", {"a": good})))
        assert not allows(grammar, written(HermesParser, ("f", {"a": bad})))


def test_what_is_wrong_with_the_schema_of_an_answer_is_not_laid_upon_the_tools() -> None:
    bad = Grammar("json_schema", '{"type": "object", "not": {}}', field="response_format")
    found = check(answer_or_calls(HermesParser, TOOLS, bad, several=True), TOKENIZER).error
    assert found == "The JSON schema cannot be used: the keyword not is not supported."


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True},
        {"type": "object", "propertyNames": {"pattern": "^a"}},
        {"not": {"type": "null"}},
        {"type": "string", "format": "iri"},
        {"type": "string", "pattern": "^(?!x)\\b.*$"},
        {"items": {"oneOf": [{"type": "string"}, {"type": "string", "pattern": "a(?=b)"}]}},
    ],
)
@pytest.mark.parametrize("parser", FORMS)
def test_what_no_grammar_can_hold_to_is_an_error_of_strict_tools_alone(
    parser: type[ToolParser], schema: dict
) -> None:
    """Hosts of tools write such schemas, and a client that demands a call sends all of them."""
    parameters = {"properties": {"a": schema, "n": {"type": "integer"}}, "required": ["n"]}
    loose, strict = (
        forced_calls(parser, [Tool("f", parameters=parameters, strict=strict)], several=False)
        for strict in (False, True)
    )
    assert not check(loose, TOKENIZER).error
    assert allows(loose, written(parser, ("f", {"n": 1})))
    assert not allows(loose, written(parser, ("f", {"n": "1"})))
    assert "cannot be used" in check(strict, TOKENIZER).error


def test_what_asks_for_nothing_is_no_error_of_a_strict_tool() -> None:
    record = {"type": "object", "propertyNames": {"type": "string"}, "minProperties": 1.0}
    parameters = {"properties": {"a": record, "b": {"format": "binary"}}, "required": ["a"]}
    tool = Tool("f", parameters=parameters, strict=True)
    grammar = forced_calls(HermesParser, [tool], several=False)
    assert check(grammar, TOKENIZER).error == ""
    assert allows(grammar, written(HermesParser, ("f", {"a": {"x": 1}})))
    assert not allows(grammar, written(HermesParser, ("f", {"a": {}})))


A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]}


@pytest.mark.parametrize(
    ("parameters", "good", "bad"),
    [
        ({"$ref": "#/$defs/a", "$defs": {"a": A}}, {"a": 1}, {"a": "1"}),
        ({"anyOf": [A, B]}, {"b": None}, {"b": 1}),
        ({"type": "object", "allOf": [A, B]}, {"a": 1, "b": None}, {"a": 1}),
        ({"type": "object", "properties": {}, "required": ["z"]}, {"z": 1}, {}),
        ({"type": None, "properties": None, "required": None}, {}, {"z": 1}),
        ({"type": "object", "properties": []}, {}, {"z": 1}),
        (
            {"properties": {"a": {"type": "integer", "required": True, "enum": None}}},
            {"a": 1},
            {"a": "1"},
        ),
        ({"properties": {"required": {"const": None}}}, {"required": None}, {"required": 1}),
        ({"properties": {"a": {"type": "string", "minLength": 1.0}}}, {"a": "b"}, {"a": ""}),
        ({"properties": {"a": {"enum": [{"b": None}]}}}, {"a": {"b": None}}, {"a": {}}),
    ],
)
def test_whatever_a_schema_asks_for_can_be_written(
    parameters: dict, good: object, bad: object
) -> None:
    grammar = forced_calls(HermesParser, [Tool("f", parameters=parameters)], several=False)
    assert check(grammar, TOKENIZER).error == ""
    assert allows(grammar, written(HermesParser, ("f", good)))
    assert not allows(grammar, written(HermesParser, ("f", bad)))


def test_a_schema_that_is_none_is_told_without_lines_of_a_grammar_that_nobody_sent() -> None:
    tool = Tool("f", parameters={"properties": {"a": "string"}})
    grammar = forced_calls(HermesParser, [tool], several=False)
    said = check(grammar, TOKENIZER).error
    assert said == "The schema of a function cannot be used: it is malformed."


def test_a_thinking_model_may_or_must_end_its_thinking_first() -> None:
    call = written(HermesParser, ("other", {}))
    for name, opened, good, bad in (
        ("qwen3", Opened.UNSAID, ["", "<think>hm\n</think>\n\n"], ["hm</think>"]),
        ("qwen3", Opened.YES, ["hm < </think>\n"], [""]),
        ("qwen3", Opened.CLOSED, [""], ["<think>hm</think>", "hm</think>"]),
        ("deepseek_r1", Opened.UNSAID, ["hm</think>", "<think>hm</think>\n"], [""]),
    ):
        reasoning = REASONING[name](opened)
        grammar = forced_calls(HermesParser, TOOLS, several=False, reasoning=reasoning)
        for before in good:
            assert allows(grammar, before + call), (name, opened, before)
        for before in bad:
            assert not allows(grammar, before + call), (name, opened, before)


@pytest.mark.parametrize("calls", [False, True])
def test_a_thinking_model_thinks_before_an_answer_by_a_schema_too(calls: bool) -> None:
    """mlx-serve#331, vllm#47027: held to JSON from its first token it could not think at all."""
    text = '{"city": "Oslo"}'
    for name, opened, good, bad in (
        ("qwen3", Opened.UNSAID, ["", "<think>{hm}\n</think>\n\n"], ["hm</think>", "hm"]),
        ("qwen3", Opened.YES, ["hm < </think>\n"], ["", "hm"]),
        ("deepseek_r1", Opened.UNSAID, ["hm</think>", "<think>hm</think>\n"], [""]),
    ):
        state = REASONING[name](opened)
        grammar = thought_and_answer(ANSWERS[0], state)
        if calls:
            grammar = answer_or_calls(
                HermesParser, TOOLS, ANSWERS[0], several=False, reasoning=state
            )
        assert grammar.field == ANSWERS[0].field
        for before in good:
            assert allows(grammar, before + text), (name, opened, before)
            assert not allows(grammar, before + '{"city": 1}')
            assert allows(grammar, before + written(HermesParser, ("other", {}))) == calls
        for before in bad:
            assert not allows(grammar, before + text), (name, opened, before)


def test_families_whose_markup_is_control_tokens_are_forced_to_bare_json() -> None:
    forms = {name: held_parser(cls, ()) for name, cls in BUILT_IN.items()}
    assert forms == {
        "hermes": HermesParser,
        "qwen3_coder": HermesParser,
        "mistral": Llama3JsonParser,
        "deepseek_v3": Llama3JsonParser,
        "pythonic": Llama3JsonParser,
        "llama3_json": Llama3JsonParser,
    }
    assert held_parser(HermesParser, ("<tool_call>",)) is Llama3JsonParser


def test_tools_too_large_for_a_grammar_are_refused_by_name() -> None:
    large = Tool("f", parameters={"description": "x" * MAX_GRAMMAR_BYTES})
    with pytest.raises(InvalidRequestError) as refused:
        forced_calls(HermesParser, [large], several=False)
    assert refused.value.param == "tools"


@pytest.mark.parametrize("parser", FORMS)
def test_a_forced_call_that_is_cut_off_leaves_no_markup_in_the_text(
    parser: type[ToolParser],
) -> None:
    tokenizer = byte_level_tokenizer()
    vocabulary = Vocabulary(tokenizer, tokenizer.get_vocab_size())
    ids = tokenizer.encode(written(parser, ("find", {"n": 3}))).ids
    for end in range(len(ids)):
        speech = Speech(vocabulary, OutputOptions(), tools=parser(TOOLS), forced=True)
        answer = Collected()
        answer.add(speech.push(ids[:end]) + speech.finish())
        assert answer.text == ""
        assert '{"n": 3}'.startswith("".join(call.arguments for call in answer.calls))


def test_a_whole_call_whose_tag_is_cut_off_is_a_call_alone() -> None:
    text = written(HermesParser, ("find", {"n": 3}))
    for end in range(text.rindex("}}") + 2, len(text)):
        reader, answer = HermesParser(TOOLS), Collected()
        answer.add(reader.push(text[:end]) + reader.finish())
        assert answer.text == ""
        assert [call.arguments for call in answer.calls] == ['{"n": 3}']
