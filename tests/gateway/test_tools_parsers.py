"""Tool calls read back from text: the same for every grouping, nothing lost, linear work."""

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import EntryPoint
from types import FrameType

import pytest
from forebay_gateway.parts import Collected
from forebay_gateway.tools import registry
from forebay_gateway.tools.base import Tool, ToolParser
from forebay_gateway.tools.deepseek_v3 import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    SEPARATOR,
)
from forebay_gateway.tools.hermes import HermesParser
from forebay_gateway.tools.registry import BUILT_IN, check_tool_parser, tool_parser
from forebay_shared.settings import StartError
from hypothesis import given, settings
from hypothesis import strategies as st

TOOLS = (
    Tool(
        "find",
        parameters={
            "type": "object",
            "properties": {"text": {"type": "string"}, "any": {}, "n": {"type": "integer"}},
        },
    ),
    Tool("other"),
)
CUTS = st.lists(st.integers(1, 8), min_size=1, max_size=12)
TRICKY = st.text(st.sampled_from("ab\"\\}{][)(<>/,:'\n\t =|é你😀`;"), max_size=25)
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-99, 99), st.floats(-9, 9, width=16), TRICKY
)
VALUE = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(TRICKY, inner, max_size=3)
    ),
    max_leaves=6,
)
ARGUMENTS = st.fixed_dictionaries({}, optional={"text": TRICKY, "any": VALUE, "n": st.integers()})
CALLS = st.lists(
    st.tuples(st.sampled_from([tool.name for tool in TOOLS]), ARGUMENTS), min_size=1, max_size=3
)
Calls = Sequence[tuple[str, dict[str, object]]]


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _hermes(calls: Calls) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {_dump(arguments)}}}\n</tool_call>'
        for name, arguments in calls
    )


def _llama(calls: Calls) -> str:
    return "; ".join(
        f'{{"name": "{name}", "parameters": {_dump(arguments)}}}' for name, arguments in calls
    )


def _mistral(calls: Calls) -> str:
    return f"[TOOL_CALLS]{_dump([{'name': n, 'arguments': a} for n, a in calls])}"


def _mistral_v11(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_dump(arguments)}" for name, arguments in calls)


def _pythonic(calls: Calls) -> str:
    written = (
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    )
    return f"[{', '.join(written)}]"


def _deepseek(calls: Calls) -> str:
    written = (
        f"{CALL_BEGIN}function{SEPARATOR}{name}\n```json\n{_dump(arguments)}\n```{CALL_END}"
        for name, arguments in calls
    )
    return CALLS_BEGIN + "\n".join(written) + CALLS_END


def _deepseek_v31(calls: Calls) -> str:
    written = (
        f"{CALL_BEGIN}{name}{SEPARATOR}{_dump(arguments)}{CALL_END}" for name, arguments in calls
    )
    return CALLS_BEGIN + "".join(written) + CALLS_END


