"""Bad input: each is a 4xx in the envelope that names the field, and harms no later request."""

import json
import threading
from collections.abc import Iterator

import httpx
import pytest
from forebay_gateway.api.openai import completions
from forebay_shared.errors import RateLimitError
from forebay_shared.models import CAP_GENERATE
from forebay_shared.settings import GatewaySettings
from gateway_fakes import MODEL, Api, Play, ScriptedBackend, running_api
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transcripts import check_answer, check_error

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LIMIT = 100_000
JSON = {"content-type": "application/json"}
SECRET = "zebra-canary-7431"


@pytest.fixture(scope="module")
def server() -> Iterator[Api]:
    with running_api(settings=GatewaySettings(max_body_bytes=LIMIT)) as api:
        yield api


@pytest.fixture
def api(server: Api) -> Iterator[Api]:
    server.reset()
    yield server
    check_answer(server.chat().content, model=MODEL)  # the canary


def refused(response: httpx.Response, status: int, param: str | None = None) -> dict:
    assert response.status_code == status, response.text
    error = check_error(
        response.content, status=status, content_type=response.headers["content-type"]
    )
    assert "location" not in response.headers
    assert response.headers["x-request-id"]
    if param is not None:
        assert (error["param"] or "").split("[")[0].split(".")[0] == param
    return error


POISON = [0, -1, 2**31, 2**63, 2**64, 1e308, -1e308, 1e-320, "x", True, [], {}, [1], 1.5]
# Per field the values that are right, with their type: 0 and False are not the same here.
BOUNDS = {
    "n": set(),
    "max_tokens": set(),
    "max_completion_tokens": set(),
    "min_tokens": {0},
    "temperature": {0, 1e-320, 1.5},
    "top_p": {0, 1e-320},
    "top_k": {0, -1},
    "min_p": {0, 1e-320},
    "presence_penalty": {0, -1, 1e-320, 1.5},
    "frequency_penalty": {0, -1, 1e-320, 1.5},
    "repetition_penalty": {1.5},
    "top_logprobs": {0},
    "seed": {0, -1, 2**31, 2**63},
    "priority": {0, -1},
    "best_of": set(),
    "stop_token_ids": set(),
    "allowed_token_ids": set(),
    "truncate_prompt_tokens": {-1},
    "prompt_logprobs": set(),
    "logit_bias": set(),
    "stream": {True},
    "ignore_eos": {True},
    "logprobs": {True},
    "messages": set(),
}
ALLOWED_OTHERS = {"stop_token_ids": [[], [1]], "allowed_token_ids": [[1]], "logit_bias": [{}]}


@pytest.mark.parametrize("field", BOUNDS)
def test_a_poisonous_value_is_refused_by_the_fields_name(api: Api, field: str) -> None:
    good = {(type(value), value) for value in BOUNDS[field]}
    others = ALLOWED_OTHERS.get(field, [])
    for value in POISON:
        hashable = not isinstance(value, list | dict)
        response = api.chat(**{field: value})
        if (hashable and (type(value), value) in good) or value in others:
            assert response.status_code == 200, (field, value, response.text)
        else:
            refused(response, 400, field)


