"""Tool calls over real HTTP: streamed and whole answers say the same, and every field is obeyed."""

import json
import threading
import time
from collections.abc import Iterator

import pytest
from forebay_shared.models import CAP_GRAMMAR
from forebay_shared.sampling import Grammar
from gateway_fakes import MODEL, TEMPLATE, Api, Play, ScriptedBackend, running_api
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transcripts import Transcript, check_answer, check_error, check_stream

TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n"
    "{% endfor %}<tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls %}<tool_call>{{ call.function.name }} {{ call.id }} "
    "{{ call.function.arguments | tojson }}</tool_call>{% endfor %}"
    "{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
        "strict": True,
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
TOOLS = [WEATHER, TIME]
CITY = '{"city": "}\\"你好 </b>"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>'
BOTH = f'Let me see.\n{CALL}\n<tool_call>\n{{"name": "time", "arguments": {{}}}}\n</tool_call>'


@pytest.fixture(scope="module")
def server() -> Iterator[Api]:
    backend = ScriptedBackend(template=TOOL_TEMPLATE, max_model_len=2048)
    backend.capabilities |= {CAP_GRAMMAR}
    with running_api(backend) as api:
        yield api


@pytest.fixture
def api(server: Api) -> Api:
    server.reset()
    return server


def allowing(*names: str, mode: str = "auto") -> dict:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def says(api: Api, *texts: str, group: int = 1) -> None:
    """The n choices say these texts, in groups of so many tokens."""

    def script(_: object, index: int) -> Play:
        text = texts[index % len(texts)]
        ids = api.backend.tokenizer.encode(text, add_special_tokens=False).ids
        return Play(ids, group=group)

    api.backend.script = script


def streamed(api: Api, n: int = 1, **fields: object) -> Transcript:
    options = {"include_usage": True}
    response = api.chat(stream=True, n=n, stream_options=options, **fields)
    assert response.status_code == 200, response.text
    return check_stream(response.content, model=MODEL, n=n, include_usage=True)


def whole(api: Api, n: int = 1, **fields: object) -> Transcript:
    response = api.chat(n=n, **fields)
    assert response.status_code == 200, response.text
    return check_answer(response.content, model=MODEL, n=n)


def said(transcript: Transcript, index: int = 0) -> tuple[str, list[tuple[str, str]], str]:
    calls = [(call["name"], call["arguments"]) for call in transcript.calls[index]]
    return transcript.texts[index], calls, transcript.reasons[index]


def refused(api: Api, param: str, **fields: object) -> dict:
    response = api.chat(**fields)
    assert response.status_code == 400, response.text
    error = check_error(response.content)
    assert error["param"].startswith(param), error
    return error


def prompt_text(api: Api) -> str:
    return api.backend.tokenizer.decode(api.backend.jobs[-1].prompt, skip_special_tokens=False)


@pytest.mark.parametrize("group", range(1, 9))
def test_streamed_and_whole_answers_hold_the_same_calls_for_every_grouping(
    api: Api, group: int
) -> None:
    says(api, BOTH, CALL, "No tool is needed.", group=group)
    stream, answer = streamed(api, n=3, tools=TOOLS), whole(api, n=3, tools=TOOLS)
    for index in range(3):
        assert said(stream, index) == said(answer, index)
    assert said(answer, 0) == ("Let me see.", [("weather", CITY), ("time", "{}")], "tool_calls")
    assert said(answer, 1) == ("", [("weather", CITY)], "tool_calls")
    assert said(answer, 2) == ("No tool is needed.", [], "stop")
    assert stream.usage == answer.usage
    ids = [call["id"] for calls in answer.calls.values() for call in calls]
    assert len(set(ids)) == len(ids) == 3


def test_allowed_tools_are_the_only_ones(api: Api) -> None:
    says(api, "No tool is needed.")
    whole(api, tools=TOOLS, tool_choice=allowing("time"))
    assert '"time"' in prompt_text(api)
    assert '"weather"' not in prompt_text(api)
    assert api.backend.jobs[-1].sampling.grammar is None
    says(api, '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>')
    whole(api, tools=TOOLS, tool_choice=allowing("time", mode="required"))
    assert "time" in api.backend.jobs[-1].sampling.grammar.source
    assert "weather" not in api.backend.jobs[-1].sampling.grammar.source


