"""The vllm engine: its words for ours, its cache events under our hashes; all of it where vLLM is.

vLLM is no dependency of the tests: what needs it says so and is skipped. benchmarks/LOG.md has the
record of a run with it.
"""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import transformers
from adapter_house import make_adapter
from forebay_shared.blocks import chain, root_hash
from forebay_shared.errors import WorkerLostError
from forebay_shared.models import CAP_ADAPTERS
from forebay_shared.sampling import Grammar, SamplingParams
from forebay_shared.settings import StartError, WorkerSettings
from forebay_shared.wire import SequenceStart, Submit, pack_ids
from forebay_worker.checkpoint import resolve
from forebay_worker.conformance.driver import Driven
from forebay_worker.engine.cache_log import CacheLog
from forebay_worker.engines.registry import build
from forebay_worker.engines.vllm_events import AllBlocksCleared, CacheEvents, decode
from forebay_worker.engines.vllm_sampling import logprobs_of, sampling_params, terms_of
from tiny_models import VOCAB, make_model
from tokenizers import Tokenizer, models

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

    def __init__(self, **adapters: str) -> None:
        self.log = CacheLog()
        self.events = CacheEvents(self.log, "rev", adapters)

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
    assert cache.take(stored([b"A"], None, IDS[:4], extra_keys=[["salt:red"]])) == {salted: True}
    newer = stored([b"B"], None, IDS[4:8], extra_keys=[[["cache_salt", "salt:red"]]])
    other = next(chain(root_hash("rev", "", "red"), IDS[4:8], 4))
    assert cache.take(newer) == {other: True}


def test_an_adapter_is_part_of_the_hash_by_its_weights() -> None:
    cache = Cache(sql="1f")
    ours = list(chain(root_hash("rev", "1f", ""), IDS, 4))
    name: dict[str, Any] = {"lora_name": "adapter:sql"}
    keys = [["adapter:sql"], ["adapter:sql"]]
    first = stored([b"A", b"B"], None, IDS[:8], extra_keys=keys, **name)
    assert cache.take(first) == {ours[0]: True, ours[1]: True}
    more = stored([b"C"], b"B", IDS[8:], extra_keys=keys[:1], **name)
    assert cache.take(more) == {ours[2]: True}
    salted = next(chain(root_hash("rev", "1f", "sql"), IDS[:4], 4))
    event = stored([b"D"], None, IDS[:4], extra_keys=[["adapter:sql", "salt:sql"]], **name)
    assert cache.take(event) == {salted: True}


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


def test_no_salt_of_a_client_is_the_name_of_an_adapter() -> None:
    asked = msgspec.structs.replace(submit(SamplingParams()), cache_salt="adapter:sql")
    assert terms_of(asked, [1], ()).cache_salt == {"cache_salt": "salt:adapter:sql"}
    assert terms_of(submit(SamplingParams()), [1], ()).cache_salt == {}


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


