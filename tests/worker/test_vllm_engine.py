"""The vllm engine: its words for ours, its cache events under our hashes; all of it where vLLM is.

vLLM is no dependency of the tests: what needs it says so and is skipped. benchmarks/LOG.md has the
record of a run with it.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from forebay_shared.blocks import chain, root_hash
from forebay_shared.errors import WorkerLostError
from forebay_shared.sampling import Grammar, SamplingParams
from forebay_shared.settings import StartError, WorkerSettings
from forebay_shared.wire import SequenceStart, Submit, pack_ids
from forebay_worker.checkpoint import resolve
from forebay_worker.engine.cache_log import CacheLog
from forebay_worker.engines.vllm_events import AllBlocksCleared, CacheEvents, decode
from forebay_worker.engines.vllm_sampling import logprobs_of, sampling_params, terms_of

HAS_VLLM = importlib.util.find_spec("vllm") is not None
ROOT = root_hash("rev")
IDS = list(range(12))


def stored(hashes: list[bytes], parent: bytes | None, ids: list[int], **more: Any) -> dict:
    """An event as vLLM packs it, with fields that nothing here reads."""
    return {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent,
        "token_ids": ids, "block_size": 4, "lora_id": None, "medium": "GPU", "lora_name": None,
        "group_idx": 0, **more,
    }  # fmt: skip


def removed(*hashes: bytes, medium: str = "GPU") -> dict:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium}


class Cache:
    """Events in, changes out."""

    def __init__(self) -> None:
        self.log = CacheLog()
        self.events = CacheEvents(self.log, "rev")

    def take(self, *events: dict) -> dict[bytes, bool]:
        self.events.take(decode(msgspec.msgpack.encode([0.0, list(events), 0])))
        return {key: kept for change in self.log.take() for key, kept in change.blocks.items()}


def test_blocks_have_the_hashes_that_gateways_look_for() -> None:
    cache = Cache()
    ours = list(chain(ROOT, IDS, 4))
    assert cache.take(stored([b"A", b"B"], None, IDS[:8])) == {ours[0]: True, ours[1]: True}
    assert cache.take(stored([b"C"], b"B", IDS[8:])) == {ours[2]: True}
    assert list(cache.log.everything()) == ours
    assert cache.take(removed(b"C", b"?")) == {ours[2]: False}


def test_a_salt_is_part_of_the_hash() -> None:
    cache = Cache()
    salted = next(chain(root_hash("rev", "", "red"), IDS[:4], 4))
    assert cache.take(stored([b"A"], None, IDS[:4], extra_keys=[["red"]])) == {salted: True}


def test_a_block_is_there_while_any_copy_of_it_is() -> None:
    cache = Cache()
    (ours,) = chain(ROOT, IDS[:4], 4)
    assert cache.take(stored([b"A"], None, IDS[:4])) == {ours: True}
    assert cache.take(stored([b"A"], None, IDS[:4])) == {}
    assert cache.take(removed(b"A")) == {}
    assert cache.take(removed(b"A")) == {ours: False}


def test_what_cannot_be_placed_is_left_out() -> None:
    cache = Cache()
    assert cache.take(stored([b"X"], b"unknown", IDS[:4])) == {}
    assert cache.take(stored([b"A"], None, IDS[:4], medium="CPU")) == {}
    assert cache.take(stored([b"A"], None, IDS[:4], lora_name="adapter")) == {}
    assert len(cache.events) == 0


def test_a_cleared_cache_is_empty() -> None:
    cache = Cache()
    (ours,) = chain(ROOT, IDS[:4], 4)
    cache.take(stored([b"A"], None, IDS[:4]))
    assert cache.take({"type": "AllBlocksCleared"}) == {ours: False}
    assert isinstance(decode(msgspec.msgpack.encode([0, [{"type": "AllBlocksCleared"}]])).events[0],
                      AllBlocksCleared)  # fmt: skip


LIBRARY = SimpleNamespace(
    SamplingParams=SimpleNamespace,
    sampling_params=SimpleNamespace(
        RequestOutputKind=SimpleNamespace(DELTA="delta"), StructuredOutputsParams=SimpleNamespace
    ),
)


def submit(sampling: SamplingParams, *emitted: int) -> Submit:
    starts = (SequenceStart(0, pack_ids(emitted)), SequenceStart(1))
    return Submit(
        request_id="r",
        attempt=1,
        gateway="g",
        prompt=pack_ids([1, 2]),
        sampling=sampling,
        starts=starts,
    )


def params(sampling: SamplingParams, *emitted: int, index: int = 0) -> SimpleNamespace:
    terms = terms_of(submit(sampling, *emitted), [1, 2], (99,))
    return sampling_params(LIBRARY, terms, index, sampling.max_tokens)


def test_what_was_emitted_counts_for_the_limits() -> None:
    sampling = SamplingParams(max_tokens=10, min_tokens=4, temperature=0.0)
    assert (params(sampling).max_tokens, params(sampling).min_tokens) == (10, 4)
    resumed = params(sampling, 5, 6, 7)
    assert (resumed.max_tokens, resumed.min_tokens) == (7, 1)
    assert resumed.seed is None, "greedy needs none"


def test_sequences_have_seeds_of_their_own() -> None:
    sampling = SamplingParams(seed=2**64 - 1, temperature=0.7)
    seeds = {params(sampling).seed, params(sampling, index=1).seed, params(sampling, 5).seed}
    assert len(seeds) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_rest_is_said_in_vllms_words() -> None:
    made = params(
        SamplingParams(
            stop_token_ids=(7,),
            bad_words=((1, 2), (3,)),
            allowed_token_ids=(4, 5),
            logit_bias={4: 1.5},
            grammar=Grammar("choice", '["a","b"]'),
        )
    )
    assert sorted(made.stop_token_ids) == [7, 99]
    assert made._bad_words_token_ids == [[1, 2], [3]]
    assert (made.allowed_token_ids, made.logit_bias) == ([4, 5], {4: 1.5})
    assert made.structured_outputs.choice == ["a", "b"]
    assert params(SamplingParams(ignore_eos=True)).stop_token_ids is None


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(presence_penalty=0.5),
        SamplingParams(frequency_penalty=0.5),
        SamplingParams(grammar=Grammar("json_object")),
    ],
)
def test_what_would_be_continued_wrongly_is_not_taken_up(sampling: SamplingParams) -> None:
    params(sampling)
    with pytest.raises(WorkerLostError) as error:
        params(sampling, 5)
    assert not error.value.retryable


def test_logprobs_are_the_likeliest_and_the_tokens_own() -> None:
    def entry(logprob: float, rank: int) -> SimpleNamespace:
        return SimpleNamespace(logprob=logprob, rank=rank)

    told = [{8: entry(-3.0, 40), 1: entry(-0.1, 1), 2: entry(-2.0, 2)}]
    (own,) = logprobs_of(told, [8], 2)
    assert (own.logprob, own.rank, own.top) == (-3.0, 40, [(1, -0.1), (2, -2.0)])
    assert logprobs_of(told, [8], None) is None


@pytest.mark.skipif(HAS_VLLM, reason="vllm is installed here")
def test_without_vllm_it_says_what_to_install() -> None:
    from forebay_worker.engines.vllm import VllmEngine

    with pytest.raises(StartError, match=r"pip install 'forebay-worker\[vllm\]'"):
        VllmEngine(WorkerSettings(engine="vllm"))


@pytest.mark.skipif(not HAS_VLLM, reason="vllm is not installed: pip install 'vllm>=0.32'")
@pytest.mark.timeout(1800)
def test_the_vllm_engine_keeps_every_rule() -> None:
    model = resolve(os.environ.get("FOREBAY_TEST_VLLM_MODEL", ""))
    settings = [f"model={model}", "max_model_len=1024", "max_num_seqs=16", "block_size=32",
                'engine_args={"enforce_eager":true}']  # fmt: skip
    words = [word for setting in settings for word in ("--engine-setting", setting)]
    suite = ["--pyargs", "forebay_worker.conformance", "--engine", "vllm", *words]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *suite],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"},
        timeout=1700,
        check=False,
    )
    assert run.returncode == 0, run.stdout
