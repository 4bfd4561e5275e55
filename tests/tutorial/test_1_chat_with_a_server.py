"""Lesson 1: the whole product from outside. `forebay serve` runs; an OpenAI client talks to it.

The echo engine needs no model: it answers with what it was sent. Everything else is real: the
private Redis, the gateway, the worker, HTTP over loopback. Lesson 2 looks into the engine, lesson 3
at what lies between the two.
"""

from collections.abc import Iterator

import openai
import pytest
from serve_house import Serve, starting

pytestmark = pytest.mark.system

HELLO = [{"role": "user", "content": "Hello, forebay!"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Serve]:
    """The ready line says where the server is, what it serves and with which key."""
    with starting() as start:
        yield start("--engine", "echo").wait_ready()


@pytest.fixture
def client(server: Serve) -> Iterator[openai.OpenAI]:
    """All that an application changes is the base URL and the key."""
    with openai.OpenAI(base_url=server.url, api_key=server.key) as client:
        yield client


def test_a_chat_is_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="echo", messages=HELLO)
    assert answer.choices[0].message.content == "Hello, forebay!"
    assert answer.choices[0].finish_reason == "stop"


def test_a_stream_brings_the_same_answer_in_pieces(client: openai.OpenAI) -> None:
    """First the role, then text as the engine makes it, then the reason why it ended."""
    stream = client.chat.completions.create(model="echo", messages=HELLO, stream=True)
    choices = [chunk.choices[0] for chunk in stream]
    assert choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in choices) == "Hello, forebay!"
    assert choices[-1].finish_reason == "stop"


def test_a_limit_ends_an_answer_and_usage_says_what_it_cost(client: openai.OpenAI) -> None:
    """A token of the echo model is one byte."""
    answer = client.completions.create(model="echo", prompt="abc", max_tokens=5)
    assert answer.choices[0].text == "abcab"
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 5)


def test_a_mistake_is_an_error_that_names_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="echo", messages=HELLO, temperature=9)
    assert caught.value.param == "temperature"
