"""Errors under /v1/messages have Anthropic's form, found by edge, router or parser."""

import json
from collections.abc import Iterator

import pytest
from forebay_gateway.api.anthropic.errors import envelope, status
from forebay_gateway.api.decoding import decode
from forebay_gateway.api.dialects import speaks_anthropic
from forebay_gateway.api.openai.schema import ChatRequest, CompletionRequest
from forebay_gateway.api.responses.schema import ResponsesRequest
from forebay_shared import errors
from forebay_shared.settings import GatewaySettings, Secret
from gateway_fakes import Api, exchange, request_bytes, running_api
from msgspec.json import Decoder
from transcripts import check_error

KEY = {"x-api-key": "sk-test"}
JSON = {"content-type": "application/json"}
PATHS = ["/v1/messages", "/v1/messages/count_tokens", "//v1//messages/", "/v1/messages/nope"]


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    settings = GatewaySettings(api_key=(Secret("sk-test"),), max_body_bytes=2048)
    with running_api(settings=settings) as api:
        yield api


def check_anthropic_error(head: bytes, body: bytes, type_: str) -> None:
    assert b"content-type: application/json" in head
    found = json.loads(body)
    assert set(found) == {"type", "error", "request_id"}
    assert found["type"] == "error"
    assert set(found["error"]) == {"type", "message"}
    assert found["error"]["type"] == type_
    assert found["error"]["message"]
    assert b"x-request-id: " + found["request_id"].encode() in head


@pytest.mark.parametrize("path", PATHS)
def test_edge_router_and_parser_answer_in_the_dialect_of_the_path(api: Api, path: str) -> None:
    cases = [
        (request_bytes("POST", path, {}), 401, "authentication_error"),
        (request_bytes("PUT", "/v1/messages/x", KEY), 404, "not_found_error"),
        (request_bytes("POST", path, KEY | {"x-long": "x" * 70_000}), 431, "invalid_request_error"),
        (request_bytes("POST", path, KEY | {"bad header": "x"}), 400, "invalid_request_error"),
    ]
    for sent, expected, type_ in cases:
        found, head, body = exchange(api.url, sent)
        assert found == expected
        check_anthropic_error(head, body, type_)


@pytest.mark.parametrize(
    ("method", "path", "sent", "expected", "type_"),
    [
        ("GET", "/v1/models", {}, 401, "authentication_error"),
        ("GET", "//v1//models", {}, 401, "authentication_error"),
        ("GET", "/v1/models/nope", KEY, 404, "not_found_error"),
        ("POST", "/v1/models", KEY, 405, "invalid_request_error"),
        ("GET", "/v1/models", KEY | {"x-long": "x" * 70_000}, 431, "invalid_request_error"),
        ("POST", "/v1/files", KEY, 404, "not_found_error"),
    ],
)
def test_where_both_dialects_have_the_path_a_header_says_which(
    api: Api, method: str, path: str, sent: dict[str, str], expected: int, type_: str
) -> None:
    version = {"anthropic-version": "2023-06-01"}
    found, head, body = exchange(api.url, request_bytes(method, path, version | sent))
    assert found == expected
    check_anthropic_error(head, body, type_)
    assert expected == 431 or b"\r\nrequest-id: " in head
    found, _, body = exchange(api.url, request_bytes(method, path, sent))
    assert found == expected
    check_error(body)


def test_the_request_id_has_the_name_that_the_sdk_looks_for(api: Api) -> None:
    sent = request_bytes("POST", "/v1/messages", {"x-request-id": "mine"})
    _, head, _ = exchange(api.url, sent)
    assert b"\r\nrequest-id: mine\r\n" in head
    assert b"\r\nx-request-id: mine\r\n" in head


@pytest.mark.parametrize(
    ("path", "speaks"),
    [
        *((path, True) for path in PATHS),
        ("/v1/messagesx", False),
        ("/v1/chat/completions", False),
        ("/x/v1/messages", False),
        ("/v1/models", False),
    ],
)
def test_only_paths_below_messages_speak_it(path: str, speaks: bool) -> None:
    assert speaks_anthropic(path) == speaks
    version = [(b"anthropic-version", b"2023-06-01")]
    assert speaks_anthropic(path, version) == (speaks or path == "/v1/models")