class FakeVllm:
    """vLLM as far as its engine is asked: it answers with the number of the adapter, or 1."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refuses: str = "") -> None:
        self.arguments: dict[str, Any] = {}
        self.loaded: list[Any] = []
        self.errored = False
        self._refuses = refuses
        modules = {
            "vllm": SimpleNamespace(
                **vars(LIBRARY),
                AsyncEngineArgs=self._arguments,
                AsyncLLMEngine=SimpleNamespace(from_vllm_config=lambda config: self),
            ),
            "vllm.config": SimpleNamespace(KVEventsConfig=SimpleNamespace),
            "vllm.lora.request": SimpleNamespace(LoRARequest=SimpleNamespace),
        }
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)

    def _arguments(self, **arguments: Any) -> Any:
        self.arguments = arguments
        config = SimpleNamespace(
            model_config=SimpleNamespace(
                dtype="float32", get_vocab_size=lambda: VOCAB, max_model_len=64
            ),
            cache_config=SimpleNamespace(block_size=16),
        )
        return SimpleNamespace(create_engine_config=lambda: config)

    async def add_lora(self, request: Any) -> None:
        if request.lora_name == f"adapter:{self._refuses}":
            raise ValueError("its rank is\n  too large")
        self.loaded.append(request)

    async def generate(self, prompt: Any, params: Any, name: str, **more: Any) -> Any:
        asked = more["lora_request"]
        token = asked.lora_int_id + 1 if asked is not None else 1
        said = SimpleNamespace(token_ids=[token], finish_reason="length", logprobs=None)
        yield SimpleNamespace(outputs=[said], num_cached_tokens=0)

    def shutdown(self, timeout: float) -> None:
        """It is told to end."""


@pytest.fixture
def adapted(tmp_path: Path) -> WorkerSettings:
    model = make_model("llama", tmp_path)
    words = Tokenizer(models.WordLevel({f"w{at}": at for at in range(VOCAB)}, unk_token="w0"))
    words.save(str(tmp_path / "tokenizer.json"))
    for name in ("sql", "law"):
        make_adapter(model, tmp_path / name, seed=len(name))
    return WorkerSettings(
        engine="vllm",
        model=str(tmp_path),
        enable_prefix_caching=False,
        enable_lora=True,
        lora_modules=(f"sql={tmp_path / 'sql'}", f"law={tmp_path / 'law'}"),
        max_lora_rank=32,
    )


def test_adapters_are_loaded_at_the_start_and_asked_for_by_name(
    adapted: WorkerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = FakeVllm(monkeypatch)
    driven = Driven(build(adapted))
    asked = {name: library.arguments[name] for name in ("enable_lora", "max_loras")}
    assert asked == {"enable_lora": True, "max_loras": 2}
    assert library.arguments["max_lora_rank"] == 32
    paths = [(each.lora_name, each.lora_int_id, each.lora_path) for each in library.loaded]
    assert paths == [
        ("adapter:sql", 1, f"{adapted.model}/sql"),
        ("adapter:law", 2, f"{adapted.model}/law"),
    ]
    assert CAP_ADAPTERS in driven.card.capabilities
    assert [adapter.name for adapter in driven.card.adapters] == ["sql", "law"]
    sampling = SamplingParams(temperature=0.0, max_tokens=1)
    for name, token in (("", 1), ("sql", 2), ("law", 3)):
        (outcome,) = driven.outcomes(driven.submit([4, 5], sampling, adapter=name))
        assert outcome.token_ids == [token]
    driven.stop()


def test_an_adapter_that_vllm_does_not_take_is_one_line(
    adapted: WorkerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeVllm(monkeypatch, refuses="law")
    with pytest.raises(StartError) as raised:
        build(adapted)
    assert str(raised.value) == "--lora-modules law: its rank is too large"
    with pytest.raises(StartError, match=r"--lora-modules sql: .*adapter_config.json cannot be"):
        build(replace(adapted, lora_modules=("sql=/nowhere",)))


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
    run = conformance(*settings)
    assert run.returncode == 0, run.stdout


@pytest.mark.skipif(not HAS_VLLM, reason="vllm is not installed: pip install 'vllm>=0.32'")
@pytest.mark.timeout(1800)
def test_the_vllm_engine_keeps_the_rules_of_adapters(tmp_path: Path) -> None:
    directory = resolve(os.environ.get("FOREBAY_TEST_VLLM_MODEL", ""))
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    make_adapter(model, tmp_path / "sql", rank=16)
    settings = [f"model={directory}", "max_model_len=1024", "max_num_seqs=16", "block_size=32",
                'engine_args={"enforce_eager":true}', "dtype=float32", "enable_lora=true",
                f"lora_modules=sql={tmp_path / 'sql'}"]  # fmt: skip
    run = conformance(*settings, match="adapter")
    assert run.returncode == 0, run.stdout


def conformance(*settings: str, match: str = "") -> subprocess.CompletedProcess[str]:
    words = [word for setting in settings for word in ("--engine-setting", setting)]
    suite = ["--pyargs", "forebay_worker.conformance", "--engine", "vllm", *words, "-k", match]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *suite],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"},
        timeout=1700,
        check=False,
    )
