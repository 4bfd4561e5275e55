"""The Anthropic dialect over real HTTP: every block in and out, streamed as whole, every field."""

import json
from collections.abc import Iterator
from functools import partial

import anthropic
import httpx
import pytest
from forebay_gateway.api import answers
from forebay_gateway.api.sse import EventStream
from forebay_shared.errors import EngineError, NoWorkerError, OverloadedError
from forebay_shared.models import CAP_GRAMMAR
from gateway_fakes import ANSWER, MODEL, TEMPLATE, Api, Play, ScriptedBackend, running_api
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from messages import check_message, check_message_error, check_message_stream

TEMPLATE_WITH_ALL = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls %}<tool_call>{{ call.function.name }} "
    "{{ call.id }} {{ call.function.arguments | tojson }}</tool_call>{% endfor %}"
    "{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}"
    "{% if not (loop.last and continue_final_message) %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}"
    "{% if reasoning_effort %}[{{ reasoning_effort }}]{% endif %}{% endif %}"
)
WEATHER = {
    "name": "weather",
    "description": "Says the weather.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
    "cache_control": {"type": "ephemeral"},
}
TIME = {"name": "time", "input_schema": {"type": "object"}, "type": "custom"}
TOOLS = [WEATHER, TIME]
CITY = '{"city": "}\\"你好 </b>"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Api]:
    backend = ScriptedBackend(template=TEMPLATE_WITH_ALL, max_model_len=4096)
    backend.capabilities |= {CAP_GRAMMAR}
    with running_api(backend) as api:
        yield api


@pytest.fixture
def api(server: Api) -> Api:
    server.reset()
    return server


def says(api: Api, text: str, group: int = 1, **play: object) -> None:
    ids = api.backend.tokenizer.encode(text, add_special_tokens=False).ids
    api.backend.script = lambda job, index: Play(ids, group=group, **play)


def post(api: Api, **fields: object) -> httpx.Response:
    body = {"model": MODEL, "max_tokens": 2048, "messages": HI, **fields}
    return api.http.post("/v1/messages", json=body)


