"""/v1/responses over real HTTP: plain and streamed are equal, each field honoured or refused."""

import json
from collections.abc import Iterator

import openai
import pytest
from forebay_shared.errors import EngineError
from forebay_shared.models import CAP_GRAMMAR
from forebay_shared.settings import GatewaySettings
from gateway_fakes import ANSWER, MODEL, Api, Play
from pydantic import BaseModel
from redis_house import RedisServer
from response_transcripts import check_events, split_events
from responses_house import (
    RESPONSES,
    TALKING_TEMPLATE,
    both,
    plain,
    post,
    prompt,
    responding,
    says,
    sdk,
    streamed,
)
from transcripts import check_error

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Says the weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
TIME = {"type": "function", "name": "time", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
BOTH = f'Let me see.\n{CALL}\n<tool_call>\n{{"name": "time", "arguments": {{}}}}\n</tool_call>'
THOUGHT = "<think>\nA greeting 你好.\n</think>\n\nHello."


@pytest.fixture(scope="module")
def server(session_redis: RedisServer) -> Iterator[Api]:
    with responding(session_redis.url, template=TALKING_TEMPLATE) as api:
        yield api


@pytest.fixture
def api(server: Api, redis_url: str) -> Iterator[Api]:
    server.reset()
    server.backend.capabilities |= {CAP_GRAMMAR}
    yield server
    server.reset()
    assert plain(server)["status"] == "completed"  # the canary


def refused(api: Api, param: str, **fields: object) -> dict:
    answer = post(api, **fields)
    assert answer.status_code == 400, answer.text
    error = check_error(answer.content)
    assert error["param"] == param, error
    return error


@pytest.mark.parametrize("group", [1, 3, 64])
def test_text_is_one_message(api: Api, group: int) -> None:
    says(api, ANSWER, group=group)
    answer = both(api, instructions="Be kind.")
    (message,) = answer["output"]
    assert message["content"][0]["text"] == ANSWER
    assert answer["status"] == "completed"
    assert prompt(api).startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi")


@pytest.mark.parametrize("group", range(1, 6))
def test_calls_and_text_are_items_in_their_order(api: Api, group: int) -> None:
    says(api, BOTH, group=group)
    answer = both(api, tools=[WEATHER, TIME])
    assert [item["type"] for item in answer["output"]] == ["message", *["function_call"] * 2]
    _, weather, time = answer["output"]
    assert (weather["name"], json.loads(weather["arguments"])) == ("weather", {"city": "Köln"})
    assert (time["name"], time["arguments"]) == ("time", "{}")
    assert weather["call_id"].startswith("call_")
    assert answer["tools"] == [WEATHER, {**TIME, "description": None, "strict": True}]


@pytest.mark.parametrize("group", range(1, 6))
def test_thinking_is_an_item_of_its_own(api: Api, group: int) -> None:
    says(api, THOUGHT, group=group)
    answer = both(api)
    thought, message = answer["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "A greeting 你好."}]
    assert thought["summary"] == []
    assert message["content"][0]["text"] == "Hello."
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize("group", [1, 4])
def test_thinking_comes_back_in_encrypted_content(api: Api, group: int) -> None:
    """Clients that have nothing stored send that alone, and no text."""
    says(api, THOUGHT, group=group)
    assert both(api)["output"][0]["encrypted_content"] is None
    answer = both(api, include=["reasoning.encrypted_content"], store=False)
    thought, message = answer["output"]
    assert thought["content"][0]["text"] == "A greeting 你好."
    sealed = {"type": "reasoning", "summary": [], "encrypted_content": thought["encrypted_content"]}
    plain(api, input=[{"role": "user", "content": "hi"}, sealed, message])
    assert "<think>A greeting 你好.</think>Hello.<|im_end|>" in prompt(api)


def test_an_answer_without_a_word_is_an_empty_message(api: Api) -> None:
    api.backend.script = lambda job, index: Play([])
    assert both(api)["output"][0]["content"][0]["text"] == ""


@pytest.mark.parametrize("text", [ANSWER, THOUGHT, CALL], ids=["text", "thinking", "call"])
@pytest.mark.parametrize("limit", [11, 45])
def test_a_limit_makes_it_incomplete_with_what_there_is(api: Api, text: str, limit: int) -> None:
    text *= 5 if text != CALL else 1
    says(api, text)
    fields = {"max_output_tokens": limit, "tools": [WEATHER], "parallel_tool_calls": False}
    answer = both(api, **fields)
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["max_output_tokens"] == limit
    assert answer["usage"]["output_tokens"] == limit
    for item in answer["output"][-1:]:
        assert item["status"] == "incomplete"


@pytest.mark.parametrize("text", [ANSWER, THOUGHT, BOTH], ids=["text", "thinking", "calls"])
@pytest.mark.parametrize("group", [1, 7])
def test_logprobs_are_those_of_the_visible_text(api: Api, text: str, group: int) -> None:
    says(api, text, group=group)
    include = ["message.output_text.logprobs"]
    answer = both(api, top_logprobs=2, include=include, tools=[WEATHER, TIME])
    (message,) = [item for item in answer["output"] if item["type"] == "message"]
    (part,) = message["content"]
    spelt = b"".join(bytes(entry["bytes"]) for entry in part["logprobs"])
    assert spelt.decode().strip() == part["text"].strip()
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])