def _coder(calls: Calls) -> str:
    def value(item: object) -> str:
        return item if isinstance(item, str) else _dump(item)

    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(f"<parameter={k}>\n{value(v)}\n</parameter>\n" for k, v in arguments.items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


FORMS: dict[str, tuple[str, Callable[[Calls], str], bool]] = {
    "hermes": ("hermes", _hermes, True),
    "llama3_json": ("llama3_json", _llama, False),
    "mistral": ("mistral", _mistral, True),
    "mistral v11": ("mistral", _mistral_v11, True),
    "pythonic": ("pythonic", _pythonic, False),
    "deepseek_v3": ("deepseek_v3", _deepseek, True),
    "deepseek v3.1": ("deepseek_v3", _deepseek_v31, True),
    "qwen3_coder": ("qwen3_coder", _coder, True),
}
"""A parser, how its models write, and whether text may stand before the calls."""


def read(
    family: str,
    text: str,
    cuts: Sequence[int],
    probe: Callable[[ToolParser], None] = lambda _: None,
) -> Collected:
    """The parts that the text gives in groups of the given sizes, round and round."""
    parser, collected = BUILT_IN[family](TOOLS), Collected()
    at = turn = 0
    while at < len(text):
        size = cuts[turn % len(cuts)]
        collected.add(parser.push(text[at : at + size]))
        probe(parser)
        at, turn = at + size, turn + 1
    collected.add(parser.finish())
    return collected


def said(collected: Collected) -> tuple[str, list[tuple[str, str]]]:
    return collected.text, [(call.name, call.arguments) for call in collected.calls]


@pytest.mark.parametrize("form", FORMS)
@given(calls=CALLS, cuts=CUTS, before=st.sampled_from(["", "Let me see.", "a < b [x]\n\n"]))
@settings(max_examples=60, deadline=None)
def test_written_calls_are_read_back_for_every_grouping(
    form: str, calls: Calls, cuts: list[int], before: str
) -> None:
    family, write, may_speak = FORMS[form]
    text = (before if may_speak else "") + write(calls)
    if form == "qwen3_coder":  # its values are text: the schema alone says what they mean
        calls = [(n, {k: v for k, v in a.items() if k != "any"}) for n, a in calls]
        calls = [(n, {} if n == "other" else a) for n, a in calls]
        text = (before if may_speak else "") + write(calls)
    collected = read(family, text, cuts)
    assert said(collected) == said(read(family, text, [max(1, len(text))]))
    assert [(c.name, json.loads(c.arguments)) for c in collected.calls] == list(calls)
    assert collected.text == (before.rstrip() if may_speak else "")
    assert len({call.id for call in collected.calls}) == len(calls)


@pytest.mark.parametrize("form", FORMS)
@given(data=st.data(), calls=CALLS, cuts=CUTS)
@settings(max_examples=60, deadline=None)
def test_damaged_markup_never_raises_and_is_the_same_for_every_grouping(
    form: str, data: st.DataObject, calls: Calls, cuts: list[int]
) -> None:
    family, write, _ = FORMS[form]
    text = write(calls)
    for _ in range(data.draw(st.integers(0, 3))):
        at, length = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 9))
        text = text[:at] + data.draw(TRICKY) + text[at + length :]
    text = text[: data.draw(st.integers(0, len(text)))]
    assert said(read(family, text, cuts)) == said(read(family, text, [max(1, len(text))]))


@pytest.mark.parametrize("family", BUILT_IN)
@given(text=TRICKY, cuts=CUTS)
@settings(max_examples=80, deadline=None)
def test_text_without_a_call_is_the_answer(family: str, text: str, cuts: list[int]) -> None:
    collected = read(family, text, cuts)
    assert said(collected) == (text, [])


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", "<tool_call>no object</tool_call>"),
        ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "find", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "' + "n" * 500 + '"}'),
        ("llama3_json", '{"name": "a person", "parameters": {"age": 4}}'),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("mistral", "[TOOL_CALLS] nothing"),
        ("mistral", "[TOOL_CALLS]" + "n" * 500),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[unknown(a=1)]"),
        ("deepseek_v3", f"{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}a b{{}}"),
        ("qwen3_coder", "<tool_call>\n<parameter=a>"),
        ("qwen3_coder", "<function=\nfind>"),
    ],
)
def test_what_is_no_call_comes_out_as_text(family: str, text: str) -> None:
    assert said(read(family, text, [1])) == said(read(family, text, [len(text)])) == (text, [])


def test_a_broken_call_ends_and_the_next_one_is_read() -> None:
    broken = '<tool_call>{"name": "find", "arguments": {"a": [1}}</tool_call>'
    text = broken + _hermes([("other", {})])
    assert said(read("hermes", text, [3]))[1] == [("find", '{"a": [1'), ("other", "{}")]


def test_arguments_as_a_string_of_json_are_decoded_and_a_call_without_has_an_empty_object() -> None:
    text = '<tool_call>{"name": "find", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert said(read("hermes", text, [2]))[1] == [("find", '{"a": 1}')]
    assert said(read("hermes", '<tool_call>{"name": "find"}', [2]))[1] == [("find", "{}")]