def both(api: Api, **fields: object) -> dict:
    """The message, whole and streamed: they must hold the same but for their ids."""
    response = post(api, stream=True, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    streamed = check_message_stream(response.content, model=MODEL)
    response = post(api, **fields)
    assert response.status_code == 200, response.text
    whole = check_message(response.content, model=MODEL)
    assert without_ids(streamed) == without_ids(whole)
    return whole


def without_ids(message: dict) -> dict:
    content = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    return message | {"id": "", "content": content}


def prompt_text(api: Api) -> str:
    return api.backend.tokenizer.decode(api.backend.jobs[-1].prompt, skip_special_tokens=False)


def refused(response: httpx.Response, name: str, status: int = 400) -> None:
    assert response.status_code == status, response.text
    error = check_message_error(response.content)
    assert name in error["message"], error
    assert response.headers["request-id"]


@pytest.mark.parametrize("group", [1, 3, 100])
def test_text_is_one_block_and_ends_the_turn(api: Api, group: int) -> None:
    says(api, ANSWER, group)
    message = both(api)
    assert message["content"] == [{"type": "text", "text": ANSWER}]
    assert message["stop_reason"] == "end_turn"


def test_cached_tokens_are_counted_apart_from_the_input(api: Api) -> None:
    usage = both(api)["usage"]
    prompt = len(api.backend.jobs[-1].prompt)
    assert usage["cache_read_input_tokens"] == 2
    assert usage["input_tokens"] == prompt - 2
    assert usage["cache_creation_input_tokens"] == 0
    assert usage["output_tokens"] == len(api.backend.answer) + 1


def test_an_empty_answer_has_no_block_and_can_be_sent_back(api: Api) -> None:
    says(api, "")
    message = both(api)
    assert (message["content"], message["stop_reason"]) == ([], "end_turn")
    says(api, "x")
    both(api, messages=[*HI, {"role": "assistant", "content": message["content"]}, *HI])


def test_the_limit_ends_an_answer_with_max_tokens(api: Api) -> None:
    message = both(api, max_tokens=3)
    assert message["stop_reason"] == "max_tokens"
    assert message["usage"]["output_tokens"] == 3


@pytest.mark.parametrize("group", [1, 4, 100])
def test_a_stop_sequence_is_named_and_not_shown(api: Api, group: int) -> None:
    says(api, ANSWER, group)
    message = both(api, stop_sequences=["lazy", "fox says", "zzz"])
    assert message["stop_sequence"] == "fox says"
    assert message["content"] == [{"type": "text", "text": "The quick brown "}]


@pytest.mark.parametrize("group", range(1, 9))
def test_thinking_text_and_calls_are_blocks_in_their_order(api: Api, group: int) -> None:
    says(api, f"<think>\nIs 你好 it?\n</think>\n\nLet me see.\n{CALL}\n{NOW}", group)
    message = both(api, tools=TOOLS)
    thinking, text, first, second = message["content"]
    assert thinking["thinking"] == "Is 你好 it?"
    assert text == {"type": "text", "text": "Let me see."}
    assert (first["name"], first["input"]) == ("weather", json.loads(CITY))
    assert (second["name"], second["input"]) == ("time", {})
    assert message["stop_reason"] == "tool_use"
    details = message["usage"]["output_tokens_details"]
    assert 0 < details["thinking_tokens"] < message["usage"]["output_tokens"]


def test_a_client_may_ask_not_to_see_the_thinking(api: Api) -> None:
    says(api, "<think>secret</think>Yes.")
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    message = both(api, thinking=thinking)
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    assert message["content"][0]["thinking"] == ""


@pytest.mark.parametrize(
    ("type_", "name", "given"),
    [
        ("bash_20250124", "bash", {"command": "ls"}),
        ("text_editor_20250728", "str_replace_based_edit_tool", {"command": "view", "path": "/x"}),
        ("memory_20250818", "memory", {"command": "delete", "path": "/memories/x"}),
    ],
)
def test_a_tool_that_the_client_runs_may_be_named_by_its_type_alone(
    api: Api, type_: str, name: str, given: dict
) -> None:
    says(api, f"<tool_call>{json.dumps({'name': name, 'arguments': given})}</tool_call>")
    tools = [{"type": type_, "name": name, "max_characters": 100}, WEATHER]
    message = both(api, tools=tools, tool_choice={"type": "tool", "name": name})
    assert (message["content"][0]["name"], message["content"][0]["input"]) == (name, given)
    assert '"command"' in prompt_text(api)
    for other in ("bash", "bash_code_execution_20250825", "code_execution_20250825", "bash_x"):
        refused(post(api, tools=[{"type": other, "name": name}]), "tools[0].type")


@pytest.mark.parametrize("choice", [{"type": "auto"}, {"type": "tool", "name": "weather"}])
@pytest.mark.parametrize("alone", [False, True])
def test_a_call_that_was_cut_has_no_input_and_says_max_tokens(
    api: Api, choice: dict, alone: bool
) -> None:
    says(api, CALL)
    choice = choice | {"disable_parallel_tool_use": alone}
    message = both(api, tools=TOOLS, max_tokens=55, tool_choice=choice)
    assert message["stop_reason"] == "max_tokens"
    assert message["content"][0]["input"] == {}


def test_arguments_come_in_increments(api: Api) -> None:
    says(api, f'<tool_call>{{"name": "weather", "arguments": {{"city": "{"x" * 300}"}}}}')
    raw = post(api, stream=True, tools=TOOLS).content
    assert raw.count(b"input_json_delta") > 50


def test_one_call_at_most_when_parallel_use_is_off(api: Api) -> None:
    says(api, f"{CALL}\n{NOW}")
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = both(api, tools=TOOLS, tool_choice=choice)
    assert [block["name"] for block in message["content"]] == ["weather"]


@pytest.mark.parametrize(
    ("choice", "forced"),
    [({"type": "any"}, True), ({"type": "tool", "name": "time"}, True), ({"type": "auto"}, False)],
)
def test_a_forced_call_is_held_to_a_grammar(api: Api, choice: dict, forced: bool) -> None:
    says(api, NOW)
    both(api, tools=TOOLS, tool_choice=choice)
    grammar = api.backend.jobs[-1].sampling.grammar
    assert (grammar is not None) == forced
    assert "time" in prompt_text(api)


def test_no_tool_is_shown_when_none_may_be_used(api: Api) -> None:
    both(api, tools=TOOLS, tool_choice={"type": "none"})
    assert "weather" not in prompt_text(api)


def test_a_conversation_with_every_block_reads_as_the_template_writes_it(api: Api) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "xx"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "x"}},
                {"type": "tool_use", "id": "toolu_2", "name": "time", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "warm"},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "is_error": True,
                    "content": [{"type": "text", "text": "no clock"}],
                },
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    system = [
        {"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "good."},
    ]
    both(api, messages=messages, system=system, tools=TOOLS)
    shown = prompt_text(api).partition("<tool_call><|im_end|>\n")[2]
    assert shown == (
        "<|im_start|>system\nBe\ngood.<|im_end|>\n<|im_start|>user\na\nb\n\nc<|im_end|>\n"
        "<|im_start|>assistant\n<think>hm</think>I look."
        '<tool_call>weather toolu_1 {"city": "x"}</tool_call>'
        "<tool_call>time toolu_2 {}</tool_call><|im_end|>\n"
        "<|im_start|>tool\nwarm(toolu_1)<|im_end|>\n"
        "<|im_start|>tool\nError: no clock(toolu_2)<|im_end|>\n"
        "<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_silent_stream_sends_pings(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "EventStream", partial(EventStream, keep_alive_s=0.01))
    pause = [3]
    api.backend.script = lambda job, index: Play(api.backend.answer, pause_at=pause)
    body = {"model": MODEL, "max_tokens": 64, "messages": HI, "stream": True}
    raw = b""
    with api.http.stream("POST", "/v1/messages", json=body) as response:
        for piece in response.iter_bytes():
            raw += piece
            if raw.count(b"event: ping") > 3:
                pause.clear()
    assert b": keep-alive" not in raw
    assert check_message_stream(raw, model=MODEL)["stop_reason"] == "end_turn"


def test_an_answer_that_is_begun_is_continued(api: Api) -> None:
    says(api, " 4.")
    message = both(api, messages=[*HI, {"role": "assistant", "content": "It is"}])
    assert message["content"] == [{"type": "text", "text": " 4."}]
    assert prompt_text(api).endswith("<|im_start|>assistant\nIt is")


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, "assistant\n"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "[True]"),
        ({"thinking": {"type": "adaptive"}}, "[True]"),
        ({"thinking": {"type": "disabled"}}, "[False]"),
        ({"output_config": {"effort": "low"}}, "assistant\n[low]"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "[False]"),
    ],
)
def test_how_to_think_reaches_the_template(api: Api, fields: dict, shown: str) -> None:
    both(api, **fields)
    assert prompt_text(api).endswith(shown)