@pytest.mark.parametrize("stop", ["dog", "fox says: x", "你"])
def test_logprobs_are_those_of_the_text_before_a_stop_string(api: Api, stop: str) -> None:
    says(api, ANSWER)
    answer = both(api, top_logprobs=2, include=["message.output_text.logprobs"], stop=stop)
    ((part,),) = [item["content"] for item in answer["output"]]
    spelt = b"".join(bytes(entry["bytes"]) for entry in part["logprobs"]).decode()
    assert spelt == part["text"] == ANSWER.split(stop)[0]


def test_every_field_of_the_request_comes_back(api: Api) -> None:
    fields = {
        "instructions": "Be kind.",
        "max_output_tokens": 5,
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "store": False,
        "temperature": 0.5,
        "tool_choice": "none",
        "top_logprobs": 1,
        "top_p": 0.9,
        "truncation": "auto",
        "user": "u",
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
    }
    answer = both(
        api,
        **fields,
        tools=[WEATHER],
        text={"verbosity": "low"},
        reasoning={"effort": "low", "summary": "auto"},
    )
    assert {name: answer[name] for name in fields} == fields
    assert answer["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert answer["reasoning"] == {"effort": "low", "summary": "auto"}
    assert "(low)" in prompt(api)
    sampling = api.backend.jobs[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.logprobs) == (0.5, 0.9, 1)


def test_all_kinds_of_items_reach_the_model_as_messages(api: Api) -> None:
    plain(
        api,
        instructions="I",
        input=[
            {"role": "developer", "content": "D"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "U"}]},
            {"type": "reasoning", "summary": [], "content": [_reasoned("T")]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "O1"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "O2"}],
            },
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        ],
    )
    assert prompt(api) == (
        "<|im_start|>system\nI<|im_end|>\n<|im_start|>system\nD<|im_end|>\n"
        "<|im_start|>user\nU<|im_end|>\n"
        '<|im_start|>assistant\n<think>T</think>A<tool_call>f c1 {"x": 1}</tool_call>'
        "<tool_call>g c2 {}</tool_call><|im_end|>\n"
        "<|im_start|>tool\nO1(c1)<|im_end|>\n<|im_start|>tool\nO2(c2)<|im_end|>\n"
        "<|im_start|>assistant\nNo.<|im_end|>\n<|im_start|>assistant\n"
    )


def _reasoned(text: str) -> dict:
    return {"type": "reasoning_text", "text": text}


def test_allowed_tools_are_the_only_ones(api: Api) -> None:
    choice = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "time"}],
    }
    answer = plain(api, tools=[WEATHER, TIME], tool_choice=choice)
    assert '"time"' in prompt(api)
    assert '"weather"' not in prompt(api)
    assert answer["tool_choice"] == choice
    plain(api, tools=[WEATHER, TIME], tool_choice=choice | {"mode": "required"})
    assert api.backend.jobs[-1].sampling.grammar is not None
    plain(api, tools=[WEATHER, TIME], tool_choice={"type": "function", "name": "weather"})
    assert api.backend.jobs[-1].sampling.grammar is not None


