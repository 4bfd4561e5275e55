"""The Anthropic dialect over real HTTP: every block in and out, streamed as whole, every field."""

import json
from collections.abc import Iterator
from functools import partial

import anthropic
import pytest
from forebay_gateway.api import answers
from forebay_gateway.api.sse import EventStream
from forebay_shared.errors import EngineError, OverloadedError
from gateway_fakes import ANSWER, MODEL, Api, Play
from messages import check_message_stream
from messages_house import (
    CALL,
    CITY,
    HI,
    NOW,
    TOOLS,
    both,
    called,
    messaging,
    post,
    prompt_text,
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
    both(api, thinking={"type": "disabled"}, **fields)
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


def test_of_a_picture_in_a_tools_result_the_model_is_told(api: Api) -> None:
    """As Claude Code sends them when it has read one, with every later turn again."""
    bytes_ = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    image, file = {"type": "image", "source": bytes_}, {"type": "document", "source": bytes_}
    both(api, messages=called([text("Read."), image, file]))
    told = "[Here was one {} that cannot be shown: this model reads text alone.]".format
    assert f"tool\nRead.\n{told('image')}\n{told('file')}(toolu_1)<|im_end|>" in prompt_text(api)
    read = called([text("Read.")])
    read[-1]["content"].append(file)
    both(api, messages=read)
    assert f"tool\nRead.(toolu_1)<|im_end|>\n<|im_start|>user\n{told('file')}" in prompt_text(api)
    refused(post(api, messages=[{"role": "user", "content": [image]}]), "messages[0].content[0]")


def text(words: str) -> dict:
    return {"type": "text", "text": words}


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
