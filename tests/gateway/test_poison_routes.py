"""The poison table for the routes beside chat and completions, on two real servers."""

import json
from collections.abc import Callable, Iterator

import httpx
import pytest
from patience import PATIENCE_S
from poison_ward import Ward
from serve_house import starting
from tiny_checkpoint import MODEL, VOCAB
from tiny_house import Tiny

MILLION = 10**6
EMBEDDER = "echo-embed"
MESSAGES, COUNT, RESPONSES = "/messages", "/messages/count_tokens", "/responses"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
EMBEDDINGS, SCORE, RERANK = "/embeddings", "/score", "/rerank"
HI = [{"role": "user", "content": "hi"}]
SOUND: dict[str, dict[str, object]] = {
    MESSAGES: {"model": MODEL, "messages": HI, "max_tokens": 2},
    COUNT: {"model": MODEL, "messages": HI},
    RESPONSES: {"model": MODEL, "input": "hi", "max_output_tokens": 2, "store": False},
    TOKENIZE: {"model": MODEL, "prompt": "hi"},
    DETOKENIZE: {"model": MODEL, "tokens": [5]},
    EMBEDDINGS: {"model": EMBEDDER, "input": "hi"},
    SCORE: {"model": EMBEDDER, "text_1": "a", "text_2": "b"},
    RERANK: {"model": EMBEDDER, "query": "a", "documents": ["a", "b"]},
}
NUMBERS = [0, -1, 2**31, 2**63, 1e308, float("nan"), float("inf"), "x", [], {}, True]
NUMERIC = {
    MESSAGES: ["max_tokens", "temperature", "top_p", "top_k", "thinking.budget_tokens"],
    RESPONSES: ["max_output_tokens", "max_tool_calls", "top_logprobs", "min_tokens", "priority"],
    EMBEDDINGS: ["dimensions", "truncate_prompt_tokens", "priority", "input"],
    SCORE: ["truncate_prompt_tokens", "priority", "text_1"],
    RERANK: ["top_n", "max_tokens_per_doc", "truncate_prompt_tokens", "priority", "documents"],
    TOKENIZE: ["prompt", "add_special_tokens"],
    DETOKENIZE: ["tokens"],
}
MANY: list[tuple[str, dict[str, object]]] = [
    (MESSAGES, {"messages": HI * 200_000}),
    (MESSAGES, {"stop_sequences": ["a"] * MILLION}),
    (MESSAGES, {"system": [{"type": "text", "text": "a"}] * 200_000}),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": {"type": "object"}}] * 100_000}),
    (COUNT, {"messages": HI * 200_000}),
    (RESPONSES, {"tools": [{"type": "function", "name": "f"}] * 150_000}),
    (RESPONSES, {"include": ["x"] * MILLION}),
    (RESPONSES, {"metadata": {str(at): "" for at in range(500_000)}}),
    (TOKENIZE, {"prompt": None, "messages": HI * 200_000}),
    (TOKENIZE, {"prompt": "a" * 5 * MILLION}),
    (DETOKENIZE, {"tokens": [1] * MILLION}),
    (DETOKENIZE, {"tokens": [VOCAB]}),
    (EMBEDDINGS, {"input": [1] * MILLION}),
    (EMBEDDINGS, {"input": ["a"] * MILLION}),
    (EMBEDDINGS, {"input": [[1]] * MILLION}),
    (EMBEDDINGS, {"input": "a" * 5 * MILLION}),
    (SCORE, {"text_2": ["a"] * MILLION}),
    (SCORE, {"text_1": ["a"] * 400_000, "text_2": ["a"] * 400_000}),
    (RERANK, {"documents": ["a"] * MILLION}),
    (RERANK, {"documents": [{"text": ""}] * 400_000}),
    (RERANK, {"query": "a" * 5 * MILLION}),
]
DEEP = 100_000
Find = Callable[[str], Ward]


@pytest.fixture(scope="module")
def find(tiny: Tiny) -> Iterator[Find]:
    """The ward that a route belongs to: a server that generates, or one that embeds too."""
    with starting() as start:
        house = start("--engine", "echo", "--embedding-model", EMBEDDER).wait_ready()
        headers = {"authorization": f"Bearer {house.key}"}
        with httpx.Client(base_url=house.url, headers=headers, timeout=PATIENCE_S) as http:

            def embed() -> str:
                return http.post(EMBEDDINGS, json=SOUND[EMBEDDINGS]).json()["data"]

            def complete() -> str:
                return tiny.complete(max_tokens=2).json()["choices"][0]["text"]

            wards = (Ward(tiny.server, tiny.http, complete), Ward(house, http, embed))
            assert all(ward.engines for ward in wards)
            yield lambda route: wards[SOUND[route]["model"] == EMBEDDER]
            for ward in wards:
                ward.check()


@pytest.mark.parametrize("route", NUMERIC)
def test_no_number_harms(find: Find, route: str) -> None:
    ward = find(route)
    for field in NUMERIC[route]:
        for value in NUMBERS:
            name, _, inner = field.partition(".")
            given = {"type": "enabled", inner: value} if inner else value
            body = json.dumps(SOUND[route] | {name: given}).encode()
            unread = b"NaN" in body or b"Infinity" in body
            ward.send(route, body, *((400,) if unread else (200, 400)))


@pytest.mark.parametrize(("route", "fields"), MANY, ids=[f"{at}-{MANY[at][0]}" for at in range(21)])
def test_a_million_of_anything_is_refused(
    find: Find, route: str, fields: dict[str, object]
) -> None:
    find(route).refuse(route, SOUND[route] | fields)


@pytest.mark.parametrize("route", SOUND)
def test_what_is_nested_deep_or_is_no_utf8_is_refused(find: Find, route: str) -> None:
    ward = find(route)
    head = json.dumps(SOUND[route]).encode()[:-1]
    arrays, objects = b"[" * DEEP + b"]" * DEEP, b'{"a":' * DEEP + b"1" + b"}" * DEEP
    ward.send(route, arrays, 400)
    for field in ("unknown", "model", "metadata", *SOUND[route]):
        for deep in (arrays, objects):
            ward.send(route, head + b',"%b":%b}' % (field.encode(), deep), 400)
    for bad in (b"\xff", b"\xed\xa0\x80", b"\xe2\x82"):
        for tail in (b',"user":"%b"}', b',"%b":1}', b',"metadata":{"a":"%b"}}'):
            ward.send(route, head + tail % bad, 400)