def test_a_format_is_a_grammar_under_this_dialects_name(api: Api) -> None:
    schema = {"type": "object", "properties": {"z": {}, "a": {}}}
    format_ = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    answer = plain(api, text={"format": format_}, reasoning={"effort": "none"})
    grammar = api.backend.jobs[-1].sampling.grammar
    assert (grammar.kind, grammar.field) == ("json_schema", "text.format")
    assert json.loads(grammar.source) == schema
    assert answer["text"]["format"] == format_
    plain(api, text={"format": {"type": "json_object"}}, reasoning={"effort": "none"})
    assert api.backend.jobs[-1].sampling.grammar.kind == "json_object"
    says(api, "<think>hm</think>{}")
    thought, said = both(api, text={"format": format_})["output"]
    assert (thought["content"][0]["text"], said["content"][0]["text"]) == ("hm", "{}")
    assert api.backend.jobs[-1].sampling.grammar.field == "text.format"


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("input", {"input": []}),
        ("input", {"input": None}),
        ("input", {"input": 7}),
        ("input[0].content", {"input": [{"role": "user", "content": 7}]}),
        ("input[1].type", {"input": [{"role": "user", "content": "x"}, {}]}),
        ("input[0].type", {"input": [{"type": "computer_call", "call_id": "x"}]}),
        ("input[0].type", {"input": [{"type": "web_search_call", "id": "x"}]}),
        ("input[0].role", {"input": [{"role": "tool", "content": "x"}]}),
        ("input[0].role", {"input": [{"type": "message", "content": "x"}]}),
        ("input[0].content", {"input": [{"role": "user"}]}),
        (
            "input[0].content[0].type",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        ),
        (
            "input[0].content[0].text",
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        ),
        ("input[0].name", {"input": [{"type": "function_call", "call_id": "c"}]}),
        ("input[0].call_id", {"input": [{"type": "function_call_output", "output": "x"}]}),
        (
            "input[0].call_id",
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
        ),
        ("input[0].id", {"input": [{"type": "item_reference"}]}),
        ("input[0].id", {"input": [{"role": "user", "content": "x", "id": "i" * 300}]}),
        (
            "input[0].encrypted_content",
            {"input": [{"type": "reasoning", "encrypted_content": "x"}]},
        ),
        (
            "input[0].encrypted_content",
            {"input": [{"type": "reasoning", "encrypted_content": "fb1.é"}]},
        ),
        ("conversation", {"conversation": "conv_1"}),
        ("prompt", {"prompt": {"id": "p"}}),
        ("moderation", {"moderation": {"model": "m"}}),
        ("context_management", {"context_management": [{"type": "compaction"}]}),
        ("include", {"include": ["everything"]}),
        ("metadata", {"metadata": {str(i): "x" for i in range(17)}}),
        ("metadata", {"metadata": {"a": 1}}),
        ("metadata", {"metadata": {"a" * 65: "x"}}),
        ("metadata", {"metadata": {"a": "x" * 513}}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("max_tool_calls", {"max_tool_calls": -1}),
        ("temperature", {"temperature": 2.1}),
        ("top_p", {"top_p": 1.1}),
        ("top_logprobs", {"top_logprobs": 21}),
        ("truncation", {"truncation": "maybe"}),
        ("service_tier", {"service_tier": "gold"}),
        ("stream_options", {"stream_options": {}}),
        ("background", {"background": True, "store": False}),
        ("generate", {"generate": False}),
        ("reasoning.effort", {"reasoning": {"effort": "enormous"}}),
        ("reasoning.context", {"reasoning": {"context": "current_turn"}}),
        ("reasoning.mode", {"reasoning": {"mode": "pro"}}),
        ("text.verbosity", {"text": {"verbosity": "loud"}}),
        ("text.format.type", {"text": {"format": {"type": "xml"}}}),
        ("text.format.name", {"text": {"format": {"type": "json_schema", "schema": {}}}}),
        ("text.format.name", {"text": {"format": {"type": "json_schema", "name": "a b"}}}),
        ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "a"}}}),
        (
            "structured_outputs",
            {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
        ),
        ("tools[0].type", {"tools": [{"type": "web_search"}]}),
        ("tools[0].name", {"tools": [{"type": "function"}]}),
        ("tools[0].name", {"tools": [{"type": "function", "name": "a b"}]}),
        ("tools", {"tools": [TIME, TIME]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tool_choice": "always", "tools": [TIME]}),
        ("tool_choice.type", {"tool_choice": {"type": "file_search"}, "tools": [TIME]}),
        ("tool_choice.name", {"tool_choice": {"type": "function"}, "tools": [TIME]}),
        (
            "tool_choice.name",
            {"tool_choice": {"type": "function", "name": "x"}, "tools": [TIME]},
        ),
        ("tool_choice.tools", {"tool_choice": {"type": "allowed_tools"}, "tools": [TIME]}),
        (
            "tool_choice.tools[0]",
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "tools": [{"type": "function", "name": "x"}],
                },
                "tools": [TIME],
            },
        ),
        (
            "tools[1].name",
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "tools": [{"type": "function", "name": "a b"}],
                },
                "tools": [TIME, TIME | {"name": "a b"}],
            },
        ),
        ("input", {"input": "word " * 3000}),
        ("stop", {"stop": ["x"] * 17}),
        ("seed", {"seed": 2**64}),
        ("top_k", {"top_k": 2**63}),
        ("max_output_tokens", {"max_output_tokens": 2**31}),
        ("temperature", {"temperature": 1e308}),
        ("logit_bias", {"logit_bias": {"x": 1}}),
        ("chat_template_kwargs", {"chat_template_kwargs": {str(i): 1 for i in range(33)}}),
        ("previous_response_id", {"previous_response_id": "resp_1"}),
    ],
)
def test_what_is_wrong_is_named(api: Api, param: str, fields: dict) -> None:
    error = refused(api, param, **fields)
    assert "messages" not in error["message"]
    assert "response_format" not in error["message"]


