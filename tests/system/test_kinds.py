"""Several kinds of engine, and several models, in one fleet."""

from collections.abc import Iterator
from typing import NamedTuple

import httpx
import pytest
from fleet_house import AUTH, Fleet, Gateway, fleet
from forebay_shared import keys
from patience import PATIENCE_S, START_S
from redis_house import redis_running
from serve_house import until
from upstream_fakes import Call, Upstream, hello, upstream

pytestmark = pytest.mark.system

LEASE_S = 5.0
"""Twice the usual: a machine that pauses for 3 s costs nobody else a lease."""


class House(NamedTuple):
    """Two workers of the model `far`, each with an upstream of its own, and one of `near`."""

    fleet: Fleet
    gateway: Gateway
    one: Upstream
    two: Upstream


@pytest.fixture(scope="module")
def built() -> Iterator[House]:
    with (
        upstream() as one,
        upstream() as two,
        redis_running() as redis,
        fleet(redis, LEASE_S) as house,
    ):
        gateway = house.gateway("--alias", "any=far")
        house.echo(1.0, "--served-model-name", "near")
        for each in (one, two):
            house.worker("--engine", "http", "--upstream-url", each.url)
        house.ready(gateway, 3)
        yield House(house, gateway, one, two)


@pytest.fixture
def house(built: House) -> House:
    for each in (built.one, built.two):
        each.handler, each.status = hello, 200
        each.calls.clear()
    return built


def chat(house: House, model: str, **fields: object) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], **fields}
    return httpx.post(
        f"{house.gateway.base}/v1/chat/completions", json=body, headers=AUTH, timeout=PATIENCE_S
    )


def models(house: House) -> list[dict]:
    answer = httpx.get(f"{house.gateway.base}/v1/models", headers=AUTH, timeout=PATIENCE_S)
    return answer.json()["data"]


def said(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def test_each_model_has_its_own_kind(house: House) -> None:
    listed = models(house)
    able = {model["id"]: model["capabilities"] for model in listed}
    assert "text" in able["far"]
    assert "resume" in able["near"]
    assert (said(chat(house, "far")), said(chat(house, "near"))) == ("Hello", "hi")
    assert said(chat(house, "any")) == "Hello", "an alias is the gateway's, whatever is behind it"
    refused = chat(house, "far", return_token_ids=True)
    assert refused.json()["error"]["param"] == "return_token_ids"
    assert chat(house, "near", return_token_ids=True).json()["prompt_token_ids"]


def test_what_one_upstream_fails_another_answers(house: House) -> None:
    async def broken(call: Call) -> None:
        await call.answer(500, {})

    house.one.handler = broken
    before = house.gateway.metric("forebay_resubmitted_total", reason="failed")
    assert [said(chat(house, "far")) for _ in range(8)] == ["Hello"] * 8
    assert len(house.two.calls) == 8
    moved = house.gateway.metric("forebay_resubmitted_total", reason="failed") - before
    assert moved == len(house.one.calls)


def test_a_worker_whose_upstream_is_away_gets_nothing(house: House) -> None:
    house.one.status = 503

    def quiet() -> bool:
        """Several requests in a row went past it."""
        before = len(house.one.calls)
        return all(said(chat(house, "far")) for _ in range(6)) and len(house.one.calls) == before

    until(quiet)
    house.one.status = 200

    def heard() -> bool:
        before = len(house.one.calls)
        return all(said(chat(house, "far")) for _ in range(6)) and len(house.one.calls) > before

    until(heard)


def test_a_model_that_is_still_loading_is_no_unknown_one(house: House) -> None:
    def refused() -> dict:
        answer = chat(house, "late")
        error = answer.json()["error"]
        return {"status": answer.status_code, "code": error["code"], "text": error["message"],
                "after": answer.headers.get("retry-after")}  # fmt: skip

    unknown = refused()
    assert (unknown["status"], unknown["code"]) == (404, "model_not_found")
    listed = models(house)
    workers = house.gateway.metric("forebay_workers")
    with upstream() as late:
        late.close()
        options = ("--engine", "http", "--upstream-url", late.url, "--served-model-name", "late")
        dies = house.fleet.worker(*options)
        until(lambda: refused()["status"] == 503, START_S)
        assert refused() == {
            "status": 503, "code": "no_worker", "after": "5",
            "text": "The model is still loading. Please retry.",
        }  # fmt: skip
        assert chat(house, "later").status_code == 404, "nobody loads that one"
        now = models(house)
        assert now == listed, "only what is served is listed"
        assert house.gateway.metric("forebay_workers") == workers
        dies.kill()
        until(lambda: refused() == unknown)
        lives = house.fleet.worker(*options)
        until(lambda: refused()["status"] == 503, START_S)
        statuses: set[int] = set()

        def served() -> bool:
            statuses.add(chat(house, "late").status_code)
            return 200 in statuses

        late.open_again()
        until(served, START_S)
        assert statuses <= {200, 503}, "it is known at every moment"
        lives.kill()


def test_a_model_that_cannot_be_loaded_is_unknown_at_once(house: House) -> None:
    members = house.fleet.redis.client.hkeys(keys.members())
    with upstream() as bad:
        bad.close()
        options = ("--engine", "http", "--upstream-url", bad.url, "--served-model-name", "never")
        worker = house.fleet.worker(*options)
        until(lambda: chat(house, "never").status_code == 503, START_S)
        bad.models = b"<html>"
        bad.open_again()
        assert worker.process.wait(START_S) == 2
        left = set(house.fleet.redis.client.hkeys(keys.members())) - set(members)
        assert left == set(), "it took back what it had said"
        until(lambda: chat(house, "never").status_code == 404)


def test_a_worker_that_dies_before_a_word_is_replaced(house: House) -> None:
    held: list[Call] = []

    async def hold(call: Call) -> None:
        held.append(call)
        house.one.handler = house.two.handler = hello
        await call.left()

    house.one.handler = house.two.handler = hold
    before = list(house.fleet.workers.values())
    with httpx.Client(timeout=PATIENCE_S, headers=AUTH) as client:
        body = {"model": "far", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        with client.stream(
            "POST", f"{house.gateway.base}/v1/chat/completions", json=body
        ) as answer:
            until(lambda: bool(held))
            lost = house.one if house.one.calls else house.two
            for worker in before:
                if lost.url in " ".join(worker.process.args):
                    worker.kill()
            text = answer.read().decode()
    assert '"content":"Hel"' in text
    assert text.endswith("data: [DONE]\n\n")
    house.fleet.worker("--engine", "http", "--upstream-url", lost.url)
    house.fleet.ready(house.gateway, 3)