def test_arguments_are_streamed_in_real_increments(api: Api) -> None:
    says(api, f'<tool_call>{{"name": "weather", "arguments": {{"city": "{"x" * 300}"}}}}')
    assert len(streamed(api, tools=TOOLS).calls[0][0]["pieces"]) > 50


@given(
    city=st.text(st.sampled_from('ab{}[]"\\<>/ \n你😀'), max_size=20),
    before=st.sampled_from(["", "So: "]),
    group=st.integers(1, 8),
)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_argument_arrives_as_the_model_wrote_it(
    api: Api, city: str, before: str, group: int
) -> None:
    arguments = json.dumps({"city": city}, ensure_ascii=False)
    says(
        api,
        f'{before}<tool_call>{{"name": "weather", "arguments": {arguments}}}</tool_call>',
        group=group,
    )
    expected = (before.strip(), [("weather", arguments)], "tool_calls")
    assert said(streamed(api, tools=TOOLS)) == said(whole(api, tools=TOOLS)) == expected


def test_without_parallel_calls_the_answer_ends_behind_the_first(api: Api) -> None:
    for group in (1, 100):
        says(api, BOTH, group=group)
        answer = whole(api, tools=TOOLS, parallel_tool_calls=False)
        assert said(answer) == ("Let me see.", [("weather", CITY)], "tool_calls")
        assert said(streamed(api, tools=TOOLS, parallel_tool_calls=False)) == said(answer)
    assert api.backend.stopped == 4


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"parallel_tool_calls": False},
        {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
    ],
)
def test_a_cut_call_says_length_and_keeps_what_came(api: Api, fields: dict) -> None:
    says(api, CALL)
    fields = {"tools": TOOLS, "max_tokens": 55, **fields}
    text, calls, reason = said(whole(api, **fields))
    assert reason == "length"
    assert CITY.startswith(calls[0][1])
    assert text == ""
    assert said(streamed(api, **fields)) == (text, calls, reason)


def test_malformed_markup_is_text_and_ends_with_stop(api: Api) -> None:
    text = '<tool_call>{"nome": "weather"}</tool_call>'
    says(api, text)
    assert said(whole(api, tools=TOOLS)) == said(streamed(api, tools=TOOLS)) == (text, [], "stop")


def test_stop_strings_act_on_the_text_and_not_on_arguments(api: Api) -> None:
    says(api, BOTH)
    assert said(whole(api, tools=TOOLS, stop=["city", "}"]))[1] == [
        ("weather", CITY),
        ("time", "{}"),
    ]
    assert said(whole(api, tools=TOOLS, stop="see")) == ("Let me ", [], "stop")


def test_each_token_has_its_log_probability_also_with_calls(api: Api) -> None:
    says(api, BOTH, group=3)
    fields = {"tools": TOOLS, "logprobs": True, "top_logprobs": 1}
    stream, answer = streamed(api, **fields), whole(api, **fields)
    chunks = [entry for chunk in stream.logprobs[0] for entry in chunk["content"]]
    assert chunks == answer.logprobs[0][0]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in chunks).decode() == BOTH


def test_without_tools_or_with_none_markup_is_text_and_the_template_sees_no_tool(api: Api) -> None:
    says(api, CALL)
    for fields in ({}, {"tools": []}, {"tool_choice": "none"}, {"tools": None}):
        assert said(whole(api, **fields)) == (CALL, [], "stop")
    assert said(whole(api, tools=TOOLS, tool_choice="none")) == (CALL, [], "stop")
    assert "weather" not in prompt_text(api)
    whole(api, tools=TOOLS)
    assert '"description": "Says the weather."' in prompt_text(api)


FUNCTIONS = [tool["function"] for tool in TOOLS]


@pytest.mark.parametrize("group", [1, 3, 100])
def test_functions_are_answered_in_their_own_form_and_one_at_a_time(api: Api, group: int) -> None:
    says(api, BOTH, "Nothing to do.", group=group)
    stream, answer = streamed(api, n=2, functions=FUNCTIONS), whole(api, n=2, functions=FUNCTIONS)
    for index in range(2):
        assert said(stream, index) == said(answer, index)
    assert said(answer, 0) == ("Let me see.", [("weather", CITY)], "function_call")
    assert said(answer, 1) == ("Nothing to do.", [], "stop")
    assert '"description": "Says the weather."' in prompt_text(api)


