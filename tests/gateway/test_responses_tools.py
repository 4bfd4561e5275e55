"""Custom tools, namespaces and hosted tools over real HTTP, as coding agents send them: for the
model all are functions, for the client each is its own."""

import json
from collections.abc import Iterator

import pytest
from forebay_gateway.api.responses.custom import InputReader, as_arguments
from forebay_shared.models import CAP_GRAMMAR
from gateway_fakes import Api
from hypothesis import given
from hypothesis import strategies as st
from redis_house import RedisServer
from responses_house import (
    RESPONSES,
    TALKING_TEMPLATE,
    both,
    plain,
    post,
    prompt,
    responding,
    says,
)
from transcripts import check_error

SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin" /.+/'}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": GRAMMAR}
FIND = {"type": "function", "name": "find", "description": "Finds.", "parameters": SCHEMA}
FILES = {
    "type": "namespace",
    "name": "mcp__files__",
    "description": "Works on files.",
    "tools": [FIND, {"type": "custom", "name": "note"}],
}
PAGES = FILES | {"name": "mcp__pages", "tools": [FIND]}
HOSTED = [
    {"type": "web_search", "external_web_access": False},
    {"type": "image_generation", "output_format": "png"},
    {"type": "tool_search", "execution": "client", "description": "x", "parameters": {}},
]
EDIT = '*** Begin\n+"é\\😀"\t'
HI = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def server(session_redis: RedisServer) -> Iterator[Api]:
    with responding(session_redis.url, template=TALKING_TEMPLATE) as api:
        yield api


@pytest.fixture
def api(server: Api, redis_url: str) -> Api:
    server.reset()
    server.backend.capabilities |= {CAP_GRAMMAR}
    return server


def calling(name: str, arguments: object) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def test_tools_that_come_with_the_conversation_are_given_too(api: Api) -> None:
    more = {"type": "additional_tools", "role": "developer", "tools": [PATCH, FIND]}
    says(api, calling("apply_patch", {"input": EDIT}))
    for items in ([more, HI], [more, HI, more]):
        answer = both(api, tools=[FIND, *HOSTED], input=items)
        (call,) = answer["output"]
        assert (call["type"], call["input"]) == ("custom_tool_call", EDIT)
        assert [tool["name"] for tool in answer["tools"]] == ["find", "apply_patch"]
        assert prompt(api).count("apply_patch") == prompt(api).count('"find"') == 1
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "ok"}
    again = plain(api, input=[result], previous_response_id=answer["id"])
    assert [tool["name"] for tool in again["tools"]] == ["apply_patch", "find"]
    assert plain(api, input=[{"type": "additional_tools", "tools": []}, HI])["tools"] == []


def test_tools_that_a_conversation_repeats_very_often_are_given_once(api: Api) -> None:
    tools = [{**FIND, "name": f"find_{number}"} for number in range(4)]
    swapped = [dict(reversed(tool.items())) for tool in tools]
    more = [{"type": "additional_tools", "tools": each} for each in (tools, swapped) * 100]
    assert plain(api, input=[*more, HI])["tools"] == plain(api, tools=tools)["tools"]


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([{"type": "additional_tools"}, HI], "input[0].tools"),
        ([{"type": "additional_tools", "tools": [{"name": "x"}]}, HI], "input[0].tools[0].type"),
        ([{"type": "additional_tools", "tools": HOSTED}, HI], "input[0].tools[0].type"),
        (
            [HI, {"type": "additional_tools", "tools": [FIND, {**PATCH, "name": "a b"}]}],
            "input[1].tools[1].name",
        ),
        (
            [HI, {"type": "additional_tools", "tools": [{"type": "custom"}]}],
            "input[1].tools[0].name",
        ),
        ([{"type": "additional_tools", "tools": [FIND]}], "input"),
    ],
)
def test_tools_of_the_conversation_are_checked_as_others(
    api: Api, items: list[dict], param: str
) -> None:
    for own in ([], [FIND]) if "tools[0].type" not in param else ([],):
        response = post(api, input=items, tools=own)
        assert response.status_code == 400, response.text
        error = check_error(response.content)
        assert error["param"] == param
        assert param in error["message"]