@pytest.mark.parametrize("place", ["output_config", "output_format"])
def test_a_schema_becomes_the_grammar_with_its_order_kept(api: Api, place: str) -> None:
    says(api, '{"b":1}')
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    format_ = {"type": "json_schema", "schema": schema}
    fields = {place: {"format": format_} if place == "output_config" else format_}
    assert both(api, **fields)["content"][0]["text"] == '{"b":1}'
    grammar = api.backend.jobs[-1].sampling.grammar
    assert (grammar.kind, json.loads(grammar.source)) == ("json_schema", schema)
    assert grammar.field == ("output_config.format" if place == "output_config" else place)
    assert grammar.source.index('"b"') < grammar.source.index('"a"')


def test_sampling_fields_are_obeyed(api: Api) -> None:
    both(api, temperature=0.5, top_p=0.9, top_k=7, cache_salt="s", stop_sequences=[])
    job = api.backend.jobs[-1]
    sampling = job.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert job.cache_salt == "s"


IGNORED = {
    "metadata": {"user_id": "u"},
    "service_tier": "auto",
    "cache_control": {"type": "ephemeral"},
    "speed": "standard",
    "a_field_of_tomorrow": {},
    "system": None,
    "tools": None,
    "thinking": None,
    "stop_sequences": None,
    "temperature": None,
    "container": None,
    "mcp_servers": [],
}