USER = {"role": "user", "content": "x"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
UNSUPPORTED = {
    "tools": [{"type": "custom", "custom": {"name": "f"}}],
    "tool_choice": "required",
    "functions": [{"name": "a b"}],
    "function_call": {"name": "f"},
    "response_format": {"type": "json_object"},
    "structured_outputs": {"regex": "a"},
    "chat_template": "x",
    "modalities": ["text", "audio"],
    "prompt_logprobs": 1,
    "best_of": 2,
}


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_a_field_that_would_change_the_answer_is_never_ignored(api: Api, field: str) -> None:
    refused(api.chat(**{field: UNSUPPORTED[field]}), 400, field)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": "a", "prefix": True}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": "a", "audio": {"id": "x"}}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages"),
        ({"messages": [{"role": "tool", "tool_call_id": None, "content": "x"}]}, "messages"),
        ({"messages": [USER | {"tool_calls": [CALL]}]}, "messages"),
        ({"messages": [USER | {"function_call": CALL["function"]}]}, "messages"),
        ({"messages": [{"role": "user", "content": None, "refusal": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 60_000}]}, "messages"),
        ({"stream_options": {"include_usage": 1}}, "stream_options"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "x" * 2000}, "stop"),
        ({"stop_token_ids": [9_999_999]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1, "01": -1}}, "logit_bias"),
        ({"logit_bias": {"9999999": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1000}}, "logit_bias"),
        ({"seed": "abc"}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
        ({"bad_words": ["x" * 257]}, "bad_words"),
        ({"allowed_token_ids": [10**7]}, "allowed_token_ids"),
        ({"truncate_prompt_tokens": 513}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"documents": ["x"]}, "documents"),
        ({"include_reasoning": False, "logprobs": True}, "include_reasoning"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "a\0b"}, "cache_salt"),
        ({"cache_salt": "x" * 200}, "cache_salt"),
        ({"min_tokens": 5, "max_tokens": 2}, "min_tokens"),
        ({"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {str(i): 1 for i in range(40)}}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"response_format": {"type": "nope"}}, "response_format"),
        ({"response_format": False}, "response_format"),
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
    ],
)
def test_what_cannot_be_served_is_a_400_that_names_the_field(
    api: Api, fields: dict, param: str
) -> None:
    for stream in (False, True):
        refused(api.chat(stream=stream, **fields), 400, param)


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [""],
        [[]],
        [[], [1]],
        [1, "a"],
        [[1], "a"],
        [-1],
        [10**6],
        [True],
        [[1.5]],
        ["a"] * 300,
    ],
)
def test_a_prompt_that_is_none_is_a_400(api: Api, prompt: object) -> None:
    refused(api.complete(prompt=prompt), 400, "prompt")


def test_stream_options_without_stream_are_refused(api: Api) -> None:
    for stream in (False, None):
        refused(api.chat(stream=stream, stream_options={"include_usage": True}), 400)
        refused(api.complete(stream=stream, stream_options={}), 400, "stream_options")


def test_completions_refuse_what_they_do_not_do(api: Api) -> None:
    refused(api.complete(suffix="x"), 400, "suffix")
    refused(api.complete(echo=True, logprobs=1), 400, "logprobs")
    refused(api.complete(logprobs=21), 400, "logprobs")
    refused(api.complete(max_tokens=0), 400, "max_tokens")
    refused(api.complete(response_format={"type": "json_schema"}), 400, "response_format")


def test_an_overlong_prompt_says_by_how_much_and_carries_the_machine_code(api: Api) -> None:
    for ask, param in ((api.chat, "messages"), (api.complete, "prompt")):
        text = "a b " * 300
        fields = {"prompt": text}
        if param == "messages":
            fields = {"messages": [{"role": "user", "content": text}]}
        error = refused(ask(**fields), 400, param)
        assert error["code"] == "context_length_exceeded"
        tokens = len(api.backend.tokenizer.encode(text, add_special_tokens=False).ids)
        assert "maximum context length is 512 tokens" in error["message"]
        found = int(error["message"].split("resulted in ")[1].split(" tokens")[0])
        assert tokens <= found <= tokens + 30


def test_what_is_too_long_to_fit_is_refused_before_it_is_looked_at(api: Api) -> None:
    for answer, param in (
        (api.chat(messages=[{"role": "nobody", "content": ""}] * 512), "messages"),
        (api.complete(prompt=[2**31 - 1] * 512), "prompt"),
    ):
        assert refused(answer, 400, param)["code"] == "context_length_exceeded"


