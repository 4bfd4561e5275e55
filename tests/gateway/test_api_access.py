"""Who gets in and how: keys, CORS, request ids, metrics labels."""

import json
from collections.abc import Iterator

import pytest
from forebay_gateway.auth import Keyring
from forebay_gateway.teams.access import Standing
from forebay_gateway.teams.caller import Caller, headers_of
from forebay_shared.errors import AuthenticationError
from forebay_shared.settings import GatewaySettings, Secret
from gateway_fakes import MODEL, Api, exchange, request_bytes, running_api
from hypothesis import given
from hypothesis import strategies as st
from transcripts import check_error

KEY = "sk-canary-5591"
ORIGIN = "https://app.example.com"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    settings = GatewaySettings(
        api_key=(Secret(KEY), Secret("sk-second")), allowed_origins=(ORIGIN,)
    )
    with running_api(settings=settings) as api:
        yield api


PATHS = [CHAT, "/v1/completions", "/v1/models", f"/v1/models/{MODEL}", "/version", "/docs", "/"]
PATHS += ["/nope", "/health/", "/health/x", "/Health", "/ready%2f", "/metrics/..", "/v1/../health"]
PATHS += ["/health%3f", "/health;x", "/%2e/health", "/admin"]


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "HEAD", "PATCH", "TRACE"])
def test_nothing_but_the_open_paths_answers_without_a_key(api: Api, method: str) -> None:
    for path in [*PATHS, "http://x/v1/models", "//health"]:
        for headers in ({}, {"host": "x/health?"}, {"x-original-url": "/health"}):
            status, head, body = exchange(api.url, request_bytes(method, path, headers))
            assert status in (400, 401), (path, headers)
            assert status == 400 or b"www-authenticate: bearer" in head
            if method != "HEAD":
                check_error(body)


def test_what_the_crawl_tries_does_exist(api: Api) -> None:
    key = {"authorization": f"Bearer {KEY}"}
    found = {path: exchange(api.url, request_bytes("GET", path, key))[0] for path in PATHS}
    assert {path for path, status in found.items() if status in (200, 405)} == {
        CHAT,
        "/v1/completions",
        "/v1/models",
        f"/v1/models/{MODEL}",
        "/version",
        "/health/",
        "/ready%2f",
    }


WRONG = ["", "Bearer", "Bearer ", "Bearer  ", f"Basic {KEY}", KEY, f"Bearer {KEY}x"]
WRONG += [f"Bearer {KEY[:-1]}", f"Bearer {KEY} {KEY}", "Bearer " + "x" * 10_000]
WRONG += ["Bearer '; DROP TABLE keys", "Bearer \xff"]


@pytest.mark.parametrize("header", WRONG, ids=lambda header: header[:20])
def test_a_wrong_or_empty_key_is_a_401(api: Api, header: str) -> None:
    sent = request_bytes("GET", "/v1/models", {"authorization": header})
    status, _, body = exchange(api.url, sent)
    assert status == 401
    assert check_error(body)["code"] == "invalid_api_key"
    assert KEY.encode() not in body


def test_every_configured_key_opens_in_each_header(api: Api) -> None:
    for key in (KEY, "sk-second"):
        for headers in (
            {"authorization": f"Bearer {key}"},
            {"authorization": f"bearer {key}"},
            {"authorization": "", "x-api-key": key},
            {"authorization": "Basic eDp5", "x-api-key": key},
            {"authorization": f"Bearer {key}", "x-api-key": "other"},
            {"authorization": "", "api-key": key},
            {"authorization": "", "x-api-key": key, "api-key": "other"},
        ):
            assert api.http.get("/v1/models", headers=headers).status_code == 200
        empty = {"authorization": "Bearer ", "x-api-key": key}  # no client library sends it
        assert exchange(api.url, request_bytes("GET", "/v1/models", empty))[0] == 200


def test_the_open_paths_need_no_key_and_metrics_may_be_closed(api: Api) -> None:
    for path in ("/health", "/ready", "/metrics"):
        assert api.http.get(path, headers={"authorization": ""}).status_code == 200
    settings = GatewaySettings(api_key=(Secret(KEY),), protect_metrics=True)
    with running_api(settings=settings) as closed:
        assert closed.http.get("/metrics", headers={"authorization": ""}).status_code == 401
        assert closed.http.get("/metrics").status_code == 200


def test_without_keys_the_gateway_is_open_even_to_an_empty_bearer() -> None:
    with running_api() as api:
        sent = request_bytes("GET", "/v1/models", {"authorization": "Bearer "})
        assert exchange(api.url, sent)[0] == 200


def test_the_key_is_checked_before_the_body_is_read(api: Api) -> None:
    headers = {"authorization": "Bearer no", "content-length": "9999999"}
    assert exchange(api.url, request_bytes("POST", CHAT, headers))[0] == 401


