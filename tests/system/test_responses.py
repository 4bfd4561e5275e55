"""Responses through `forebay serve` and the OpenAI SDK: gateways that come and go, a real model."""

import json
from collections.abc import Iterator

import openai
import pytest
from patience import PATIENCE_S
from pydantic import BaseModel, Field
from serve_house import FAILURES, Serve, Starter, starting, until

pytestmark = pytest.mark.system

QUESTION = "How warm is it in Paris, in celsius?"
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Says the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "unit": {"enum": ["celsius", "fahrenheit"]},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def server() -> Iterator[Serve]:
    """The demo model."""
    with starting() as start:
        yield start().wait_ready()


class Reading(BaseModel):
    city: str = Field(max_length=20)
    degrees: int = Field(ge=0, le=40)


def test_a_real_model_streams_what_it_answers(server: Serve) -> None:
    fields = {"model": server.model, "input": QUESTION, "temperature": 0, "max_output_tokens": 12}
    with server.client() as client:
        answer = client.responses.create(**fields)
        assert answer.status in ("completed", "incomplete")
        assert answer.usage.output_tokens <= 12
        *_, last = client.responses.create(stream=True, **fields)
        assert last.response.output_text == answer.output_text
        chat = client.chat.completions.create(
            model=server.model,
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            max_tokens=12,
        )
        assert chat.choices[0].message.content == answer.output_text
        again = client.responses.create(**fields | {"previous_response_id": answer.id})
        assert again.usage.input_tokens > answer.usage.input_tokens + answer.usage.output_tokens
        assert again.usage.input_tokens_details.cached_tokens > 0


def test_a_real_model_obeys_a_format_and_a_loop_of_tools(server: Serve) -> None:
    with server.client(timeout=PATIENCE_S) as client:
        fields = {"model": server.model, "temperature": 0}
        parsed = client.responses.parse(
            input=QUESTION, text_format=Reading, max_output_tokens=60, **fields
        )
        assert isinstance(parsed.output_parsed, Reading)
        forced = client.responses.create(
            input=QUESTION,
            tools=[WEATHER],
            tool_choice="required",
            parallel_tool_calls=False,
            max_output_tokens=120,
            **fields,
        )
        (call,) = forced.output
        assert set(json.loads(call.arguments)) == {"city", "unit"}
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "21"}
        answer = client.responses.create(
            input=[result],
            previous_response_id=forced.id,
            tools=[WEATHER],
            tool_choice="none",
            max_output_tokens=10,
            **fields,
        )
        assert answer.output_text


def test_a_schema_that_cannot_be_enforced_names_the_format(server: Serve) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}}
    format_ = {"type": "json_schema", "name": "x", "schema": schema}
    with server.client() as client, pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=server.model, input="x", text={"format": format_})
    assert refused.value.param == "text.format"


def test_a_stored_response_survives_its_gateways(start: Starter) -> None:
    server = start("--engine", "echo", "--echo-delay-ms", "5", "--gateways", "2").wait_ready()
    with server.client(max_retries=8) as client:
        made = client.responses.create(model=server.model, input="one two three")
        for gateway in server.children("gateway"):
            gateway.kill()

        def served() -> bool:
            try:
                return client.responses.retrieve(made.id).output_text == made.output_text
            except FAILURES:
                return False

        until(served)
        later = client.responses.create(
            model=server.model, input="four", previous_response_id=made.id
        )
        assert later.usage.input_tokens > made.usage.input_tokens


def test_a_response_whose_gateway_is_killed_fails_truthfully(start: Starter) -> None:
    server = start("--engine", "echo", "--echo-delay-ms", "200").wait_ready()
    with server.client(max_retries=8) as client:
        made = client.responses.create(
            model=server.model, input="one two three " * 50, background=True, store=True
        )
        until(lambda: client.responses.retrieve(made.id).status == "in_progress")
        server.children("gateway")[0].kill()

        def failed() -> bool:
            try:
                return client.responses.retrieve(made.id).status == "failed"
            except FAILURES:
                return False

        until(failed)
        assert "has gone" in client.responses.retrieve(made.id).error.message
