"""Adapters in the fleet: who has one gets its requests, and to clients it is a model of its own."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from bus_house import job, run_job, workers
from forebay_gateway.backend import Backend, connect
from forebay_gateway.prefix_index import PrefixIndex
from forebay_gateway.roster import Worker
from forebay_gateway.routing import Pool, Prompt, route
from forebay_gateway.teams.access import Access
from forebay_gateway.teams.aliases import configured
from forebay_gateway.teams.caller import Caller
from forebay_gateway.teams.catalog import Catalog
from forebay_gateway.teams.directory import Directory
from forebay_gateway.teams.records import Key
from forebay_shared import keys
from forebay_shared.blocks import PromptBlocks, root_hash
from forebay_shared.errors import ModelNotFoundError
from forebay_shared.models import (
    CAP_ADAPTERS,
    CAP_EMBED,
    CAP_GENERATE,
    Adapter,
    EmbeddingCard,
    ModelCard,
)
from forebay_shared.settings import GatewaySettings, Secret
from forebay_shared.wire import Started, pack_ids
from patience import PATIENCE_S
from redis_house import RedisServer, WaitUntil
from teams_house import filled

SQL = Adapter("sql", "1f", "sql-lora")
LAW = Adapter("law", "2f", "law-lora")


def card(*adapters: Adapter, **fields) -> ModelCard:
    known = {"names": ("base", "also"), "revision": "r", "family": "f", "engine": "e"}
    sizes = {"vocab_size": 9, "max_model_len": 100, "block_size": 4, "created": 1}
    capabilities = frozenset({CAP_GENERATE, CAP_EMBED, CAP_ADAPTERS})
    made = {"tokenizer": "t", "capabilities": capabilities, "embedding": EmbeddingCard(8)}
    return ModelCard(**{**known, **sizes, **made, "adapters": adapters, **fields})


def test_a_card_speaks_for_its_model_and_for_each_adapter() -> None:
    base, sql, law = card(SQL, LAW).served()
    assert (base.names, sql.names, law.names) == (("base", "also"), ("sql",), ("law",))
    assert (base.parent, sql.parent, sql.adapter) == ("", "base", SQL)
    assert sql.capabilities == {CAP_GENERATE}, "an adapter makes no vectors and has no adapters"
    assert sql.embedding is None
    assert sql.revision == base.revision


def test_a_worker_answers_for_the_adapters_that_it_has_by_name_and_weights() -> None:
    _, sql = card(SQL).served()
    assert card(LAW, SQL, names=("other",)).answers(sql)
    assert card(Adapter("sql", "1f", "elsewhere")).answers(sql)
    assert not card(LAW).answers(sql)
    assert not card(Adapter("sql", "another")).answers(sql)
    assert not card(SQL, revision="another").answers(sql)
    assert not card(names=("sql",)).answers(sql), "a model of that name is not the adapter"
    assert card(LAW).answers(next(card(SQL).served())), "who wants the model may have it anywhere"


def test_a_prefix_is_looked_for_under_its_own_adapter() -> None:
    index, ids = PrefixIndex(1 << 20), pack_ids(range(17))
    one, two = Worker("one", 0), Worker("two", 1)
    for worker in (one, two):
        worker.card = card(SQL, LAW)
    roots = {name: root_hash("r", name, "") for name in ("", "1f", "2f")}
    index.store(0, list(PromptBlocks(ids, 4, roots["1f"])))
    index.store(1, list(PromptBlocks(ids, 4, roots[""])))
    pool = Pool([one, two])

    def chosen(adapter: str) -> tuple[str, int]:
        choice = route(index, pool, Prompt(ids, roots[adapter]))
        assert choice is not None
        return choice.worker.name, choice.cached_tokens

    assert chosen("1f") == ("one", 16)
    assert chosen("") == ("two", 16)
    assert chosen("2f")[1] == 0


class Served:
    """A fleet of one worker."""

    def __init__(self, one: ModelCard) -> None:
        self._cards = list(one.served())

    def cards(self) -> list[ModelCard]:
        return self._cards

    def find(self, name: str) -> ModelCard:
        for each in self._cards:
            if name in each.names:
                return each
        raise ModelNotFoundError("no")

    def serves(self, card: ModelCard) -> bool:
        return True


def test_an_adapter_is_listed_with_its_model_and_without_its_path() -> None:
    directory = Directory(configured(["fast=sql"]))
    catalog = Catalog(Served(card(SQL)), directory, lambda _: None)
    listed = {one.name: (one.parent, one.root) for one in catalog.list(Caller())}
    assert listed == {
        "base": ("", ""),
        "also": ("", ""),
        "sql": ("base", "sql-lora"),
        "fast": ("", ""),
    }
    assert catalog.find("fast", Caller()).adapter == SQL, "an alias may name an adapter"


def test_a_team_may_have_the_adapter_alone_and_hears_of_no_other_model() -> None:
    directory = filled(Key(id="k", team="red", models=("sql",)))
    caller = Caller("red", Access(Key(id="k", team="red", models=("sql",)), directory))
    catalog = Catalog(Served(card(SQL, LAW)), directory, lambda _: None)
    assert [(one.name, one.parent) for one in catalog.list(caller)] == [("sql", "")]
    assert catalog.find("sql", caller).adapter == SQL
    for name in ("base", "law"):
        with pytest.raises(ModelNotFoundError):
            catalog.find(name, caller)


@pytest.fixture
async def backend(redis_url: str) -> AsyncIterator[Backend]:
    async with connect(GatewaySettings(redis_url=Secret(redis_url))) as one:
        yield one


SMALL = [64 + at for at in range(17)]
"""Ids of small letters: a to q. Their capitals are 32 below."""
LOUD = [token - 32 for token in SMALL]


async def test_requests_for_an_adapter_go_to_the_workers_that_have_it(
    backend: Backend, redis_url: str, wait_until: WaitUntil
) -> None:
    with workers(redis_url, 2), workers(redis_url, 1, adapters=("loud=/srv/a", "bold=/srv/b")):
        await wait_until(lambda: _workers(backend, "echo") == 3)
        assert _workers(backend, "loud") == _workers(backend, "bold") == 1
        for model, tokens in (("echo", SMALL), ("loud", LOUD), ("bold", LOUD)):
            jobs = [run_job(backend, job(backend, SMALL, tokens=17, model=model)) for _ in range(9)]
            assert all(got.tokens == {0: tokens} for got in await asyncio.gather(*jobs))
        with pytest.raises(ModelNotFoundError):
            backend.roster.find("quiet")


async def test_one_name_for_other_weights_is_another_adapter(
    backend: Backend, redis_url: str, wait_until: WaitUntil
) -> None:
    with workers(redis_url, 1, adapters=("loud=/srv/a",)):
        with workers(redis_url, 1, adapters=("loud=/srv/new",)):
            await wait_until(lambda: _workers(backend, "echo") == 2)
            assert _workers(backend, "loud") == 1
        await wait_until(lambda: _workers(backend, "echo") == 1)
        got = await run_job(backend, job(backend, SMALL, tokens=17, model="loud"))
        assert got.tokens == {0: LOUD}


async def test_a_prefix_is_found_again_under_its_own_adapter_alone(
    backend: Backend, redis_url: str, wait_until: WaitUntil, session_redis: RedisServer
) -> None:
    both = ("loud=/srv/a", "bold=/srv/b")
    prompt = list(range(200))
    with workers(redis_url, 2, delay_ms=20, cache_blocks=4096, adapters=both):
        await wait_until(lambda: _workers(backend, "loud") == 2)
        homes: dict[str, str] = {}
        for number, model in enumerate(("echo", "loud", "bold"), 1):
            homes[model], cached = await _placed(backend, prompt, model)
            assert cached == 0, "nobody else's blocks are of use"
            await wait_until(lambda blocks=12 * number: len(backend.index) == blocks)
        for model, home in homes.items():
            assert await _placed(backend, [*prompt, 7], model) == (home, 192)
        await wait_until(lambda: session_redis.client.ttl(keys.digests()) > 0)


async def test_an_answer_goes_on_with_its_adapter_when_its_worker_is_lost(
    backend: Backend, redis_url: str, wait_until: WaitUntil
) -> None:
    with (
        workers(redis_url, 2),
        workers(redis_url, 2, delay_ms=10, adapters=("loud=/srv/a",)) as able,
    ):
        await wait_until(lambda: _workers(backend, "echo") == 4)
        jobs = [job(backend, SMALL, tokens=500, model="loud") for _ in range(6)]
        clients = [asyncio.create_task(run_job(backend, one)) for one in jobs]
        await wait_until(lambda: _begun(backend) == [6, 2])
        able[0].kill()
        async with asyncio.timeout(PATIENCE_S):
            answers = await asyncio.gather(*clients)
        assert _workers(backend, "loud") == 1
        assert all(got.tokens == {0: [LOUD[at % 17] for at in range(500)]} for got in answers)
        lost = backend.telemetry.registry.get_sample_value
        assert lost("forebay_resubmitted_total", {"reason": "worker_lost"})


def _begun(backend: Backend) -> list[int]:
    """How many jobs the workers say that they run, and how many workers say so."""
    found = [backend.roster.get(name) for name in backend.roster.workers]
    running = [worker.load.running for worker in found if worker and worker.load.running]
    return [sum(running), len(running)]


def _workers(backend: Backend, model: str) -> int:
    """That take requests for it."""
    roster = backend.roster
    return len(roster.candidates(roster.find(model)).workers) if roster.knows(model) else 0


async def _placed(backend: Backend, prompt: list[int], model: str) -> tuple[str, int]:
    """Begins a job; the worker that took it and the tokens that it found in its cache."""
    one = job(backend, prompt, tokens=500, model=model)
    async with backend.dispatcher.generate(one) as generation:
        started = (await generation.events())[0]
        assert generation.placement is not None
        assert isinstance(started, Started)
        return generation.placement.worker, started.cached_tokens