def test_an_unknown_model_is_a_404(api: Api) -> None:
    answer = post(api, model="nobody")
    assert answer.status_code == 404
    assert check_error(answer.content)["code"] == "model_not_found"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"model": "x", "input": "\xff"}',
        b'{"model":"x","input":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model":"x","input":[' + b'{"role":"user","content":[' * 50_000,
    ],
    ids=["empty", "list", "utf8", "deep", "cut"],
)
def test_a_broken_body_is_a_400(api: Api, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = api.http.post(RESPONSES, content=body, headers=headers)
    assert answer.status_code == 400
    check_error(answer.content)


def test_a_million_items_are_refused(api: Api) -> None:
    item = b'{"role":"user","content":"x"}'
    body = b'{"model":"%b","input":[%b]}' % (MODEL.encode(), b",".join([item] * 100_000))
    answer = api.http.post(RESPONSES, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert check_error(answer.content)["param"] == "input"


def test_truncation_drops_the_oldest_items_and_orphaned_outputs(api: Api) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "time", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "noon " * 20}
    long = [{"role": "user", "content": f"no {n} " + "word " * 40} for n in range(60)]
    items = [*long, call, output, {"role": "user", "content": "last"}]
    refused(api, "input", input=items)
    refused(api, "input", input=items, truncation="disabled")
    answer = plain(api, input=items, truncation="auto", instructions="Stay.")
    assert answer["status"] == "completed"
    assert prompt(api).startswith("<|im_start|>system\nStay.")
    assert "no 0 " not in prompt(api)
    assert "no 59 " in prompt(api)
    assert len(api.backend.jobs[-1].prompt) <= 2048 * 3 // 4
    refused(api, "input", input="word " * 3000, truncation="auto")


def test_a_failure_before_the_stream_is_plain_json(api: Api) -> None:
    api.backend.script = lambda job, index: Play(api.backend.answer, error=EngineError("Broken."))
    for fields in ({}, {"stream": True}):
        answer = post(api, **fields)
        assert answer.status_code == 500
        assert check_error(answer.content)["message"] == "Broken."


def test_a_failure_in_the_stream_is_a_failed_response(api: Api) -> None:
    answer = api.backend.answer
    api.backend.script = lambda job, index: Play(
        answer, error=EngineError("Broken."), error_after=5
    )
    raw = post(api, stream=True).content
    failed = check_events(raw)
    assert failed["error"] == {"code": "server_error", "message": "Broken.", "param": None}
    (item,) = failed["output"]
    assert item["status"] == "incomplete"
    assert ANSWER.startswith(item["content"][0]["text"])
    deltas = [event["delta"] for event in split_events(raw) if event["type"].endswith(".delta")]
    assert item["content"][0]["text"] == "".join(deltas)


def test_the_input_is_counted(api: Api) -> None:
    with sdk(api) as client:
        count = client.responses.input_tokens.count(model=MODEL, input="hi", instructions="Be.")
    assert count.input_tokens == plain(api, instructions="Be.")["usage"]["input_tokens"]


class Greeting(BaseModel):
    text: str


def test_the_sdk_parses_and_streams(api: Api) -> None:
    says(api, '{"text": "Hello."}')
    with sdk(api) as client:
        parsed = client.responses.parse(model=MODEL, input="hi", text_format=Greeting)
        assert parsed.output_parsed == Greeting(text="Hello.")
        with client.responses.stream(model=MODEL, input="hi", text_format=Greeting) as stream:
            snapshots = [e.snapshot for e in stream if e.type == "response.output_text.delta"]
            assert stream.get_final_response().output_parsed == Greeting(text="Hello.")
    assert snapshots[-1] == '{"text": "Hello."}'


def test_the_sdk_runs_a_loop_of_tools(api: Api) -> None:
    with sdk(api) as client:
        says(api, THOUGHT.replace("Hello.", CALL))
        fields = {"model": MODEL, "tools": [WEATHER]}
        first = client.responses.create(input="How is the weather in Köln?", **fields)
        assert [item.type for item in first.output] == ["reasoning", "function_call"]
        call = first.output[1]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
        says(api, "It rains.")
        for fields_ in (
            {"input": [result], "previous_response_id": first.id},
            {
                "input": [
                    {"role": "user", "content": "How is the weather in Köln?"},
                    *first.output,
                    result,
                ]
            },
            {
                "input": [
                    {"role": "user", "content": "How is the weather in Köln?"},
                    *({"type": "item_reference", "id": item.id} for item in first.output),
                    result,
                ]
            },
        ):
            second = client.responses.create(**fields, **fields_)
            assert second.output_text == "It rains."
            assert prompt(api).endswith(
                "<|im_start|>user\nHow is the weather in Köln?<|im_end|>\n<|im_start|>assistant\n"
                "<think>A greeting 你好.</think><tool_call>weather "
                f'{call.call_id} {{"city": "Köln"}}</tool_call><|im_end|>\n'
                f"<|im_start|>tool\nRain.({call.call_id})<|im_end|>\n<|im_start|>assistant\n"
            )


def test_a_client_that_leaves_ends_the_work(api: Api) -> None:
    api.backend.script = lambda job, index: Play(api.backend.answer, hang_after=3)
    with sdk(api) as client:
        stream = client.responses.create(model=MODEL, input="hi", stream=True)
        assert next(event for event in stream if event.type.endswith("text.delta"))
        stream.close()
    while not api.backend.cancelled:
        pass


def test_other_methods_and_spellings(api: Api) -> None:
    assert api.http.get(RESPONSES).status_code == 405
    assert api.http.post(RESPONSES + "/", json={"model": MODEL, "input": "x"}).status_code == 200
    assert api.http.get(RESPONSES + "/resp_1/nothing").status_code == 404
    assert 'route="responses"' in api.http.get("/metrics").text


def test_a_server_that_keeps_nothing_says_so(redis_url: str) -> None:
    with responding(redis_url, GatewaySettings(response_ttl_s=0)) as api:
        assert plain(api)["store"] is False
        refused(api, "store", store=True)
        refused(api, "background", background=True)


def test_a_refused_parse_is_an_sdk_error(api: Api) -> None:
    with sdk(api) as client, pytest.raises(openai.BadRequestError) as error:
        client.responses.create(model=MODEL, input="x", conversation="conv_1")
    assert error.value.param == "conversation"
    assert streamed(api)["status"] == "completed"