@pytest.mark.parametrize("field", IGNORED)
def test_what_changes_no_answer_is_accepted_and_null_is_absent(api: Api, field: str) -> None:
    both(api, **{field: IGNORED[field]})


def test_edits_of_the_context_are_taken_and_said_not_to_be_applied(api: Api) -> None:
    """What Claude Code asks for with every request."""
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    assert both(api, context_management=edits)["context_management"] == {"applied_edits": []}
    assert "context_management" not in both(api)
    body = {"model": MODEL, "messages": HI, "context_management": edits}
    counted = api.http.post("/v1/messages/count_tokens", json=body).json()
    tokens = counted["input_tokens"]
    assert counted["context_management"] == {"original_input_tokens": tokens}


def test_a_line_for_the_bill_is_no_part_of_the_prompt(api: Api) -> None:
    """It comes with every request of Claude Code, each time another one."""
    line, prompts = "x-anthropic-billing-header: cc_version=2; cch={};", set()
    for i, system in enumerate(("You are kind.", [{"type": "text", "text": "You are kind."}]) * 2):
        sent = f"{line.format(i)}\n{system}"
        if isinstance(system, list):
            sent = [{"type": "text", "text": line.format(i)}, *system]
        both(api, system=sent)
        prompts.add(prompt_text(api))
    both(api, system="You are kind.")
    assert prompts == {prompt_text(api)}


def test_documents_and_search_results_of_text_are_read(api: Api) -> None:
    page = {"type": "text", "media_type": "text/plain", "data": "It rains."}
    parts = {"type": "content", "content": [{"type": "text", "text": "It"}, text("snows.")]}
    shown = [
        {"type": "document", "title": "News", "context": "Of today.", "source": page},
        {"type": "document", "source": parts, "citations": {"enabled": False}},
        {"type": "search_result", "source": "http://x", "title": "X", "content": [text("hails.")]},
    ]
    said = "News\nOf today.\nIt rains.\nIt\nsnows.\nX\nhttp://x\nhails."
    both(api, messages=[{"role": "user", "content": shown}])
    assert f"user\n{said}<|im_end|>" in prompt_text(api)
    both(api, messages=called(shown))
    assert f"tool\n{said}(toolu_1)<|im_end|>" in prompt_text(api)


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def called(result: list[dict], name: str = "time") -> list[dict]:
    use = {"type": "tool_use", "id": "toolu_1", "name": name, "input": {}}
    answer = {"type": "tool_result", "tool_use_id": "toolu_1", "content": result}
    return [
        *HI,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [answer]},
    ]


LATER = WEATHER | {"defer_loading": True}
BAD = {"name": "x y"}


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"tools": [LATER, TIME]}, False),
        ({"tools": [LATER]}, False),
        ({"tools": [LATER, TIME], "tool_choice": {"type": "tool", "name": "weather"}}, True),
        (
            {
                "tools": [LATER, TIME],
                "messages": called([{"type": "tool_reference", "tool_name": "weather"}]),
            },
            True,
        ),
        (
            {
                "tools": [
                    {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
                    LATER,
                ]
            },
            True,
        ),
    ],
)
def test_a_deferred_tool_is_shown_once_it_is_referred_to_or_nobody_could(
    api: Api, fields: dict, shown: bool
) -> None:
    assert post(api, **fields).status_code == 200
    assert ('"name": "weather"' in prompt_text(api)) is shown


