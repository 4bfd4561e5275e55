"""Aliases on a real fleet: one name in every dialect, changed under way, with what follows it."""

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from forebay_shared.settings import Secret
from patience import PATIENCE_S
from redis_house import redis_running
from serve_house import Admin, Serve, starting, until

pytestmark = pytest.mark.system

DOCUMENT: dict[str, Any] = {
    "models": [
        {"id": "big", "price": {"input": 2.0, "output": 4.0}},
        {"id": "small", "price": {"input": 1.0, "output": 1.0}},
        {"id": "absent"},
    ],
    "aliases": [
        {"id": "fast", "targets": [{"model": "small"}]},
        {"id": "grows", "targets": [{"model": "small"}], "fallbacks": ["big"]},
        {"id": "stays", "targets": [{"model": "small"}], "fallbacks": ["big"], "fall_back_on": []},
        {"id": "sure", "targets": [{"model": "absent"}], "fallbacks": ["small"]},
        {"id": "nobody", "targets": [{"model": "absent"}]},
        {"id": "full", "targets": [{"model": "narrow"}], "fallbacks": ["big"]},
        {
            "id": "capped",
            "targets": [{"model": "big"}],
            "defaults": {"max_tokens": 3},
            "caps": {"max_tokens": 5, "temperature": 0.5},
        },
        {
            "id": "old",
            "targets": [{"model": "big"}],
            "deprecated": "2020-01-01",
            "sunset": "2999-01-01",
        },
        {"id": "gone", "targets": [{"model": "big"}], "sunset": "2020-01-01"},
    ],
    "organisations": [
        {
            "id": "acme",
            "teams": [
                {
                    "id": "red",
                    "keys": [{"name": "app"}, {"name": "ruler", "role": "admin"}],
                    "aliases": [{"id": "fast", "targets": [{"model": "big"}]}],
                },
                {"id": "blue", "models": ["fast"], "keys": [{"name": "app"}]},
            ],
        }
    ],
}
MESSAGES = [{"role": "user", "content": "hello there"}]
ASKS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/completions": {"prompt": "hello there", "max_tokens": 4},
    "/v1/responses": {"input": "hello there", "max_output_tokens": 4},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/embeddings": {"input": "hello there"},
    "/v1/score": {"text_1": "hello", "text_2": "there"},
    "/v1/rerank": {"query": "hello", "documents": ["there"]},
}
STREAMED = list(ASKS)[:4]
NAMES = {"big", "large", "small", "narrow"}


class House:
    """Two gateways, and workers of three models: big, small (64 tokens), narrow (one at a time)."""

    def __init__(self, server: Serve, data: Path) -> None:
        self.server = server
        self.base = server.url.removesuffix("/v1")
        self.admin = Admin(server, Secret((data / "admin-key").read_text().strip()))
        self.tokens: dict[str, str] = {}

    @contextmanager
    def http(self, name: str) -> Iterator[httpx.Client]:
        headers = {"authorization": f"Bearer {self.tokens[name]}"}
        with httpx.Client(base_url=self.base, headers=headers, timeout=PATIENCE_S) as http:
            yield http

    def put(self, name: str, **fields: Any) -> None:
        self.admin.call("PUT", f"aliases/{name}", fields)


def names_of(server: Serve) -> set[str]:
    """The models that some gateway knows."""
    headers = {"authorization": f"Bearer {server.key}"}
    answer = httpx.get(f"{server.url}/models", headers=headers, timeout=PATIENCE_S)
    return {model["id"] for model in answer.json()["data"]}


