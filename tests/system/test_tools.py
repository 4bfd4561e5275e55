"""Tool calls through `forebay serve` and the OpenAI SDK: even a small model obeys a forced call."""

import json
from collections.abc import Iterator

import openai
import pytest
from patience import PATIENCE_S
from serve_house import Serve, starting

pytestmark = pytest.mark.system

QUESTION = [{"role": "user", "content": "How warm is it in Paris, in celsius?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Says the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"$ref": "#/$defs/city"},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "$defs": {"city": {"type": "string", "maxLength": 20}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}


@pytest.fixture(scope="module")
def server() -> Iterator[Serve]:
    with starting() as start:
        yield start().wait_ready()


@pytest.fixture(scope="module")
def client(server: Serve) -> Iterator[openai.OpenAI]:
    with server.client(timeout=PATIENCE_S) as client:
        yield client


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "now"}),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
        ({"type": "function", "function": {"name": "now"}}, {"now"}),
    ],
)
def test_a_forced_call_follows_the_schema_plain_and_streamed(
    server: Serve, client: openai.OpenAI, choice: object, names: set[str]
) -> None:
    fields = {
        "model": server.model,
        "messages": QUESTION,
        "tools": [WEATHER, NOW],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 120,
    }
    answer = client.chat.completions.create(**fields).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    (call,) = answer.message.tool_calls
    assert call.function.name in names
    arguments = json.loads(call.function.arguments)
    if call.function.name == "get_weather":
        assert set(arguments) == {"city", "unit"}
        assert arguments["unit"] in ("celsius", "fahrenheit")
    else:
        assert arguments == {}
    name, pieces = "", ""
    for chunk in client.chat.completions.create(stream=True, **fields):
        for delta in chunk.choices[0].delta.tool_calls or ():
            name += delta.function.name or ""
            pieces += delta.function.arguments
    assert (name, pieces) == (call.function.name, call.function.arguments)


def test_a_whole_conversation_with_a_tool_is_accepted(server: Serve, client: openai.OpenAI) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "now", "arguments": "{}"},
    }
    answer = client.chat.completions.create(
        model=server.model,
        messages=[
            *QUESTION,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "It is noon."},
        ],
        tools=[WEATHER, NOW],
        temperature=0,
        max_tokens=20,
    )
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_a_schema_that_cannot_be_enforced_is_a_400_that_names_the_tools(
    server: Serve, client: openai.OpenAI
) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model=server.model, messages=QUESTION, tools=[tool], tool_choice="required"
        )
    assert refused.value.param == "tools"