def test_a_coder_models_text_becomes_what_the_schema_says() -> None:
    text = _coder([("find", {"text": "1\n2", "n": 3, "any": "[1]"})])
    assert said(read("qwen3_coder", text, [5]))[1] == [
        ("find", '{"text": "1\\n2", "n": 3, "any": [1]}')
    ]


def test_arguments_come_in_real_increments() -> None:
    text = _hermes([("find", {"text": "x" * 2000})])
    parser = BUILT_IN["hermes"](TOOLS)
    pieces = [parser.push(text[at : at + 4]) for at in range(0, len(text), 4)]
    assert sum(bool(parts) for parts in pieces) > 400


ADVERSARIAL = {
    "markers": "<tool_call>",
    "halves": "<tool_call",
    "braces": '<tool_call>{"name":"find","arguments":{"a":',
    "nesting": "[" * 7,
    "quotes": '"\\',
    "blanks": " \n",
    "mistral": "[TOOL_CALLS][",
    "names": "[TOOL_CALLS]nnnn",
    "tags": "<function=find><parameter=text>",
    "begins": CALL_BEGIN,
    "python": "[find(any=[{'",
    "python tag": "<|python_tag|>{",
}


def steps(work: Callable[[], object]) -> int:
    """Executed lines: a measure of work that no busy machine changes."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> object:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("attack", ADVERSARIAL)
@pytest.mark.parametrize("family", BUILT_IN)
def test_work_is_linear_and_nothing_long_is_held(family: str, attack: str) -> None:
    unit = ADVERSARIAL[attack]

    def short(parser: ToolParser) -> None:
        assert len(parser._text) - parser._at < 32

    opening = '<tool_call>{"name":"find","arguments":{"a":["' if attack == "quotes" else ""
    small, large = (opening + unit * (size // len(unit)) for size in (400, 1_600))
    for cuts in ([1], [10**9]):
        least = steps(partial(read, family, small, cuts, short))
        assert steps(partial(read, family, large, cuts, short)) < 6 * least + 1_000


TEMPLATES = {
    "hermes": "{% for t in tools %}<tool_call>{% endfor %}",
    "qwen3_coder": "<tool_call>\n<function=a>\n<parameter=b>",
    "mistral": "[AVAILABLE_TOOLS] [TOOL_CALLS]",
    "deepseek_v3": CALLS_BEGIN,
    "pythonic": "[func_name1(params_name1=params_value1)]",
    "llama3_json": 'in the format {"name": function name, "parameters": dictionary} <|python_tag|>',
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_parser_is_found_in_the_models_template_or_named_by_the_flag(name: str) -> None:
    assert tool_parser("auto", "{{ tools }}" + TEMPLATES[name]) is BUILT_IN[name]
    assert tool_parser("auto", TEMPLATES[name].replace("tools", "")) is BUILT_IN["hermes"]
    assert tool_parser(name, "nothing") is BUILT_IN[name]


class Plugin(HermesParser):
    """Somebody else's family."""

    @classmethod
    def writes(cls, template: str) -> bool:
        return "<plugin>" in template


def test_an_installed_parser_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("plugin", f"{__name__}:Plugin", registry.GROUP)
    monkeypatch.setattr(entry.__class__, "load", lambda self: Plugin)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    registry.tool_parsers.cache_clear()
    try:
        assert tool_parser("plugin", "") is Plugin
        assert tool_parser("auto", "{{ tools }}<plugin><tool_call>") is Plugin
        assert tool_parser("auto", "{{ tools }}<tool_call>") is BUILT_IN["hermes"]
    finally:
        registry.tool_parsers.cache_clear()


def test_an_unknown_parser_stops_the_start_with_a_line_that_names_the_known_ones() -> None:
    check_tool_parser("auto")
    with pytest.raises(StartError, match=r"--tool-call-parser must be one of auto, .*hermes"):
        check_tool_parser("nope")