def test_a_long_list_of_ids_is_not_sorted_out_on_the_event_loop(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    split = completions._split_prompts

    def noted(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
        threads.append(threading.current_thread().name)
        return split(prompt)

    monkeypatch.setattr(completions, "_split_prompts", noted)
    refused(api.complete(prompt=[1] * 10_000), 400, "prompt")
    assert threads[0].startswith("prompt")


def test_what_the_engine_cannot_do_is_refused_by_name() -> None:
    backend = ScriptedBackend(capabilities=frozenset({CAP_GENERATE}))
    with running_api(backend) as api:
        for field, value in (
            ("logprobs", True),
            ("presence_penalty", 1),
            ("repetition_penalty", 1.1),
            ("logit_bias", {"1": 1}),
        ):
            refused(api.chat(**{field: value}), 400, field)
        assert api.chat(presence_penalty=0, repetition_penalty=1, logit_bias={}).is_success


RAW = [
    b"",
    b"[]",
    b"true",
    b"123",
    b'"x"',
    b"null",
    b"{",
    b"\xff\xfe",
    b"\xef\xbb\xbf{}",
    b'{"model":NaN}',
    b'{"model":"m","temperature":Infinity}',
    b"{}{}",
    b'{"a":' + b"[" * 90_000,
    b'{"messages":' + b'[{"content":' * 5_000,
    b'{"model":"scripted","messages":[{"role":"user","content":"\\ud800"}]}',
    b'{"model":"scripted","messages":[{"role":"user","content":"x","name":"\\udfff"}]}',
    b'{"model":"scripted","user":"\\ud800","messages":[{"role":"user","content":"x"}]}',
    b'{"model":"scripted","messages":[{"role":"user","content":"\xed\xa0\x80"}]}',
    b'{"model":"scripted","messages":[{"role":"user","content":"x"}],"temperature":1e999}',
    b'{"model":"scripted","messages":[{"role":"user","content":"x"}],"unknown":"\xff"}',
    b'{"model":"scripted","messages":[{"role":"user","content":"x"}],"\xc3\x28":1}',
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("body", RAW, ids=lambda body: repr(body[:60]))
def test_a_body_that_is_no_json_object_is_a_400(api: Api, path: str, body: bytes) -> None:
    refused(api.http.post(path, content=body, headers=JSON), 400)


def test_a_body_that_is_no_json_is_told_where_without_what_stands_there(api: Api) -> None:
    for body, place in (
        (b'{"model": "secret\n"}', 17),
        (b'{"model": "a",}', 14),
        (b"{'model': 1}", 1),
        (b'{"model": "\xff"}', 11),
    ):
        headers = {"content-type": "application/json"}
        answer = api.http.post("/v1/chat/completions", content=body, headers=headers)
        assert answer.status_code == 400
        message = check_error(answer.content)["message"]
        assert message == f"The body is not valid JSON in UTF-8: see byte {place}."


@pytest.mark.parametrize(
    "rest",
    [
        b'"' + b'\\"' * 45_000,
        b"1" * 90_000,
        b"1." + b"0" * 90_000 + b"5}",
        b"0.0" * 30_000,
        b"-" * 90_000,
    ],
    ids=["a string without an end", "digits", "noughts", "numbers", "signs"],
)
def test_no_body_takes_longer_than_its_length_to_look_for_whole_numbers(
    api: Api, rest: bytes
) -> None:
    """Each took up to a minute, or ran out of stack, when parts of it were looked at many times."""
    body = b'{"max_tokens": 1.5, "unknown": ' + rest
    refused(api.http.post(CHAT, content=body, headers=JSON), 400, "max_tokens")


def test_thousands_of_bad_items_give_one_small_error_without_the_input(api: Api) -> None:
    bad = [{"role": SECRET, "content": {SECRET: 1}}] * 1000
    response = api.chat(messages=bad)
    refused(response, 400, "messages")
    for fields in ({"model": SECRET}, {"stop": {SECRET: 1}}, {SECRET: 1, "n": SECRET}):
        assert SECRET not in api.chat(**fields).text or fields.get("model") == SECRET


@pytest.mark.parametrize("content_type", [None, "text/plain", "multipart/form-data", "x" * 10_000])
def test_a_body_that_is_not_declared_as_json_is_a_415(api: Api, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    refused(api.http.post(CHAT, content=b"{}", headers=headers), 415)
    refused(api.http.post(CHAT, content=b"x", headers=JSON | {"content-encoding": "gzip"}), 415)
    sent = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x"}]})
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert api.http.post(CHAT, content=sent, headers=headers).is_success
    headers["content-encoding"] = ""  # as some proxies leave it behind
    assert api.http.post(CHAT, content=sent, headers=headers).is_success


def test_a_body_above_the_limit_is_a_413_declared_or_chunked(api: Api) -> None:
    def chunks() -> Iterator[bytes]:
        yield from [b'{"model":"' + b"x" * 1000] * (LIMIT // 1000 + 1)

    refused(api.http.post(CHAT, content=b"x" * (LIMIT + 1), headers=JSON), 413)
    refused(api.http.post(CHAT, content=chunks(), headers=JSON), 413)
    exact = json.dumps({"model": "m", "user": ""}).encode()
    exact = exact[:-2] + b"x" * (LIMIT - len(exact)) + exact[-2:]
    refused(api.http.post(CHAT, content=exact, headers=JSON), 400, "messages")


def test_an_unknown_model_is_a_404_that_says_so(api: Api) -> None:
    for model in ("gpt-9", "", "../../etc/passwd", "x" * 50_000, "org/scripted/", "😀"):
        error = refused(api.chat(model=model), 404, "model")
        assert error["code"] == "model_not_found"
        assert f"'{model[:100]}'" in error["message"]
    refused(api.http.get("/v1/models/gpt-9"), 404)
    refused(api.http.get("/v1/models/%2e%2e%2fetc%2fpasswd"), 404)


def test_no_worker_is_a_503_that_asks_to_come_back(api: Api) -> None:
    api.backend.ready = api.backend.known = False
    for response in (api.chat(), api.complete(stream=True), api.http.get("/ready")):
        assert refused(response, 503)["code"] == "no_worker"
        assert int(response.headers["retry-after"]) >= 1
        assert "x-should-retry" not in response.headers
    assert api.http.get("/health").is_success
    assert api.http.get("/v1/models").json() == {"data": [], "object": "list"}
    catalogue = api.http.get("/v1/models?client_version=0.150.0").json()  # as Codex asks
    assert catalogue == {"data": [], "object": "list", "models": []}
    api.reset()


@pytest.mark.parametrize(("wait_s", "again"), [(None, True), (60.0, True), (3600.0, False)])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"])
def test_who_would_have_to_wait_longer_than_an_sdk_does_is_not_to_retry(
    api: Api, path: str, wait_s: float | None, again: bool
) -> None:
    error = RateLimitError("The budget of this day is spent.", retry_after_s=wait_s)
    api.backend.script = lambda job, index: Play([], error=error)
    body = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    if path == "/v1/completions":
        body = {"model": MODEL, "prompt": "hi"}
    if path == "/v1/responses":
        body = {"model": MODEL, "input": "hi", "store": False}
    for stream in (False, True):
        response = api.http.post(path, json={**body, "stream": stream})
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) == (wait_s or 1)
        assert ("x-should-retry" not in response.headers) == again
    api.reset()


def test_more_open_requests_than_allowed_get_a_503_and_health_still_answers() -> None:
    backend = ScriptedBackend()
    with running_api(backend, GatewaySettings(max_concurrent_requests=1)) as api:
        api.reset()
        backend.script = lambda job, index: Play(backend.answer, hang_after=1)
        body = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "x"}]}
        with api.http.stream("POST", CHAT, json=body):
            assert refused(api.chat(), 503)["code"] == "overloaded"
            assert api.http.get("/health").is_success
            assert api.http.get("/ready").is_success


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
FIELDS = [
    "model",
    "messages",
    "prompt",
    "n",
    "stop",
    "stream",
    "temperature",
    "logit_bias",
    "tools",
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@given(
    body=st.one_of(
        st.binary(max_size=200),
        JUNK.map(lambda junk: json.dumps(junk).encode()),
        st.dictionaries(st.sampled_from(FIELDS), JUNK).map(
            lambda junk: json.dumps({"model": MODEL} | junk).encode()
        ),
    )
)
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_body_gets_an_answer_or_a_400_or_404(api: Api, path: str, body: bytes) -> None:
    response = api.http.post(path, content=body, headers=JSON)
    if response.status_code != 200:
        assert response.status_code in (400, 404), response.text
        refused(response, response.status_code)


PATHS = ["/", "/v1", CHAT, TEXT, "/v1/models", f"/v1/models/{MODEL}", "/health", "/ready"]
PATHS += [
    "/version",
    "/metrics",
    "/docs",
    "/schema",
    "/openapi.json",
    "/v1/nope",
    "/%00",
    "/a" * 50,
]


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "TRACE"])
def test_every_path_and_method_answers_in_json_or_not_at_all(api: Api, method: str) -> None:
    for path in PATHS:
        for tail in ("", "/"):
            response = api.http.request(method, path + tail)
            if response.status_code < 400:
                continue
            assert response.status_code in (400, 404, 405, 415), (path, response.status_code)
            if response.status_code == 405:
                assert response.headers["allow"], path
            if method != "HEAD":
                refused(response, response.status_code)