def test_function_call_says_whether_and_what_is_called(api: Api) -> None:
    says(api, CALL)
    for choice in ("none", None):
        fields = {"functions": [] if choice is None else FUNCTIONS, "function_call": choice}
        assert said(whole(api, **fields)) == (CALL, [], "stop")
        assert "weather" not in prompt_text(api)
    named = {"functions": FUNCTIONS, "function_call": {"name": "weather"}}
    assert said(whole(api, **named)) == said(streamed(api, **named))
    assert said(whole(api, **named)) == ("", [("weather", CITY)], "function_call")
    grammar = api.backend.jobs[-1].sampling.grammar
    assert grammar is not None
    assert "time" not in grammar.source


def test_forced_calls_of_several_choices_are_each_their_own(api: Api) -> None:
    other = CALL.replace(CITY, '{"city": "Oslo"}')
    says(api, CALL, other, group=2)
    stream = streamed(api, n=2, tools=TOOLS, tool_choice="required")
    assert said(stream, 0) == ("", [("weather", CITY)], "tool_calls")
    assert said(stream, 1) == ("", [("weather", '{"city": "Oslo"}')], "tool_calls")


def test_a_name_may_have_128_characters(api: Api) -> None:
    name = "x" * 128
    says(api, f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>')
    tools = [{"type": "function", "function": {"name": name}}]
    for choice in ("auto", "required"):
        answer = whole(api, tools=tools, tool_choice=choice)
        assert said(answer) == said(streamed(api, tools=tools, tool_choice=choice))
        assert said(answer) == ("", [(name, "{}")], "tool_calls")


def test_history_with_calls_is_rendered_with_arguments_as_objects(api: Api) -> None:
    call = {"id": "a-b", "type": "function", "function": {"name": "time", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a-b", "content": [{"type": "text", "text": "noon"}]},
        {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": ""}},
        {"role": "function", "name": "f", "content": "1"},
    ]
    whole(api, messages=messages)
    text = prompt_text(api)
    assert '<tool_call>time a-b {"a": 1}</tool_call>' in text
    assert "noon(a-b)" in text
    assert "<tool_call>f call_0 {}</tool_call>" in text
    assert "<|im_start|>tool\n1(call_0)<|im_end|>" in text


def test_of_a_picture_in_a_tools_result_the_model_is_told(api: Api) -> None:
    """An agent sends its conversation again with every turn: refused, it would be over."""
    call = {"id": "a", "type": "function", "function": {"name": "time", "arguments": "{}"}}
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    shown = [{"type": "text", "text": "It is "}, picture]
    asked = {"role": "user", "content": "when?"}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    whole(api, messages=[asked, called, {"role": "tool", "tool_call_id": "a", "content": shown}])
    told = "[Here was one image that cannot be shown: this model reads text alone.]"
    assert f"tool\nIt is {told}(a)<|im_end|>" in prompt_text(api)
    result = {"role": "tool", "tool_call_id": "a", "content": "see following user message"}
    behind = {"role": "user", "content": [picture]}  # as Cline and pi send it
    whole(api, messages=[asked, called, result, behind])
    assert f"user\n{told}<|im_end|>" in prompt_text(api)
    refused(api, "messages[3].content[0].type", messages=[asked, called, asked, behind])
    for role, kind, place in (("user", "image_url", 0), ("tool", "picture", 2)):
        part = {"type": kind, "text": "x"}
        said_ = {"role": role, "tool_call_id": "a", "content": [part]}
        messages = [said_] if role == "user" else [asked, called, said_]
        refused(api, f"messages[{place}].content[0].type", messages=messages)


@pytest.mark.parametrize("depth", [100, 101, 450, 700, 900])
def test_arguments_nested_as_deep_as_anybody_likes_are_part_of_the_history(
    api: Api, depth: int
) -> None:
    arguments = "[" * depth + "]" * depth
    call = {"id": "a", "type": "function", "function": {"name": "time", "arguments": arguments}}
    asked = {"role": "user", "content": "x"}
    whole(api, messages=[asked, {"role": "assistant", "content": None, "tool_calls": [call]}])
    shown = arguments if depth <= 100 else f'"{arguments}"'
    assert f"<tool_call>time a {shown}</tool_call>" in prompt_text(api)


@pytest.mark.parametrize("format_", ["json_object", "json_schema"])
def test_a_model_may_call_before_it_answers_by_a_schema(api: Api, format_: str) -> None:
    """vllm#39929, openai-agents-python#3709, ollama#11037: agents send the schema of their last
    answer with every turn, and never saw a call."""
    schema = {"name": "city", "schema": {"type": "object", "properties": {"city": {}}}}
    asked = {"tools": TOOLS, "response_format": {"type": format_, "json_schema": schema}}
    call = '<tool_call>\n{"name": "time", "arguments": {"zone": "x"}}\n</tool_call>'
    for text, found in (
        (call, ("", [("time", '{"zone": "x"}')], "tool_calls")),
        ('{"city": "Oslo"}', ('{"city": "Oslo"}', [], "stop")),
    ):
        says(api, text)
        for answer in (whole(api, **asked), streamed(api, **asked)):
            assert said(answer) == found
        grammar = api.backend.jobs[-1].sampling.grammar
        assert grammar is not None
        assert (grammar.kind, grammar.field) == ("lark", "response_format")
        assert "answer | call" in grammar.source
    for fields in ({"tool_choice": "none"}, {"tools": []}):
        whole(api, **asked | fields)
        grammar = api.backend.jobs[-1].sampling.grammar
        assert grammar is not None
        assert grammar.kind == format_
    choice = {"structured_outputs": {"choice": ["a"]}}
    whole(api, tools=TOOLS, **choice)
    assert api.backend.jobs[-1].sampling.grammar == Grammar("choice", '["a"]')


def test_an_id_that_is_null_is_named(api: Api) -> None:
    result = {"role": "tool", "tool_call_id": None, "content": "noon"}
    call = {"id": None, "type": "function", "function": {"name": "time", "arguments": "{}"}}
    said_ = {"role": "assistant", "content": None, "tool_calls": [call]}
    refused(api, "messages[1].tool_call_id", messages=[said_, result])


def test_a_result_answers_a_call_before_it(api: Api) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "time", "arguments": "{}"}}
    said_ = {"role": "assistant", "content": None, "tool_calls": [call]}
    asked = {"role": "user", "content": "when?"}
    result = {"role": "tool", "tool_call_id": "a", "content": "noon"}
    for messages, place in (
        ([result], 0),
        ([asked, result, said_], 1),
        ([asked, said_, result, result | {"tool_call_id": "b"}], 3),
    ):
        refused(api, f"messages[{place}].tool_call_id", messages=messages)
    for messages in (
        [asked, said_, result, asked, said_, result],
        [asked, said_, asked, result],
        [asked, said_ | {"tool_calls": [call | {"id": None}]}, result],
        [asked, {"role": "assistant", "function_call": call["function"]}, result],
    ):
        whole(api, messages=messages)


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("tools[0].type", {"tools": [{"type": "custom"}]}),
        ("tools[0].function", {"tools": [{"type": "function"}]}),
        ("tools[0].function.name", {"tools": [{"type": "function", "function": {}}]}),
        (
            "tools[0].function.name",
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        ),
        (
            "tools[0].function.name",
            {"tools": [{"type": "function", "function": {"name": "x" * 129}}]},
        ),
        (
            "tools[0].function.parameters",
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 1}}}]},
        ),
        (
            "tools[0].function.parameters",
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        ),
        ("tools", {"tools": [TIME, TIME]}),
        (
            "tools",
            {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(1025)]},
        ),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tool_choice": "required", "tools": []}),
        ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "time"}}}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": "sometimes"}),
        ("tool_choice.function", {"tools": TOOLS, "tool_choice": {"type": "function"}}),
        (
            "tool_choice.function.name",
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
        ("tool_choice.type", {"tools": TOOLS, "tool_choice": {"type": "custom"}}),
        ("tool_choice.allowed_tools", {"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}),
        ("tool_choice.allowed_tools.tools", {"tools": TOOLS, "tool_choice": allowing()}),
        (
            "tool_choice.allowed_tools.tools[0].function.name",
            {"tools": TOOLS, "tool_choice": allowing("f")},
        ),
        (
            "tool_choice.allowed_tools.mode",
            {"tools": TOOLS, "tool_choice": allowing("time", mode="none")},
        ),
        ("functions", {"functions": [{"name": "f"}], "tools": TOOLS}),
        ("functions", {"functions": [{"name": "f"}], "tool_choice": "auto"}),
        ("functions", {"functions": [{"name": "f"}] * 2}),
        ("functions", {"functions": [{"name": f"f{i}"} for i in range(1025)]}),
        ("functions[0].name", {"functions": [{"name": "a b"}]}),
        ("functions[0].parameters", {"functions": [{"name": "f", "parameters": {"type": 1}}]}),
        ("function_call", {"function_call": {"name": "f"}}),
        ("function_call", {"functions": [{"name": "f"}], "function_call": "required"}),
        ("function_call.name", {"functions": [{"name": "f"}], "function_call": {"name": "g"}}),
        ("parallel_tool_calls", {"tools": TOOLS, "parallel_tool_calls": "no"}),
    ],
)
def test_a_wrong_field_is_a_400_that_names_it(
    api: Api, param: str, fields: dict[str, object]
) -> None:
    refused(api, param, **fields)


def test_a_schema_of_endless_depth_is_refused(api: Api) -> None:
    schema: dict[str, object] = {"type": "object"}
    for _ in range(150):
        schema = {"type": "object", "properties": {"a": schema}}
    deep = {"type": "function", "function": {"name": "f", "parameters": schema}}
    refused(api, "tools[0].function.parameters", tools=[deep])


def test_required_and_named_calls_are_forced_by_a_grammar(api: Api) -> None:
    says(api, CALL)
    assert said(whole(api, tools=TOOLS, tool_choice="required"))[2] == "tool_calls"
    grammar = api.backend.jobs[-1].sampling.grammar
    assert grammar is not None
    assert grammar.kind == "lark"
    assert "weather" in grammar.source
    assert "time" in grammar.source
    named = {"type": "function", "function": {"name": "weather"}}
    assert said(streamed(api, tools=TOOLS, tool_choice=named))[2] == "tool_calls"
    grammar = api.backend.jobs[-1].sampling.grammar
    assert grammar is not None
    assert "time" not in grammar.source
    whole(api, tools=TOOLS, tool_choice="auto")
    assert api.backend.jobs[-1].sampling.grammar is None


def test_without_grammars_in_the_engine_a_forced_call_is_a_400() -> None:
    with running_api(ScriptedBackend(template=TOOL_TEMPLATE)) as api:
        refused(api, "tool_choice", tools=TOOLS, tool_choice="required")
        assert api.chat(tools=TOOLS).status_code == 200


def test_a_template_without_tools_gets_them_in_words() -> None:
    with running_api(ScriptedBackend(template=TEMPLATE, max_model_len=2048)) as api:
        says(api, CALL)
        call = {"id": "1", "type": "function", "function": {"name": "time", "arguments": "{}"}}
        messages = [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "x"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "noon"},
        ]
        answer = whole(api, tools=TOOLS, messages=messages)
        assert said(answer) == ("", [("weather", CITY)], "tool_calls")
        text = prompt_text(api)
        assert text.startswith("<|im_start|>system\nBe kind.\n\nYou may call")
        assert '"name": "weather"' in text
        assert '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>' in text
        assert "<tool_response>\nnoon\n</tool_response>" in text


@pytest.mark.parametrize("field", ["tools", "documents", "tool_choice"])
def test_what_is_long_is_not_read_on_the_event_loop(api: Api, field: str) -> None:
    schema = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(250)}}
    names = [*(f"f{n}" for n in range(400)), "x y"]
    forced = {"tool_choice": "required"} if field == "tool_choice" else {}
    if forced:
        names.pop()  # each tool is right, and all are too large for a grammar
    functions = [{"name": name, "parameters": schema} for name in names]
    tools = [{"type": "function", "function": each} for each in functions]
    [loop] = [each for each in threading.enumerate() if each.name == "gateway"]
    clock = time.pthread_getcpuclockid(loop.ident)
    loop_s, all_s = time.clock_gettime(clock), time.process_time()
    long = {"documents": functions} if field == "documents" else {"tools": tools}
    response = api.chat(**long, **forced)
    loop_s, all_s = time.clock_gettime(clock) - loop_s, time.process_time() - all_s
    assert response.status_code == 400
    assert loop_s < all_s / 3