def opened(keyring: Keyring, headers: dict[bytes, bytes]) -> Caller:
    """What a keyring says that waits for nothing."""
    with pytest.raises(StopIteration) as caught:
        keyring.authorize("/v1/models", headers).send(None)
    return caught.value.value


@given(keys=st.lists(st.text(min_size=1), min_size=1, max_size=4, unique=True), sent=st.text())
def test_only_an_exact_key_opens(keys: list[str], sent: str) -> None:
    keyring = Keyring(keys)
    header = {b"x-api-key": sent.encode("utf-8", "surrogatepass")}
    expected = sent.encode("utf-8", "surrogatepass").strip()
    known = [key.encode("utf-8", "surrogateescape") for key in keys if key.isprintable()]
    if expected in known:
        assert opened(keyring, header).team == f"key-{keys.index(expected.decode())}"
    elif all(key.isprintable() for key in keys):
        with pytest.raises(AuthenticationError):
            opened(keyring, header)


def test_a_preflight_needs_no_key_and_only_an_exact_origin_may_come(api: Api) -> None:
    asked = {"access-control-request-method": "POST", "authorization": ""}
    asked["access-control-request-headers"] = "authorization,x-stainless-os"
    answer = api.http.options(CHAT, headers={"origin": ORIGIN, **asked})
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert answer.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
    for origin in (
        "https://app-example.com",
        ORIGIN + ".evil",
        "null",
        "https://app.example.com:1",
    ):
        answer = api.http.options(CHAT, headers={"origin": origin, **asked})
        assert answer.status_code == 204
        assert "access-control-allow-origin" not in answer.headers


def test_pages_from_anywhere_may_call_where_that_is_configured() -> None:
    settings = GatewaySettings(api_key=(Secret(KEY),), allowed_origins=("*",))
    with running_api(settings=settings) as api:
        for origin in (ORIGIN, "http://localhost:5173", "null"):
            asked = {"origin": origin, "access-control-request-method": "POST"}
            for answer in (
                api.http.options(CHAT, headers=asked),
                api.http.get("/v1/models", headers=asked),
            ):
                assert answer.headers["access-control-allow-origin"] == origin
                assert answer.headers["vary"] == "origin"
        assert "access-control-allow-origin" not in api.http.get("/v1/models").headers


def test_errors_carry_cors_headers_too_and_none_go_out_when_cors_is_off(api: Api) -> None:
    answer = api.http.get("/v1/models", headers={"origin": ORIGIN, "authorization": ""})
    assert answer.status_code == 401
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    with running_api() as plain:
        answer = plain.http.get("/v1/models", headers={"origin": ORIGIN})
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_page_may_read_what_says_how_much_is_left_and_when_to_come_again(api: Api) -> None:
    answer = api.http.get("/v1/models", headers={"origin": ORIGIN})
    exposed = answer.headers["access-control-expose-headers"].split(", ")
    limited = headers_of(Standing(requests=(9, 8, 1.0), tokens=(9, 8, 1.0)))
    assert {name.decode() for name, _ in limited} < set(exposed)
    assert {"retry-after", "x-request-id", "request-id", "x-should-retry"} < set(exposed)


@pytest.mark.parametrize("sent", ["abc-123", "x" * 128, "~!"])
def test_a_sound_request_id_comes_back(api: Api, sent: str) -> None:
    for path in ("/health", "/v1/models", "/nope"):
        assert api.http.get(path, headers={"x-request-id": sent}).headers["x-request-id"] == sent


@pytest.mark.parametrize("sent", ["", "x" * 129, "a b", "é", "\x1b[31m"])
def test_an_unsound_request_id_is_replaced(api: Api, sent: str) -> None:
    answer = api.http.get("/v1/models", headers={"x-request-id": sent.encode("latin-1")})
    if answer.status_code == 200:  # the server itself refuses control characters
        assert answer.headers["x-request-id"].startswith("req_")


def test_two_requests_with_one_id_stay_two_requests(api: Api) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
    ids = {
        json.loads(api.http.post(CHAT, json=body, headers={"x-request-id": "same"}).content)["id"]
        for _ in range(3)
    }
    assert len(ids) == 3
    assert not any("same" in answer_id for answer_id in ids)


def test_metrics_have_the_same_series_whatever_clients_send(api: Api) -> None:
    def series() -> set[str]:
        lines = api.http.get("/metrics").text.splitlines()
        return {line.rsplit(" ", 1)[0] for line in lines if not line.startswith("#")}

    def storm(round_: int) -> None:
        api.http.get(f"/path-{round_}")
        api.http.request(f"BREW{round_ % 2}", "/v1/models")
        api.http.post(CHAT, json={"model": f"m{round_}", "user": f"u{round_}", "messages": [{}]})

    storm(0)
    series()
    before = series()
    for round_ in range(20):
        storm(round_)
    assert series() == before
    assert any('route="chat_completions"' in name for name in before)