@pytest.mark.parametrize("group", range(1, 8))
def test_a_custom_tool_gets_its_input_as_plain_text(api: Api, group: int) -> None:
    says(api, calling("apply_patch", {"input": EDIT}), group=group)
    answer = both(api, tools=[PATCH])
    (call,) = answer["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "apply_patch", EDIT)
    assert "namespace" not in call
    assert answer["tools"] == [PATCH]
    shown = prompt(api)
    assert '"required": ["input"]' in shown
    assert "Edits." in shown
    assert "*** Begin" in shown


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mcp__files__find", ("function_call", "mcp__files__", "find", '{"q": "x"}')),
        ("mcp__pages__find", ("function_call", "mcp__pages", "find", '{"q": "x"}')),
        ("mcp__files__note", ("custom_tool_call", "mcp__files__", "note", '{"q": "x"}')),
    ],
)
def test_a_tool_in_a_namespace_is_called_by_its_own_name(api: Api, name: str, said: tuple) -> None:
    says(api, calling(name, {"q": "x"}))
    answer = both(api, tools=[FILES, PAGES])
    (call,) = answer["output"]
    given = call.get("arguments", call.get("input"))
    assert (call["type"], call["namespace"], call["name"], given) == said
    assert prompt(api).count("Works on files.") == 2
    assert [tool["name"] for tool in answer["tools"]] == ["mcp__files__", "mcp__pages"]


def test_earlier_calls_are_shown_to_the_model_as_it_made_them(api: Api) -> None:
    """Also from the store, and with what was said between a call and its result."""
    says(api, calling("mcp__files__note", {"input": "a"}))
    first = plain(api, tools=[FILES])
    (call,) = first["output"]
    output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "noted"}
    says(api, "Done.")
    answers = [
        plain(api, tools=[FILES], input=[output], previous_response_id=first["id"]),
        plain(api, tools=[FILES], input=[HI, call, output]),
        plain(api, tools=[FILES], input=[HI, {"type": "item_reference", "id": call["id"]}, output]),
    ]
    assert len({answer["usage"]["input_tokens"] for answer in answers}) == 1
    made = f"<tool_call>mcp__files__note {call['call_id']} "
    assert made in prompt(api)
    find = {
        "type": "function_call", "call_id": "c1", "name": "find", "namespace": "mcp__files__",
        "arguments": "{}",
    }  # fmt: skip
    found = {"type": "function_call_output", "call_id": "c1", "output": "x"}
    plain(api, tools=[FILES], input=[HI, find, {"role": "assistant", "content": "Wait."}, found])
    assert "assistant\nWait.<tool_call>mcp__files__find c1 {}</tool_call><|im_end|>" in prompt(api)


def test_of_a_picture_in_an_output_the_model_is_told(api: Api) -> None:
    """As Codex sends what its view_image shows: with every later turn again. What is stored is what
    the model was told, and no picture."""
    call = {"type": "function_call", "call_id": "c1", "name": "find", "arguments": "{}"}
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    shown = {"type": "function_call_output", "call_id": "c1", "output": [picture]}
    told = "[Here was one image that cannot be shown: this model reads text alone.]"
    answer = plain(api, tools=[FIND], input=[HI, call, shown])
    assert told in prompt(api)
    plain(api, tools=[FIND], input="and?", previous_response_id=answer["id"])
    assert told in prompt(api)
    text = shown | {"output": "It follows."}
    plain(api, tools=[FIND], input=[HI, call, text, {"role": "user", "content": [picture]}])
    assert f"user\n{told}" in prompt(api)
    listed = api.http.get(f"{RESPONSES}/{answer['id']}/input_items?order=asc").json()["data"]
    assert listed[-1]["output"] == [{"type": "input_text", "text": told}]