@contextmanager
def worker(redis_url: str, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "forebay_shared.cli", "worker", "--engine", "echo"]
    environment = {**os.environ, "FOREBAY_REDIS_URL": redis_url}
    process = subprocess.Popen([*command, *flags], env=environment, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    data = tmp_path_factory.mktemp("d")
    narrow = ["--max-num-seqs", "1", "--max-num-queued-reqs", "1", "--echo-delay-ms", "20"]
    with redis_running() as redis, starting() as start:
        flags = ["--served-model-name", "big", "--served-model-name", "large", "--gateways", "2"]
        with (
            worker(redis.url, "--served-model-name", "small", "--max-model-len", "64"),
            worker(redis.url, "--served-model-name", "narrow", *narrow),
        ):
            server = start(
                "--engine", "echo", *flags, "--redis-url", redis.url, data=data
            ).wait_ready()
            house = House(server, data)
            server.agree("forebay_workers", least=3)
            until(lambda: all(names_of(server) >= NAMES for _ in range(8)))
            answer = house.admin.call("POST", "apply", DOCUMENT)
            for label, token in answer["tokens"].items():
                house.tokens[label.removeprefix("key/")] = token
            yield house


@pytest.fixture
def house(built: House) -> House:
    """What the last test changed is on both gateways."""
    built.server.mirrored()
    return built


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def names_in(tree: object) -> set[str]:
    """Every value of a field `model`, at any depth."""
    if isinstance(tree, dict):
        own = {tree["model"]} if isinstance(tree.get("model"), str) else set()
        return own.union(*map(names_in, tree.values()))
    return set().union(*map(names_in, tree)) if isinstance(tree, list) else set()


def served_by(house: House, name: str) -> set[str]:
    """The served models in the usage records of an alias."""
    rows = house.admin.usage(by="model", alias=name)
    return {row["model"] for row in rows}


def ask(http: httpx.Client, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": "hello", "max_tokens": 4, **fields}
    return http.post("/v1/completions", json=body)


@pytest.mark.parametrize("path", ASKS)
def test_the_answers_model_is_the_name_that_was_asked_for(house: House, path: str) -> None:
    with house.http("blue/app") as http:
        answer = http.post(path, json={"model": "fast", **ASKS[path]})
        assert answer.status_code == 200, answer.text
        assert names_in(answer.json()) == {"fast"}
        if path in STREAMED:
            streamed = http.post(path, json={"model": "fast", "stream": True, **ASKS[path]})
            assert names_in(events(streamed.text)) == {"fast"}
        direct = http.post(path, json={"model": "small", **ASKS[path]})
        assert direct.status_code == 404


def test_a_stored_response_and_what_goes_on_from_it_keep_the_name(house: House) -> None:
    with house.http("blue/app") as http:
        body = {"model": "fast", "input": "hello there", "max_output_tokens": 4}
        first = http.post("/v1/responses", json=body).json()
        again = http.get(f"/v1/responses/{first['id']}").json()
        more = {**body, "previous_response_id": first["id"], "background": True}
        second = http.post("/v1/responses", json=more).json()
        assert {first["model"], again["model"], second["model"]} == {"fast"}
        counted = http.post("/v1/responses/input_tokens", json=body)
        assert counted.status_code == 200
        for path in ("/tokenize", "/v1/messages/count_tokens"):
            fields = {"model": "fast", "messages": MESSAGES}
            assert http.post(path, json=fields).status_code == 200, path


def test_a_team_sees_its_own_aliases_and_what_they_are(house: House) -> None:
    with house.http("red/app") as red, house.http("blue/app") as blue:
        shown = {model["id"]: model for model in red.get("/v1/models").json()["data"]}
        assert NAMES | {"fast", "old"} <= set(shown)
        assert not {"gone", "nobody", "red/fast"} & set(shown)
        assert shown["fast"]["max_model_len"] == shown["big"]["max_model_len"]
        assert (shown["old"]["deprecation"], shown["old"]["sunset"]) == ("2020-01-01", "2999-01-01")
        assert "deprecation" not in shown["fast"]
        [only] = blue.get("/v1/models").json()["data"]
        assert (only["id"], only["max_model_len"]) == ("fast", 64)
        assert blue.get("/v1/models/fast").json() == only
        for name in ("gone", "other"):
            assert red.get(f"/v1/models/{name}").status_code == 404
            assert ask(red, name).status_code == 404
        long = "word " * 200
        assert ask(red, "fast", prompt=long).status_code == 200
        assert ask(blue, "fast", prompt=long).status_code == 400


def test_usage_has_both_names_and_the_served_models_price(house: House) -> None:
    with house.http("red/app") as red:
        assert ask(red, "fast", prompt="priced").status_code == 200
    until(lambda: served_by(house, "fast") >= {"big"})
    rows = house.admin.usage(by="model", alias="fast", team="red")
    [row] = rows
    cost = row["input_tokens"] * 2e-6 + row["output_tokens"] * 4e-6
    assert float(row["cost"]) == pytest.approx(cost)


def test_a_prompt_that_is_too_long_goes_to_the_longer_model_in_every_dialect(house: House) -> None:
    long = "word " * 200
    asks = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": long}]},
        "/v1/completions": {"prompt": long},
        "/v1/responses": {"input": long},
        "/v1/messages": {"messages": [{"role": "user", "content": long}], "max_tokens": 4},
        "/v1/embeddings": {"input": long},
    }
    with house.http("red/app") as http:
        for path, fields in asks.items():
            answer = http.post(path, json={"model": "grows", **fields})
            assert answer.status_code == 200, (path, answer.text)
            assert names_in(answer.json()) == {"grows"}
            assert http.post(path, json={"model": "stays", **fields}).status_code == 400
        cut = {"model": "grows", "input": MESSAGES * 60, "truncation": "auto"}
        answer = http.post("/v1/responses", json=cut).json()
        assert answer["usage"]["input_tokens"] > 64  # longer before cut
    until(lambda: house.server.metric("forebay_alias_fallbacks_total") >= 6)
    until(lambda: served_by(house, "grows") == {"big"})


def test_a_model_without_workers_is_followed_at_once(house: House) -> None:
    with house.http("red/app") as http:
        for stream in (False, True):
            answer = ask(http, "sure", stream=stream)
            assert answer.status_code == 200
        nobody = ask(http, "nobody")
        assert nobody.status_code == 503
        assert "retry-after" in nobody.headers
        assert "absent" not in nobody.text


BACKGROUND = {"input": "hello there", "max_output_tokens": 4, "background": True}


def retrieved(http: httpx.Client, response_id: str) -> dict[str, Any]:
    return http.get(f"/v1/responses/{response_id}").json()


def in_the_background(http: httpx.Client, name: str) -> None:
    """A response that goes on to another model says so to nobody: it is made, and told, once."""
    made = http.post("/v1/responses", json={**BACKGROUND, "model": name})
    assert made.status_code == 200, made.text
    until(lambda: retrieved(http, made.json()["id"])["status"] not in ("queued", "in_progress"))
    whole = retrieved(http, made.json()["id"])
    assert whole["status"] == "incomplete", whole  # at its length
    assert whole["model"] == name
    assert whole["usage"]["output_tokens"] == 4
    assert whole["created_at"] == made.json()["created_at"]
    answer = http.post("/v1/responses", json={**BACKGROUND, "model": name, "stream": True})
    told = events(answer.text)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    kinds = [event["type"].removeprefix("response.") for event in told]
    assert kinds[:3] == ["created", "queued", "in_progress"]
    assert kinds.count("created") == kinds.count("in_progress") == 1
    assert kinds[-1] == "incomplete"
    assert {event["response"]["id"] for event in told if "response" in event} == {
        told[0]["response"]["id"]
    }
    assert names_in(told) == {name}


def test_a_full_queue_sends_the_next_to_the_fallback(house: House) -> None:
    """The narrow model runs one request and queues one; a third is refused by its engine."""
    occupied = threading.Barrier(3)
    done = threading.Event()

    def occupy() -> None:
        with house.http("red/app") as http:
            body = {"model": "narrow", "prompt": "hold", "max_tokens": 20_000, "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200
                occupied.wait(PATIENCE_S)
                done.wait(PATIENCE_S)

    first = threading.Thread(target=occupy)
    second = threading.Thread(target=occupy)
    first.start()
    second.start()
    try:
        occupied.wait(PATIENCE_S)
        with house.http("red/app") as http:
            assert ask(http, "narrow").status_code == 503
            for stream in (False, True):
                answer = ask(http, "full", stream=stream)
                assert answer.status_code == 200, answer.text
                assert "narrow" not in answer.text
            in_the_background(http, "full")
            refused = http.post("/v1/responses", json={**BACKGROUND, "model": "narrow"}).json()
            until(lambda: retrieved(http, refused["id"])["status"] == "failed")
            assert retrieved(http, refused["id"])["error"]["code"] == "server_error"
    finally:
        done.set()
        first.join()
        second.join()
    with house.http("red/app") as http:  # behind both that have left
        until(lambda: ask(http, "narrow").status_code == 200)
    until(lambda: "big" in served_by(house, "full"))


def test_defaults_and_caps_hold_and_are_told(house: House) -> None:
    with house.http("red/app") as http:
        body = {"model": "capped", "messages": MESSAGES}
        plain = http.post("/v1/chat/completions", json=body)
        assert plain.json()["usage"]["completion_tokens"] == 3
        assert "warning" not in plain.headers
        more = http.post(
            "/v1/chat/completions", json={**body, "max_completion_tokens": 50, "temperature": 1}
        )
        assert more.json()["usage"]["completion_tokens"] == 5
        assert len(more.headers.get_list("warning")) == 2
        response = http.post(
            "/v1/responses",
            json={"model": "capped", "input": "hello there", "max_output_tokens": 90},
        )
        assert response.json()["usage"]["output_tokens"] == 5
        message = http.post(
            "/v1/messages", json={"model": "capped", "messages": MESSAGES, "max_tokens": 90}
        )
        assert message.json()["usage"]["output_tokens"] == 5


def test_a_deprecated_name_is_told_with_every_answer(house: House) -> None:
    with house.http("red/app") as http:
        for stream in (False, True):
            answer = ask(http, "old", stream=stream)
            assert answer.headers["deprecation"] == "@1577836800"
            assert answer.headers["sunset"] == "Tue, 01 Jan 2999 00:00:00 GMT"
            assert "deprecated since 2020-01-01" in answer.headers["warning"]
        assert "deprecation" not in ask(http, "fast").headers


def test_a_canary_gets_its_share(house: House) -> None:
    """1,000 requests with a share of 0.25: seven standard deviations are 96."""
    targets = [{"model": "big", "weight": 3}, {"model": "small", "weight": 1}]
    house.put("canary", targets=targets)
    with house.http("red/app") as http:
        for _ in range(1000):
            assert ask(http, "canary", max_tokens=1).status_code == 200

    def requests() -> dict[str, int]:
        rows = house.admin.usage(by="model", alias="canary")
        return {row["model"]: row["requests"] for row in rows}

    until(lambda: sum(requests().values()) == 1000)
    assert abs(requests()["small"] - 250) <= 96


def test_a_change_that_all_have_heard_moves_new_requests_and_disturbs_no_running_one(
    house: House,
) -> None:
    house.put("moving", targets=[{"model": "narrow"}])
    body = {"model": "moving", "prompt": "abcd", "max_tokens": 100, "stream": True}
    with (
        house.http("red/app") as http,
        http.stream("POST", "/v1/completions", json=body) as running,
    ):
        lines = running.iter_lines()
        head = list(itertools.islice(lines, 3))
        house.put("moving", targets=[{"model": "small"}])
        long = "word " * 200  # a 400 for the small model alone

        def moved() -> bool:
            with house.http("red/app") as other:
                return all(ask(other, "moving", prompt=long).status_code == 400 for _ in range(4))

        assert moved()
        rest = [*head, *lines]
    chunks = events("\n".join(rest))
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text.startswith("abcd") or "abcd" in text
    assert names_in(chunks) == {"moving"}
    until(lambda: "narrow" in served_by(house, "moving"))


def test_aliases_of_nothing_and_of_aliases_are_refused_when_they_are_written(house: House) -> None:
    with httpx.Client(
        timeout=PATIENCE_S,
        base_url=f"{house.base}/admin/v1",
        headers={"authorization": f"Bearer {house.admin._key}"},
    ) as admin:
        for name, model, says in (
            ("x", "none", "'none', which is neither served now nor described"),
            ("x", "fast", "'fast', which is an alias itself"),
            ("x", "x", "'x', which is an alias itself"),
            ("fast", "fast", "'fast', which is an alias itself"),
        ):
            body = {"targets": [{"model": model}]}
            refused = admin.put(f"/aliases/{name}", json=body)
            assert refused.status_code == 409
            assert says in refused.json()["error"]["message"]
        document = {
            "aliases": [
                {"id": "one", "targets": [{"model": "two"}]},
                {"id": "two", "targets": [{"model": "one"}]},
            ]
        }
        circle = admin.post("/apply", json=document)
        assert circle.status_code == 409
        assert "is an alias itself" in circle.json()["error"]["message"]
        assert admin.delete("/models/absent").status_code == 409
        assert admin.put("/aliases/large2", json={"targets": [{"model": "large"}]}).is_success
        assert admin.delete("/aliases/large2").is_success
    with house.http("red/ruler") as http:
        own = {"team": "red", "targets": [{"model": "small"}]}
        assert http.put("/admin/v1/aliases/red/mine", json=own).status_code == 200
        assert http.put("/admin/v1/aliases/mine", json=own).status_code == 400
        assert http.put("/admin/v1/aliases/blue/mine", json=own).status_code == 400
        for_all = {"targets": [{"model": "small"}]}
        assert http.put("/admin/v1/aliases/mine", json=for_all).status_code == 403
        assert http.delete("/admin/v1/aliases/red/mine").status_code == 200


def test_a_document_with_aliases_comes_back_as_it_was(house: House) -> None:
    exported = house.admin.call("GET", "export")
    again = house.admin.call("POST", "apply", exported, {"prune": 1})
    assert again["changes"] == []
    named = {alias["id"]: alias for alias in exported["aliases"]}
    assert named["capped"]["caps"] == {"max_tokens": 5, "temperature": 0.5}
    assert named["stays"]["fall_back_on"] == []
    [red] = [team for team in exported["organisations"][0]["teams"] if team["id"] == "red"]
    assert red["aliases"][0]["id"] == "fast"