def test_models_are_listed_as_anthropics_clients_read_them(api: Api) -> None:
    client = anthropic.Anthropic(base_url=api.url, api_key="k")
    names = [entry["id"] for entry in api.http.get("/v1/models").json()["data"]]
    whole = client.models.list()
    assert [model.id for model in whole.data] == names
    assert (whole.first_id, whole.last_id, whole.has_more) == (names[0], names[-1], False)
    assert client.models.retrieve(names[-1]) == whole.data[-1]
    assert whole.data[0].max_input_tokens == 4096
    assert [model.id for model in client.models.list(limit=1)] == names
    before = client.models.list(before_id=names[-1], limit=1)
    assert [model.id for model in before.data] == names[-2:-1]
    assert not before.has_more
    with pytest.raises(anthropic.BadRequestError):
        client.models.list(after_id="nobody")


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


def test_the_count_is_what_the_call_itself_uses(api: Api) -> None:
    fields = {
        "system": "Be good.",
        "tools": TOOLS,
        "thinking": {"type": "adaptive"},
        "messages": [*HI, {"role": "assistant", "content": "yo"}, *HI],
    }
    body = {"model": MODEL, **fields}
    response = api.http.post("/v1/messages/count_tokens", json=body)
    usage = both(api, **fields)["usage"]
    total = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert response.json() == {"input_tokens": total}


def test_what_is_longer_than_the_context_can_still_be_counted(api: Api) -> None:
    messages = [{"role": "user", "content": "a b " * 5000}]
    refused(post(api, messages=messages), "prompt is too long: 20016 tokens > 4096 maximum")
    longer = [{"role": "user", "content": "a b " * 50_000}]
    refused(post(api, messages=longer), " tokens > 4096 maximum")
    body = {"model": MODEL, "messages": messages}
    response = api.http.post("/v1/messages/count_tokens", json=body)
    assert response.json()["input_tokens"] > 4096


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


def test_a_template_without_turns_for_tools_still_tells_the_model_of_them() -> None:
    with running_api(ScriptedBackend(template=TEMPLATE, max_model_len=2048)) as api:
        both(api, tools=TOOLS)
        assert "weather" in prompt_text(api)


class TestAnthropicSdk:
    """The official client, unchanged."""

    @pytest.fixture
    def client(self, api: Api) -> Iterator[anthropic.Anthropic]:
        with anthropic.Anthropic(base_url=api.url, api_key="sk-any", max_retries=0) as client:
            yield client

    def test_the_stream_helper_puts_every_block_together(
        self, api: Api, client: anthropic.Anthropic
    ) -> None:
        says(api, f"<think>Hm.</think>Let me see.\n{CALL}")
        fields = {"model": MODEL, "max_tokens": 500, "messages": HI, "tools": TOOLS}
        with client.messages.stream(**fields) as stream:
            found = stream.get_final_message()
        whole = client.messages.create(**fields)
        for message in (found, whole):
            thinking, text, call = message.content
            assert (thinking.thinking, text.text) == ("Hm.", "Let me see.")
            assert (call.name, call.input) == ("weather", json.loads(CITY))
            assert message.stop_reason == "tool_use"
        assert found.usage == whole.usage
        says(api, "Fine.")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "warm"}
        fields["messages"] = [*HI, whole.to_param(), {"role": "user", "content": [result]}]
        assert client.messages.create(**fields).content[0].text == "Fine."

    def test_errors_are_its_own_classes(self, api: Api, client: anthropic.Anthropic) -> None:
        fields = {"model": MODEL, "max_tokens": 500, "messages": HI}
        says(api, ANSWER, error=OverloadedError("Too much."))
        with pytest.raises(anthropic.OverloadedError) as refused:
            client.messages.create(**fields)
        assert (refused.value.type, refused.value.status_code) == ("overloaded_error", 529)
        says(api, ANSWER, error=EngineError("It failed."), error_after=3)
        with pytest.raises(anthropic.InternalServerError):
            client.messages.create(**fields)
        with pytest.raises(anthropic.APIStatusError, match="It failed"):
            list(client.messages.create(**fields, stream=True))
