"""Embeddings, scores and rankings over HTTP, from two echo models behind one gateway."""

import base64
import math
import operator
from array import array
from collections.abc import Iterator

import httpx
import pytest
from patience import PATIENCE_S
from serve_house import Serve, starting, until

pytestmark = pytest.mark.system

SIZE = 32
MODEL = "echo-embed"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[Serve]:
    with starting() as start:
        yield start("--engine", "echo", "--embedding-model", MODEL).wait_ready()


@pytest.fixture(scope="module")
def http(server: Serve) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {server.key}"}
    url = server.url.removesuffix("/v1")
    with httpx.Client(base_url=url, headers=headers, timeout=PATIENCE_S) as client:
        yield client


def post(http: httpx.Client, path: str = "/v1/embeddings", **fields: object) -> httpx.Response:
    return http.post(path, json={"model": MODEL, **fields})


def embed(http: httpx.Client, input_: object, **fields: object) -> list[list[float]]:
    response = post(http, input=input_, **fields)
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    return [item["embedding"] for item in data]


def counted(text: str, size: int = SIZE) -> list[float]:
    """What the echo engine makes of ASCII: how often each of its ids comes, in length 1."""
    counts = [0.0] * SIZE
    for char in text:  # printable ASCII has the ids from 0 on, in its order
        counts[(ord(char) - 33) % SIZE] += 1
    length = math.hypot(*counts[:size])
    return [count / length for count in counts[:size]]


def test_all_four_forms_of_input_give_their_vectors(http: httpx.Client) -> None:
    assert embed(http, "abc")[0] == pytest.approx(counted("abc"))
    assert embed(http, ["abc", "d"])[1] == pytest.approx(counted("d"))
    ids = [ord(char) - 33 for char in "abc"]
    assert embed(http, ids) == embed(http, "abc")
    assert embed(http, [ids, [1]])[0] == embed(http, "abc")[0]


def test_the_sdk_gets_floats_and_base64_alike(server: Serve) -> None:
    with server.client() as client:
        default = client.embeddings.create(model=MODEL, input=["abc", "de"])  # asks for base64
        floats = client.embeddings.create(
            model=MODEL, input=["abc", "de"], encoding_format="float", user="u", dimensions=8
        )
    assert default.data[1].embedding == pytest.approx(counted("de"))
    assert floats.data[0].embedding == pytest.approx(counted("abc", 8))
    assert (default.object, default.model, default.data[0].object) == ("list", MODEL, "embedding")
    assert (default.usage.prompt_tokens, default.usage.total_tokens) == (5, 5)


def test_base64_is_little_endian_float32(http: httpx.Client) -> None:
    packed = base64.b64decode(embed(http, "abc", encoding_format="base64")[0])
    assert array("f", packed).tolist() == pytest.approx(counted("abc"))


def test_many_inputs_are_split_and_put_together_in_order(http: httpx.Client) -> None:
    texts = [chr(33 + at % 90) * (1 + at % 50) for at in range(2048)]
    found = embed(http, texts)
    assert len(found) == 2048
    for at in (0, 63, 64, 1000, 2047):
        assert found[at] == pytest.approx(counted(texts[at]))


def test_a_long_input_is_refused_or_cut(http: httpx.Client) -> None:
    long = "a" * 40_000 + "b" * 10
    refused = post(http, input=["x", long])
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "input[1]"
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert embed(http, long, truncate_prompt_tokens=-1)[0] == pytest.approx(counted("a"))
    cut = embed(http, "aabb", truncate_prompt_tokens=2, truncation_side="left")
    assert cut[0] == pytest.approx(counted("b"))
    assert embed(http, [64, 64, 65, 65], truncate_prompt_tokens=2)[0] == pytest.approx(counted("a"))