def test_hosted_tools_beside_others_are_left_out_and_the_client_is_told(api: Api) -> None:
    bare = post(api, tools=[FIND])
    offered = post(api, tools=[HOSTED[0], FIND, *HOSTED[1:]])
    assert "warning" not in bare.headers
    assert "hosted tools" in offered.headers["warning"]
    assert offered.json()["tools"] == bare.json()["tools"]
    assert offered.json()["usage"] == bare.json()["usage"]
    alone = post(api, tools=HOSTED)
    assert (alone.status_code, check_error(alone.content)["param"]) == (400, "tools[0].type")


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "name": "apply_patch"},
        {"type": "function", "name": "find", "namespace": "mcp__pages"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "custom", "name": "note"}],
        },
    ],
)
def test_a_choice_names_tools_as_the_client_does(api: Api, choice: dict) -> None:
    answer = plain(api, tools=[PATCH, FILES, PAGES], tool_choice=choice)
    assert answer["tool_choice"] == choice
    grammar = api.backend.jobs[-1].sampling.grammar
    named = {"apply_patch": "apply_patch", "find": "mcp__pages__find"}
    assert named.get(choice.get("name", ""), "mcp__files__note") in grammar.source
    assert "call1:" not in grammar.source


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("tools[1].name", {"tools": [FIND, {"type": "custom"}]}),
        ("tools[1].name", {"tools": [HOSTED[0], FIND | {"name": "a b"}]}),
        ("tools[1].name", {"tools": [FIND, PATCH | {"name": "x" * 129}]}),
        ("tools[0].tools[1].name", {"tools": [FILES | {"tools": [FIND, FIND | {"name": "ä"}]}]}),
        ("tools[0].tools[0].name", {"tools": [FILES | {"tools": [{"type": "function"}]}]}),
        ("tools[0].tools[0].type", {"tools": [FILES | {"tools": [HOSTED[0]]}]}),
        ("tools[0].format.type", {"tools": [PATCH | {"format": {"type": "xml"}}]}),
        ("tools[0].format.syntax", {"tools": [PATCH | {"format": GRAMMAR | {"syntax": "ebnf"}}]}),
        (
            "tools[0].format.definition",
            {"tools": [PATCH | {"format": GRAMMAR | {"definition": None}}]},
        ),
        ("tools", {"tools": [PAGES, FIND | {"name": "mcp__pages__find"}]}),
        ("tool_choice.type", {"tools": [FIND], "tool_choice": {"type": "web_search"}}),
        ("tool_choice.name", {"tools": [FIND], "tool_choice": {"type": "custom", "name": "find"}}),
        (
            "tool_choice.name",
            {"tools": [FILES, PAGES], "tool_choice": {"type": "function", "name": "find"}},
        ),
        ("input[0].input", {"input": [{"type": "custom_tool_call", "call_id": "c", "name": "x"}]}),
        (
            "input[0].call_id",
            {"input": [{"type": "custom_tool_call_output", "call_id": "c", "output": "x"}]},
        ),
    ],
)
def test_what_is_wrong_is_named_where_the_client_wrote_it(
    api: Api, param: str, fields: dict
) -> None:
    answer = post(api, **fields)
    assert answer.status_code == 400, answer.text
    assert check_error(answer.content)["param"] == param


@given(text=st.text(st.characters(exclude_categories=["Cs"])), size=st.integers(1, 12))
def test_an_input_is_read_from_pieces_of_any_size(text: str, size: int) -> None:
    for arguments in (
        as_arguments(text),
        json.dumps({"input": text}),
        json.dumps({"a": 1, "input": text}),
    ):
        assert read(arguments, size) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"input": 5}', '{"input": 5}'),
        ("x", "x"),
        ("", ""),
        ('{"input": "\\ud83d\\u0041"}', "\ufffdA"),
        ('{"input": "\\ud83d"}', "\ufffd"),
        ('{"input": "a\nb"}', "a\nb"),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 99])
def test_nothing_of_what_a_model_wrote_is_lost(arguments: str, text: str, size: int) -> None:
    assert read(arguments, size) == text


def read(arguments: str, size: int) -> str:
    reader = InputReader()
    pieces = [arguments[at : at + size] for at in range(0, len(arguments), size)]
    return "".join(map(reader.push, pieces)) + reader.finish()
