"""What the Anthropic dialect refuses, over real HTTP: by the field's name, in its own form."""

import json
from collections.abc import Iterator

import pytest
from forebay_shared.errors import EngineError, NoWorkerError, OverloadedError
from gateway_fakes import ANSWER, MODEL, Api
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from messages import check_message_error, check_message_stream
from messages_house import (
    HI,
    LATER,
    TOOLS,
    WEATHER,
    called,
    messaging,
    post,
    refused,
    says,
)


@pytest.fixture(scope="module")
def server() -> Iterator[Api]:
    with messaging() as api:
        yield api


@pytest.fixture
def api(server: Api) -> Api:
    server.reset()
    return server


BAD = {"name": "x y"}


def block(**fields: object) -> dict:
    return {"messages": [{"role": "user", "content": [fields]}]}


def answer_with(**fields: object) -> dict:
    return {"messages": [*HI, {"role": "assistant", "content": [fields]}, *HI]}


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"model": None}, "model"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**63}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        (block(type="image", source={}), "messages[0].content[0].type"),
        (block(type="document"), "messages[0].content[0].source"),
        (block(type="document", source={"type": "url"}), "messages[0].content[0].source.type"),
        (block(type="document", source={"type": "text"}), "messages[0].content[0].source.data"),
        (
            block(type="document", source={"type": "content", "content": [{"type": "image"}]}),
            "messages[0].content[0].source.content[0].type",
        ),
        (block(type="document", citations={"enabled": True}), "messages[0].content[0].citations"),
        (block(type="search_result", source={}), "messages[0].content[0].source"),
        (block(type="search_result", source="s"), "messages[0].content[0].content"),
        (block(type="tool_reference"), "messages[0].content[0].tool_name"),
        (answer_with(type="document"), "messages[1].content[0].type"),
        (block(type="tool_use", id="t", name="n", input={}), "messages[0].content[0].type"),
        (block(type="text"), "messages[0].content[0].text"),
        (block(text="x"), "messages[0].content[0].type"),
        (block(type="tool_result"), "messages[0].content[0].tool_use_id"),
        (
            block(type="tool_result", tool_use_id="t", content=[{"type": "image"}]),
            "messages[0].content[0].content[0].type",
        ),
        (block(type="tool_result", tool_use_id="t"), "messages[0].content[0].tool_use_id"),
        (
            {"messages": called([]) + block(type="tool_result", tool_use_id="t")["messages"]},
            "messages[3].content[0].tool_use_id",
        ),
        (answer_with(type="tool_use", name="n", input={}), "messages[1].content[0].id"),
        (answer_with(type="tool_use", id="t", input={}), "messages[1].content[0].name"),
        (answer_with(type="tool_use", id="t", name="n"), "messages[1].content[0].input"),
        (answer_with(type="tool_use", id="t", name="n", input=[]), "messages[1].content[0].input"),
        (answer_with(type="thinking"), "messages[1].content[0].thinking"),
        (answer_with(type="server_tool_use"), "messages[1].content[0].type"),
        (
            {"messages": answer_with(type="tool_use", id="t", name="n", input={})["messages"][:2]},
            "messages[1]",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "x y", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "x", "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tools": [LATER, {"name": "x y", "input_schema": {}}]}, "tools[1].name"),
        (
            {"tools": [{"type": "tool_search_tool_regex_20251119", "name": "s"}, LATER | BAD]},
            "tools[1].name",
        ),
        ({"context_management": {"edits": [{}]}}, "context_management.edits[0].type"),
        ({"tools": [WEATHER | {"allowed_callers": ["x"]}]}, "tools[0].allowed_callers"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "required"}}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "z"}}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_format": {"type": "json_object"}}, "output_format.type"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
        ({"output_format": {"type": "json_schema", "schema": True}}, "output_format.schema"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"temperature": 1.5}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"container": "c"}, "container"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"inference_geo": "eu"}, "inference_geo"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(api: Api, fields: dict, name: str) -> None:
    for stream in (False, True):
        refused(post(api, stream=stream, **fields), name)
    assert not api.backend.jobs
    if "max_tokens" not in fields and fields.keys() <= {"messages", "system", "tools", "thinking"}:
        count = {"model": MODEL, "messages": HI, **fields}
        if fields.get("thinking", {}).get("budget_tokens") != 2048:
            refused(api.http.post("/v1/messages/count_tokens", json=count), name)


def test_errors_before_and_in_a_stream_have_the_dialects_form(api: Api) -> None:
    says(api, ANSWER, error=EngineError("The engine failed."), error_after=3)
    refused(post(api), "The engine failed", 500)
    message = check_message_stream(post(api, stream=True).content, model=MODEL)
    assert message["error"] == {"type": "api_error", "message": "The engine failed."}
    for error in (OverloadedError("Too much."), NoWorkerError("No worker.", retry_after_s=2)):
        says(api, ANSWER, error=error)
        response = post(api, stream=True)
        refused(response, error.message, 529)
        assert int(response.headers["retry-after"]) >= 1
    refused(post(api, model="claude-9"), "'claude-9'", 404)
    refused(api.http.get("/v1/messages"), "method", 405)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
NAMES = ["messages", "system", "tools", "tool_choice", "thinking", "output_config", "stream"]
BLOCK_NAMES = ["type", "text", "content", "input", "id", "name", "tool_use_id", "thinking"]
TYPES = st.sampled_from(["text", "tool_use", "tool_result", "thinking", "image"])
BLOCKS = st.builds(dict, st.dictionaries(st.sampled_from(BLOCK_NAMES), JUNK), type=TYPES | JUNK)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system"]) | JUNK,
            "content": st.lists(BLOCKS, max_size=3) | JUNK,
        }
    ),
    max_size=3,
)


@given(body=st.dictionaries(st.sampled_from(NAMES), JUNK) | MESSAGES.map(lambda m: {"messages": m}))
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_body_gets_an_answer_or_a_400(api: Api, body: dict) -> None:
    sent = json.dumps({"model": MODEL, "max_tokens": 5, "messages": HI} | body)
    headers = {"content-type": "application/json"}
    response = api.http.post("/v1/messages", content=sent, headers=headers)
    if response.status_code != 200:
        assert response.status_code == 400, response.text
        check_message_error(response.content)