POISON = [
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": ["a", ""]}, "input[1]"),
    ({"input": [[]]}, "input[0]"),
    ({"input": None}, "input"),
    ({}, "input"),
    ({"input": ["a", 1]}, "input"),
    ({"input": [10**6]}, "input"),
    ({"input": [-1]}, "input"),
    ({"input": [2**63]}, "input"),
    ({"input": [[1], [2**40]]}, "input[1][0]"),
    ({"input": ["a"] * 2049}, "input"),
    ({"input": [1] * 1_000_000}, "input"),
    ({"input": [[1] * 32_000] * 17}, "input"),
    ({"input": {"text": "a"}}, "input"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "dimensions": -1}, "dimensions"),
    ({"input": "a", "dimensions": 33}, "dimensions"),
    ({"input": "a", "dimensions": 2**31}, "dimensions"),
    ({"input": "a", "dimensions": 1.5}, "dimensions"),
    ({"input": "a", "encoding_format": "bytes"}, "encoding_format"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"input": "a", "truncate_prompt_tokens": 40_000}, "truncate_prompt_tokens"),
    ({"input": "a", "truncation_side": "middle"}, "truncation_side"),
    ({"input": "a", "priority": 2**31}, "priority"),
    ({"input": "a", "messages": []}, "messages"),
    ({"input": "a", "normalize": False}, "normalize"),
    ({"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
    ({"input": "a", "model": 7}, "model"),
]


@pytest.mark.parametrize(("fields", "param"), POISON)
def test_what_is_wrong_is_refused_by_name(
    http: httpx.Client, fields: dict[str, object], param: str
) -> None:
    response = post(http, **fields)
    assert response.status_code == 400, response.text[:300]
    error = response.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert embed(http, "a")  # the canary


def test_each_model_says_what_it_cannot_do(http: httpx.Client, server: Serve) -> None:
    models = {each["id"]: each["capabilities"] for each in http.get("/v1/models").json()["data"]}
    assert models[MODEL] == ["embed"]
    assert "generate" in models[server.model]
    for path, fields in (("chat/completions", CHAT), ("completions", {"prompt": "a"})):
        response = post(http, f"/v1/{path}", **fields)
        assert response.status_code == 400
        assert "/v1/embeddings" in response.json()["error"]["message"]
        assert response.json()["error"]["param"] == "model"
        assert http.post(f"/v1/{path}", json={"model": "echo"} | fields).status_code == 200
    unknown = post(http, model="nope", input="a")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


def test_scores_are_cosines(http: httpx.Client) -> None:
    for path in ("/score", "/v1/score"):
        answer = post(http, path, text_1="ab", text_2=["ab", "a", "c"]).json()
        scores = [item["score"] for item in answer["data"]]
        assert scores == pytest.approx([1, math.sqrt(0.5), 0], abs=1e-6)
        assert answer["usage"] == {"prompt_tokens": 6, "total_tokens": 6}
    pairs = post(http, "/score", queries=["a", "b"], documents=["a", "a"]).json()
    assert [item["score"] for item in pairs["data"]] == pytest.approx([1, 0])
    same = post(http, "/score", text_1="abcde", text_2=["abcde"] * 2 + ["aabbccdde"]).json()["data"]
    assert max(item["score"] for item in same) <= 1, "rounding makes no more of it"
    for fields, param in (
        ({"text_1": ["a", "b"], "text_2": ["a"]}, "text_1"),
        ({"text_1": "a"}, "text_1"),
        ({"text_1": "a", "text_2": []}, "text_2"),
        ({"text_1": "a", "text_2": ["a", ""]}, "text_2[1]"),
    ):
        refused = post(http, "/score", **fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_a_ranking_puts_the_nearest_first(http: httpx.Client, path: str) -> None:
    documents = ["c", {"text": "ab"}, "a"]
    answer = post(http, path, query="ab", documents=documents, top_n=2).json()
    assert [item["index"] for item in answer["results"]] == [1, 2]
    assert answer["results"][0]["relevance_score"] == pytest.approx(1)
    shown = [item.get("document") for item in answer["results"]]
    assert shown == ([None] * 2 if path == "/v2/rerank" else [{"text": "ab"}, {"text": "a"}])
    every = post(http, path, query="ab", documents=documents, return_documents=False).json()
    assert len(every["results"]) == 3
    assert "document" not in every["results"][0]
    assert every["usage"]["total_tokens"] == 6
    cut = post(http, path, query="a", documents=["ab"], max_tokens_per_doc=1).json()
    assert cut["results"][0]["relevance_score"] == pytest.approx(1)
    for fields, param in (
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": ["a", ""]}, "documents[1]"),
        ({"query": "a", "documents": ["a"] * 2048}, "documents"),
        ({"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        ({"query": "a", "documents": ["a"], "rank_fields": ["x"]}, "rank_fields"),
    ):
        refused = post(http, path, **fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), fields


def test_a_real_model_ranks_by_meaning() -> None:
    with starting() as start:
        server = start("minilm").wait_ready()
        assert server.model == "all-minilm-l6-v2"
        with server.client() as client:
            texts = ["A cat sleeps.", "A kitten naps.", "The bank raised its rates."]
            answer = client.embeddings.create(model=server.model, input=texts)
            cat, kitten, bank = (item.embedding for item in answer.data)
            near = sum(map(operator.mul, cat, kitten))
            far = sum(map(operator.mul, cat, bank))
        assert near > 0.5 > far
        assert answer.usage.total_tokens == 21


def test_what_was_made_is_counted(http: httpx.Client, server: Serve) -> None:
    before = server.metric("forebay_embedded_inputs_total")
    embed(http, ["a", "b"])
    until(lambda: server.metric("forebay_embedded_inputs_total") == before + 2)
    assert 'route="embeddings"' in http.get("/metrics").text
