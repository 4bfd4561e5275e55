"""Structured output through `forebay serve`: it is obeyed, and nothing ends the engine."""

import json
from collections.abc import Callable, Iterator

import openai
import pytest
from patience import PATIENCE_S, promptly
from serve_house import Serve, starting

pytestmark = pytest.mark.system

QUESTION = [{"role": "user", "content": "Describe Bob, who is 42."}]
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}


@pytest.fixture(scope="module")
def server() -> Iterator[Serve]:
    with starting() as start:
        yield start().wait_ready()


@pytest.fixture(scope="module")
def client(server: Serve) -> Iterator[openai.OpenAI]:
    with server.client(timeout=PATIENCE_S) as client:
        yield client


def test_an_answer_follows_its_schema_plain_and_streamed(
    server: Serve, client: openai.OpenAI
) -> None:
    fields = {"model": server.model, "messages": QUESTION, "temperature": 0, "max_tokens": 60}
    plain = client.chat.completions.create(response_format=FORMAT, **fields)
    text = plain.choices[0].message.content
    assert list(json.loads(text)) == ["name", "age"]
    assert plain.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(response_format=FORMAT, stream=True, **fields)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text


def schemas(*sources: object) -> list[dict[str, object]]:
    return [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": source}}}
        for source in sources
    ]


def outputs(kind: str, *sources: object) -> list[dict[str, object]]:
    return [{"structured_outputs": {kind: source}} for source in sources]


TOWER = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}
TERMS = "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(60))
DEEP = "".join(f'A{i}: "x" (A{i + 1} | "y")\n' for i in range(3000))
BROKEN = [
    {"response_format": {"type": "nope"}},
    {"response_format": {"type": "json_schema"}},
    *schemas(
        None,
        False,
        "",
        5,
        {"type": "nope"},
        {"not": {}},
        {"if": {}},
        {"uniqueItems": True},
        {"contains": {}},
        {"oneOf": [{"type": "string"}, {"minLength": 3}]},
        {"enum": []},
        {"$ref": "#"},
        {"$ref": "#/$defs/x"},
        {"$ref": "http://127.0.0.1:1/x"},
        {"$ref": "#/$defs/d0", "$defs": TOWER},
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"type": "string", "pattern": "("},
        {"type": "string", "format": "iri"},
        {"properties": {"a": {"type": 5}}},
        {"minLength": "x"},
    ),
    *outputs("json", "", "{", 5),
    *outputs("regex", "", "(", "(?=a)a", r"(a)\1", r"[^\s\S]", "(" * 5000 + "a" + ")" * 5000),
    *outputs("choice", [], [1], "x"),
    *outputs(
        "grammar", "", "start: (", "start: start", "start: A0\n" + TERMS, "start: A0\n" + DEEP
    ),
]


def test_broken_grammars_are_a_400_each_on_every_route_and_the_engine_lives(
    server: Serve, client: openai.OpenAI
) -> None:
    workers = {child.pid for child in server.children("forebay_shared.cli worker")}
    chat = {"model": server.model, "messages": QUESTION, "max_tokens": 5}
    text = {"model": server.model, "prompt": "x", "max_tokens": 5}
    for fields in BROKEN:
        for create, body in (
            (client.chat.completions.create, chat),
            (client.completions.create, text),
        ):
            refused = promptly(lambda c=create, b=body, f=fields: _refused(c, b, f), 10.0)
            assert (refused.param or "").split(".")[0] in fields, fields
    assert client.chat.completions.create(**chat).usage.completion_tokens > 0
    assert workers <= {child.pid for child in server.children("forebay_shared.cli worker")}


def _refused(create: Callable[..., object], body: dict, fields: dict) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as caught:
        create(**body, extra_body=fields)
    return caught.value
