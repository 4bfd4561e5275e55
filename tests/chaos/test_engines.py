"""Native engines whose steps fail, whose memory is short, whose weights are broken: a request at
most, never the engine. Right is what the small model said when nothing disturbed it."""

import random
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from chaos_house import House, tiny_flags, tiny_house
from dice import OFFSETS, Moments
from redis_house import redis_running
from requests_mix import TINY, TinyMix
from serve_house import until

pytestmark = [pytest.mark.system, pytest.mark.chaos]

UNMISSED = ("forebay_workers_lost_total", "forebay_resubmitted_total", "forebay_shed_total")
"""What a worker that never served does not move."""
SMALL_POOL = 40 * 16 * 512
"""40 blocks of 16 tokens."""


@contextmanager
def _built(worker: tuple[str, ...], **variables: str) -> Iterator[House]:
    with redis_running() as redis:
        house = tiny_house(redis, worker, **variables)
        try:
            yield house
            house.balance.check_keys()
        finally:
            house.close()


def test_03_a_worker_killed_under_grammars_tools_and_seeds(
    small: House, rng: random.Random, moments: Moments
) -> None:
    """Its automata are made again on the other worker from what the client has."""
    with small.metered('forebay_resubmitted_total{reason="worker_lost"}'):
        for moment in moments(20, 400):
            with small.trial(rng, clients=6) as load:
                load.flow(moment)
                rng.choice(small.workers).kill()


def test_03_nobody_is_left_to_go_on(small: House, rng: random.Random) -> None:
    """One error event behind the last token, or a 503; no invented end."""
    with small.metered("forebay_workers_lost_total", "forebay_shed_total"):
        for _ in range(2):
            with small.trial(rng, ends=("ok", "broken", "refused"), clients=6) as load:
                load.flow(rng.randint(20, 200))
                for worker in small.workers:
                    worker.kill()
                load.finish()
            assert load.ends["broken"] + load.ends["refused"] > 0
            assert max(one.seconds for one in load.outcomes if one.end == "broken") < 30


@pytest.fixture(scope="module", params=["sticky", "memory", "nan"])
def broken(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[tuple[str, House]]:
    """Workers in which a fault can be armed."""
    path = str(Path(__file__).parent)
    with _built(tiny_flags(tiny_model), TEST_FAULT=request.param, PYTHONPATH=path) as house:
        yield request.param, house


def test_06_08_09_a_step_that_fails(
    broken: tuple[str, House], rng: random.Random, moments: Moments
) -> None:
    """Row 6, an error of the card that stays: the process ends, its work goes elsewhere. Row 8, a
    NaN: that request fails. Row 9, no memory: its requests are made again."""
    fault, house = broken
    moves = {
        "sticky": ("forebay_workers_lost_total",),
        "nan": ('vllm:request_success_total{finished_reason="error"}',),
        "memory": ("forebay_step_failures_total",),
    }
    with house.metered(*moves[fault]):
        for moment in moments(20, 300):
            with house.trial(
                rng, ends=("ok", "refused", "broken"), statuses=(500,), clients=6
            ) as load:
                load.flow(moment)
                victim = rng.choice(house.workers)
                victim.send(signal.SIGUSR1)
                load.flow(200)
                if fault == "sticky":
                    until(lambda victim=victim: not victim.alive, 30)
                    assert victim.process.returncode == 1
            failed = [one for one in load.outcomes if one.end in ("refused", "broken")]
            assert len(failed) <= (1 if fault == "nan" else len(load.outcomes) / 2), failed
            assert all(worker.alive for worker in house.workers)


def test_10_39_a_pool_far_too_small_for_all(tiny_model: Path, rng: random.Random) -> None:
    """Sequences give way and come back, blocks are evicted and shared; every answer equals that of
    the large pool."""
    with _built(tiny_flags(tiny_model, SMALL_POOL)) as house:
        mix = house.mix
        assert isinstance(mix, TinyMix)
        with house.metered("vllm:num_preemptions_total", "vllm:prefix_cache_hits_total"):
            for _ in range(OFFSETS):
                with house.trial(rng, clients=0) as load:
                    load.start([mix.ask(rng.randrange(len(TINY)), stream=True) for _ in range(64)])


def test_40_a_worker_killed_while_it_loads(
    small: House, rng: random.Random, moments: Moments
) -> None:
    """Nobody hears of it before it can serve, and nobody misses it."""
    with small.metered("forebay_loading_workers", still=UNMISSED):
        for moment in moments(1, 120):
            with small.trial(rng, clients=4) as load:
                late = small.new_worker(2)
                until(lambda: small.metric("forebay_loading_workers") > 0)
                load.flow(moment)
                late.kill()
                assert small.metric("forebay_workers") <= len(small.gateways) * 3


def test_40_weights_that_are_cut_short_are_one_line(
    small: House, tiny_model: Path, tmp_path: Path, rng: random.Random
) -> None:
    with small.metered(still=UNMISSED):
        for number in range(OFFSETS):
            copy = tmp_path / str(number)
            shutil.copytree(tiny_model, copy)
            weights = copy / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[: rng.randrange(weights.stat().st_size)])
            with small.trial(rng, clients=2) as load:
                late = small.fleet.worker("--model", str(copy), "--served-model-name", "tiny")
                until(lambda late=late: not late.alive, 120)
                load.flow(10)
            assert late.process.returncode == 2, late.log
            assert "Traceback" not in late.log
            assert "model.safetensors" in late.log
