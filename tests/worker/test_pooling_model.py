"""Vectors equal those of the reference implementations, whatever shares a step with an input."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from engine_fakes import Recorded
from forebay_shared.models import CAP_EMBED
from forebay_shared.settings import StartError, WorkerSettings
from forebay_shared.wire import Embedded, Encode, pack_ids
from forebay_worker.checkpoint import public_name, resolve
from forebay_worker.engines.native import NativeEngine
from forebay_worker.engines.pooling import PoolingEngine
from forebay_worker.engines.registry import build
from forebay_worker.pooling.files import pooling_files
from forebay_worker.pooling.runner import TorchVectors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_models import make_model
from tokenizers import Tokenizer

TEXTS = [
    "a",
    "The quick brown fox jumps over the lazy dog.",
    "naïve café, Ω≈ç√∫, 東京タワー, 한국어, हिन्दी, العربية",
    "👩‍👩‍👧‍👦 🇫🇷 e\u0301 \u200b\ufeff x",
    "[CLS] [SEP] [MASK] def f(x):\n\treturn {'a': [1, 22, 333]}",
    "   ",
    "water " * 100,
    "A forebay is the pool above the intake of a power station. " * 12,
    "word " * 254,
]
VOCAB = 20
_BERT = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
    "initializer_range": 0.3,
}


@pytest.fixture(scope="module")
def minilm() -> PoolingEngine:
    engine = build(WorkerSettings(model="minilm", device="cpu"))
    assert isinstance(engine, PoolingEngine)
    return engine


def vectors(runner: TorchVectors, inputs: Sequence[Sequence[int]]) -> np.ndarray:
    return runner.encode([np.array(ids, np.uint32) for ids in inputs])


def cosines(ours: np.ndarray, reference: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(reference, axis=1)
    return (ours * reference).sum(1) / norms


def runner(directory: Path, **options: object) -> TorchVectors:
    files = pooling_files(directory)
    return TorchVectors(directory, files, WorkerSettings(device="cpu", **options))


def test_the_carried_models_vectors_equal_those_of_transformers(minilm: PoolingEngine) -> None:
    card = minilm.card
    assert (card.name, card.capabilities) == ("all-minilm-l6-v2", frozenset({CAP_EMBED}))
    assert (card.max_model_len, card.embedding.size, card.embedding.normalized) == (256, 384, True)
    directory = resolve("minilm")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModel.from_pretrained(directory).eval()
    batch = tokenizer(TEXTS, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.inference_mode():
        states = model(**batch).last_hidden_state
    mask = batch["attention_mask"][:, :, None]
    means = ((states * mask).sum(1) / mask.sum(1)).numpy()
    own = Tokenizer.from_buffer(minilm.blobs[card.tokenizer])
    own.no_padding()
    own.enable_truncation(256)
    inputs = [own.encode(text).ids for text in TEXTS]
    encode = Encode(
        request_id="r", attempt=1, gateway="g", inputs=tuple(pack_ids(ids) for ids in inputs)
    )
    core = minilm.make_core(Recorded())
    core.submit(encode, 0.0)
    while not core.idle:
        core.step()
    answer = core.take_events()[-1][1]
    assert isinstance(answer, Embedded)
    found = np.stack([np.frombuffer(data, "<f4") for data in answer.vectors])
    assert np.linalg.norm(found, axis=1) == pytest.approx(1)
    assert cosines(found, means).min() > 1 - 1e-6


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TorchVectors:
    directory = tmp_path_factory.mktemp("tiny")
    _save(transformers.BertModel(transformers.BertConfig(**_BERT)), directory)
    return runner(directory)


@settings(deadline=None, max_examples=40)
@given(inputs=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=66), min_size=1))
def test_an_input_alone_is_as_in_any_batch(tiny: TorchVectors, inputs: list[list[int]]) -> None:
    alone = np.concatenate([vectors(tiny, [ids]) for ids in inputs])
    np.testing.assert_allclose(vectors(tiny, inputs), alone, rtol=2e-4, atol=2e-5)


def _save(model: transformers.PreTrainedModel, directory: Path, **pooling: bool) -> None:
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, 0, 0.5)
        elif "Norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    model.save_pretrained(directory)
    if pooling:
        _describe(directory, **pooling)


def _describe(directory: Path, *types: str, **pooling: bool) -> None:
    """Writes sentence-transformers' files."""
    (directory / "1_Pooling").mkdir(exist_ok=True)
    modes = {f"pooling_mode_{name}": value for name, value in pooling.items()}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    modules = [
        {"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
        *({"type": f"sentence_transformers.models.{kind}", "path": "2"} for kind in types),
    ]
    (directory / "modules.json").write_text(json.dumps(modules))


INPUTS = [[3, 4, 5], [7], [2, 9, 11, 13, 4, 4], [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]]
"""Without 1, which is padding to roberta."""


@pytest.mark.parametrize("mode", ["cls_token", "mean_tokens", "max_tokens"])
@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta"])
def test_encoders_and_poolings_equal_those_of_transformers(
    tmp_path: Path, family: str, mode: str
) -> None:
    config = transformers.AutoConfig.for_model(
        family, **_BERT, hidden_act="gelu_new", pad_token_id=1, type_vocab_size=2
    )
    model = transformers.AutoModelForMaskedLM.from_config(config)  # names with a prefix, a head
    _save(model, tmp_path, **{mode: True})
    encoder = getattr(model.eval(), model.base_model_prefix)
    found = vectors(runner(tmp_path), INPUTS)
    for ids, vector in zip(INPUTS, found, strict=True):
        padded = torch.tensor([ids])
        with torch.inference_mode():
            states = encoder(padded, attention_mask=torch.ones_like(padded)).last_hidden_state[0]
        pooled = {"cls": states[0], "mean": states.mean(0), "max": states.amax(0)}
        reference = pooled[mode.partition("_")[0]].numpy()
        np.testing.assert_allclose(vector, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("variant", ["qwen3", "llama3_rope"])
def test_a_decoders_vector_is_the_state_of_its_last_token(
    tmp_path: Path, variant: str, bare: bool
) -> None:
    model = make_model(variant, tmp_path)
    if bare:
        stored = load_file(tmp_path / "model.safetensors")
        stored = {n.removeprefix("model."): t for n, t in stored.items() if n != "lm_head.weight"}
        save_file(stored, tmp_path / "model.safetensors")
    inputs = [*INPUTS, [5] * 40]
    found = vectors(runner(tmp_path), inputs)
    for ids, vector in zip(inputs, found, strict=True):
        with torch.inference_mode():
            states = model.model(torch.tensor([ids])).last_hidden_state[0]
        np.testing.assert_allclose(vector, states[-1].numpy(), rtol=1e-3, atol=1e-4)


def test_a_directory_says_what_its_vectors_are(tmp_path: Path) -> None:
    config = {"model_type": "qwen3", "matryoshka_dimensions": [8, 4]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain = pooling_files(tmp_path)
    assert (plain.pooling, plain.normalized, plain.sizes) == ("last", True, (4, 8))
    _describe(tmp_path, lasttoken=True)
    assert not pooling_files(tmp_path).normalized
    _describe(tmp_path, "Normalize", mean_tokens=True)
    assert (pooling_files(tmp_path).pooling, pooling_files(tmp_path).normalized) == ("mean", True)
    for types, modes in (
        (["Dense"], {"mean_tokens": True}),
        ([], {"mean_tokens": True, "cls_token": True}),
        ([], {"weightedmean_tokens": True}),
    ):
        _describe(tmp_path, *types, **modes)
        with pytest.raises(StartError, match=r"Dense|pooling"):
            pooling_files(tmp_path)


def test_what_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    _save(transformers.BertModel(transformers.BertConfig(**_BERT)), tmp_path)
    with pytest.raises(StartError, match="max-model-len"):
        runner(tmp_path, max_model_len=100)
    with pytest.raises(StartError, match="cuda"):
        TorchVectors(tmp_path, pooling_files(tmp_path), WorkerSettings(device="cuda"))
    raw = json.loads((tmp_path / "config.json").read_text())
    for change in ({"hidden_act": "swish"}, {"position_embedding_type": "relative_key"}):
        (tmp_path / "config.json").write_text(json.dumps(raw | change))
        with pytest.raises(StartError, match="not supported"):
            runner(tmp_path)


def test_the_runner_flag_and_the_files_choose_the_engine(tmp_path: Path) -> None:
    assert public_name("minilm") == "all-minilm-l6-v2"
    with pytest.raises(StartError, match="bert"):
        build(WorkerSettings(model="minilm", runner="generate"))
    make_model("llama", tmp_path)
    tokenizer = resolve("minilm") / "tokenizer.json"
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    options = {"model": str(tmp_path), "device": "cpu", "kv_cache_memory_bytes": 2**20}
    assert isinstance(build(WorkerSettings(**options)), NativeEngine)
    pooled = build(WorkerSettings(**options, runner="pooling", matryoshka=True))
    assert isinstance(pooled, PoolingEngine)
    assert (pooled.card.embedding.pooling, pooled.card.embedding.matryoshka) == ("last", True)
