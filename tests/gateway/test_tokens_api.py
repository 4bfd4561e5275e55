"""/tokenize and /detokenize over real HTTP, and the small routes beside them."""

from collections.abc import Iterator

import httpx
import pytest
from gateway_fakes import ANSWER, MODEL, Api, running_api, wait_until
from transcripts import check_error

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Api]:
    with running_api() as api:
        yield api


@pytest.fixture
def api(server: Api) -> Api:
    server.reset()
    return server


def tokenized(api: Api, **fields: object) -> dict:
    response = api.http.post("/tokenize", json=fields)
    assert response.status_code == 200, response.text
    found = response.json()
    assert set(found) == {"count", "max_model_len", "tokens", "token_strs"}
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == 512
    return found


def refused(response: httpx.Response, param: str) -> None:
    assert response.status_code == 400, response.text
    assert (check_error(response.content)["param"] or "").startswith(param)


@pytest.mark.parametrize("prefix", ["", "/v1"])
@pytest.mark.parametrize("text", ["", "hi", ANSWER, "<|im_start|>user\n你好<|im_end|>"])
def test_a_text_comes_back_from_its_ids(api: Api, text: str, prefix: str) -> None:
    body = {"model": MODEL, "prompt": text}
    tokens = api.http.post(f"{prefix}/tokenize", json=body).json()["tokens"]
    body = {"model": MODEL, "tokens": tokens}
    assert api.http.post(f"{prefix}/detokenize", json=body).json() == {"prompt": text}


def test_the_ids_of_messages_are_those_of_a_chat_with_them(api: Api) -> None:
    found = tokenized(api, messages=HI, return_token_strs=True)
    api.chat(messages=HI)
    assert found["tokens"] == list(api.backend.jobs[-1].prompt)
    names = [api.backend.tokenizer.id_to_token(token_id) for token_id in found["tokens"]]
    assert found["token_strs"] == names
    begun = [*HI, {"role": "assistant", "content": "yo"}]
    api.chat(messages=begun, continue_final_message=True)
    continued = tokenized(api, messages=begun, continue_final_message=True)
    assert continued["tokens"] == list(api.backend.jobs[-1].prompt)
    shorter = tokenized(api, messages=HI, add_generation_prompt=False)["tokens"]
    assert found["tokens"][: len(shorter)] == shorter != found["tokens"]


def test_tools_and_template_values_count(api: Api) -> None:
    tool = {"type": "function", "function": {"name": "weather"}}
    assert tokenized(api, messages=HI, tools=[tool])["count"] > tokenized(api, messages=HI)["count"]
    tokenized(api, messages=HI, chat_template_kwargs={"x": 1})


def test_the_model_may_be_left_out_where_only_one_is_served(api: Api) -> None:
    assert tokenized(api, prompt="hi") == tokenized(api, prompt="hi", model="scripted")
    assert api.http.post("/tokenize", json={"prompt": "x", "model": "gpt"}).status_code == 404
    api.backend.known = api.backend.ready = False
    assert api.http.post("/tokenize", json={"prompt": "x"}).status_code == 503


def test_more_than_the_context_holds_can_be_counted(api: Api) -> None:
    assert tokenized(api, prompt="a b " * 2000)["count"] > 512


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HI}, "prompt"),
        ("/tokenize", {"prompt": [1]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "x", "content": ""}]}, "messages[0].role"),
        ("/tokenize", {"messages": HI, "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"prompt": "x" * 2_000_000}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [2**63]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 300_000}, "tokens"),
    ],
)
def test_what_is_no_text_or_no_ids_is_refused_by_name(
    api: Api, path: str, body: dict, param: str
) -> None:
    refused(api.http.post(path, json=body), param)


def test_ping_and_load_are_there_for_balancers(api: Api) -> None:
    assert api.http.get("/ping").status_code == 200
    wait_until(lambda: api.http.get("/load").json() == {"server_load": 1}, "only the asking itself")
