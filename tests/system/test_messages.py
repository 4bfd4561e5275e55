"""The Anthropic SDK, unchanged, against `forebay serve` with its small real model."""

from collections.abc import Iterator

import anthropic
import pydantic
import pytest
from anthropic.types import MessageParam
from serve_house import Serve, starting

pytestmark = pytest.mark.system

QUESTION: list[MessageParam] = [{"role": "user", "content": "How warm is it in Paris?"}]
GREEDY = {"extra_body": {"temperature": 0}}  # this SDK knows the field no more, its API does
WEATHER = {
    "name": "get_weather",
    "description": "Says the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class City(pydantic.BaseModel):
    name: str
    big: bool


@pytest.fixture(scope="module")
def server() -> Iterator[Serve]:
    with starting() as start:
        yield start().wait_ready()


def client_of(server: Serve, **options: object) -> anthropic.Anthropic:
    options = {"api_key": server.key, "max_retries": 0, "timeout": 120.0} | options
    return anthropic.Anthropic(base_url=server.url.removesuffix("/v1"), **options)


@pytest.fixture(scope="module")
def client(server: Serve) -> Iterator[anthropic.Anthropic]:
    with client_of(server) as client:
        yield client


def test_the_stream_helper_ends_with_the_plain_message(
    server: Serve, client: anthropic.Anthropic
) -> None:
    fields = {"model": server.model, "max_tokens": 24, "messages": QUESTION, **GREEDY}
    plain = client.messages.create(**fields)
    pieces: list[str] = []
    for _ in range(5):  # where nobody reads in time, all that waited is one piece
        if len(pieces) < 2:
            with client.messages.stream(**fields) as stream:
                pieces = list(stream.text_stream)
                final = stream.get_final_message()
    assert len(pieces) > 1
    assert "".join(pieces) == plain.content[0].text == final.content[0].text
    assert final.stop_reason == plain.stop_reason == "max_tokens"
    assert final.usage.output_tokens == plain.usage.output_tokens == 24
    assert plain._request_id.startswith("req_")


def test_the_count_agrees_with_the_usage(server: Serve, client: anthropic.Anthropic) -> None:
    fields = {"model": server.model, "messages": QUESTION, "system": "Be brief."}
    counted = client.messages.count_tokens(**fields).input_tokens
    usage = client.messages.create(**fields, max_tokens=1).usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted


def test_a_loop_with_a_tool_goes_round(server: Serve, client: anthropic.Anthropic) -> None:
    fields = {
        "model": server.model,
        "max_tokens": 80,
        **GREEDY,
        "tools": [WEATHER],
        "messages": list(QUESTION),
    }
    choice = {"type": "tool", "name": "get_weather"}
    asked = client.messages.create(**fields, tool_choice=choice)
    assert asked.stop_reason == "tool_use"
    call = asked.content[-1]
    assert call.name == "get_weather"
    assert set(call.input) == {"city"}
    with client.messages.stream(**fields, tool_choice=choice) as stream:
        streamed = stream.get_final_message()
    assert [block.input for block in streamed.content] == [block.input for block in asked.content]
    fields["messages"] += [
        asked.to_param(),
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "20 degrees"}],
        },
    ]
    answer = client.messages.create(**fields)
    assert answer.stop_reason in ("end_turn", "max_tokens", "tool_use")


def test_parse_gives_an_object_of_the_schema(server: Serve, client: anthropic.Anthropic) -> None:
    parsed = client.messages.parse(
        model=server.model,
        max_tokens=80,
        **GREEDY,
        messages=[{"role": "user", "content": "Describe Paris."}],
        output_format=City,
    )
    assert isinstance(parsed.parsed_output, City)


def test_an_answer_that_is_begun_goes_on_until_a_stop_sequence(
    server: Serve, client: anthropic.Anthropic
) -> None:
    message = client.messages.create(
        model=server.model,
        max_tokens=40,
        **GREEDY,
        messages=[
            {"role": "user", "content": "Count from one to ten in digits."},
            {"role": "assistant", "content": "1, 2, 3,"},
        ],
        stop_sequences=["6"],
    )
    assert message.stop_reason == "stop_sequence"
    assert message.stop_sequence == "6"
    assert message.content[0].text.startswith(" 4, 5")


def test_errors_are_the_sdks_own_classes(server: Serve, client: anthropic.Anthropic) -> None:
    fields = {"model": server.model, "max_tokens": 4, "messages": QUESTION}
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**fields | {"model": "claude-9"})
    assert missing.value.type == "not_found_error"
    assert "claude-9" in missing.value.message
    assert missing.value.request_id.startswith("req_")
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(**fields, extra_body={"temperature": 1.5})
    with client_of(server, api_key="no") as wrong, pytest.raises(anthropic.AuthenticationError):
        wrong.messages.create(**fields)
    with client_of(server, api_key=None, auth_token=server.key) as bearer:
        assert bearer.messages.create(**fields).usage.output_tokens > 0