@pytest.mark.parametrize(
    ("error", "code", "type_"),
    [
        (errors.InvalidRequestError("x"), 400, "invalid_request_error"),
        (errors.AuthenticationError("x"), 401, "authentication_error"),
        (errors.PermissionDeniedError("x"), 403, "permission_error"),
        (errors.ModelNotFoundError("x"), 404, "not_found_error"),
        (errors.MethodNotAllowedError("x"), 405, "invalid_request_error"),
        (errors.PayloadTooLargeError("x"), 413, "request_too_large"),
        (errors.MediaTypeError("x"), 415, "invalid_request_error"),
        (errors.RateLimitError("x"), 429, "rate_limit_error"),
        (errors.EngineError("x"), 500, "api_error"),
        (errors.OverloadedError("x"), 529, "overloaded_error"),
        (errors.NoWorkerError("x"), 529, "overloaded_error"),
        (errors.DeadlineError("x"), 504, "timeout_error"),
    ],
)
def test_every_error_has_a_status_and_a_type(
    error: errors.ForebayError, code: int, type_: str
) -> None:
    assert status(error) == code
    assert json.loads(envelope(error, None))["error"] == {"type": type_, "message": "x"}


@pytest.mark.parametrize(
    ("param", "renamed"),
    [
        ("stop", "stop_sequences"),
        ("response_format.json_schema.schema", "output_config.format.schema"),
        ("response_format", "output_config.format"),
        ("tools[2].function.parameters", "tools[2].input_schema"),
        ("tools[2].function.name", "tools[2].name"),
        ("tool_choice.function.name", "tool_choice.name"),
        ("messages[1].content", "messages[1].content"),
    ],
)
def test_a_message_speaks_of_the_fields_that_the_client_sent(param: str, renamed: str) -> None:
    error = errors.InvalidRequestError(f"{param} must be good.", param=param)
    assert json.loads(envelope(error, None))["error"]["message"] == f"{renamed} must be good."


def test_a_byte_order_mark_is_left_out_once() -> None:
    decoder, mark = Decoder(CompletionRequest), b"\xef\xbb\xbf"
    body = b'{"model":"m","prompt":"\xef\xbb\xbfx"}'
    assert decode(decoder, mark + body).prompt == "\ufeffx"
    with pytest.raises(errors.InvalidRequestError):
        decode(decoder, mark + mark + body)


def test_of_a_key_that_comes_twice_the_last_one_counts() -> None:
    body = b'{"model":"m","prompt":"a","prompt":"b"}'
    assert decode(Decoder(CompletionRequest), body).prompt == "b"


@pytest.mark.parametrize(
    ("kind", "fields", "param", "message"),
    [
        (
            ChatRequest,
            {"verbosity": "mute"},
            "verbosity",
            "verbosity must be one of high, low, medium.",
        ),
        (
            ResponsesRequest,
            {"tool_choice": {"type": "function", "mode": "x"}},
            "tool_choice.mode",
            "tool_choice.mode must be one of auto, required.",
        ),
        (
            ResponsesRequest,
            {"metadata": {"a": 1}},
            "metadata",
            "Each value of metadata must be a string.",
        ),
        (
            ChatRequest,
            {"logit_bias": {"5": 101}},
            "logit_bias",
            "Each value of logit_bias must be a number at most 100.0.",
        ),
        (
            ResponsesRequest,
            {"user": "u" * 1000},
            "user",
            "user must have at most 512 characters.",
        ),
        (
            ResponsesRequest,
            {"text": {"format": {"type": "json_schema", "name": "a b"}}},
            "text.format.name",
            "text.format.name must be a string of the form [a-zA-Z0-9_-]{1,64}.",
        ),
        (ChatRequest, {"stop": ["a", 5]}, "stop[1]", "stop[1] must be a string."),
        (ChatRequest, {}, "messages", "messages is required."),
    ],
)
def test_an_error_says_what_would_be_right(
    kind: type, fields: dict[str, object], param: str, message: str
) -> None:
    needed = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "input": "hi"}
    body = json.dumps((needed if fields else {"model": "m"}) | fields).encode()
    with pytest.raises(errors.InvalidRequestError) as refusal:
        decode(Decoder(kind), body)
    assert (refusal.value.param, refusal.value.message) == (param, message)


def test_a_number_beyond_all_floats_is_too_large() -> None:
    with pytest.raises(errors.InvalidRequestError, match=r"^seed is a number that is too large\.$"):
        decode(Decoder(CompletionRequest), b'{"model":"m","prompt":"a","seed":1e999}')


@pytest.mark.parametrize("value", ["x - at `$.secret", "secret\n", "x` - at `$.secret`"])
def test_no_value_passes_for_the_name_of_a_field(value: str) -> None:
    body = json.dumps({"model": "m", "prompt": "a", "truncation_side": value}).encode()
    with pytest.raises(errors.InvalidRequestError) as refusal:
        decode(Decoder(CompletionRequest), body)
    assert refusal.value.param == "truncation_side"
    assert "secret" not in refusal.value.message
