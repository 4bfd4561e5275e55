"""The card's runner: its tokens are those of the float32 decoder in plain torch, in any batch.

Without a card the same kernels run in Triton's interpreter, without graphs and in float32.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forebay_shared.sampling import SamplingParams
from forebay_shared.settings import WorkerSettings
from forebay_worker.engine import devices, loading
from forebay_worker.engine.batch import Sampled, ScheduledRow
from forebay_worker.engine.card_runner import CardRunner
from forebay_worker.engine.noise import gumbel
from forebay_worker.kernels import reference
from forebay_worker.kernels.reference import KvCache, Step
from forebay_worker.models.config import ModelError
from forebay_worker.models.decoder import Decoder
from forebay_worker.models.registry import read_config
from kernel_house import make_sequence, run_on

pytestmark = pytest.mark.usefixtures("few_programs")

ON_CARD = torch.cuda.is_available()
VOCAB, BLOCK, BLOCKS = 320, 64, 24
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True},
    "mistral": {"tie_word_embeddings": False},
    "qwen3_moe": {
        "tie_word_embeddings": False,
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
}
DTYPES = ["float32", "bfloat16"] if ON_CARD else ["float32"]
STEPS = 24 if ON_CARD else 3
LENGTHS = (5, 70, 1, 33, 64) if ON_CARD else (5, 66, 1)
GREEDY = SamplingParams(temperature=0)
MIXED = (
    GREEDY,
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.9),
    SamplingParams(temperature=0.7, min_p=0.05),
    SamplingParams(temperature=0, repetition_penalty=1.3, logprobs=2),
)


def settings(dtype: str) -> WorkerSettings:
    item = 4 if dtype == "float32" else 2
    return WorkerSettings(
        dtype=dtype,
        load_format="dummy",
        max_num_seqs=8,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=2 * 2 * 2 * 16 * item * BLOCK * BLOCKS,
        seed=3,
    )


def directory(family: str, at: Path) -> Path:
    raw = {"model_type": family, **_SIZES, **FAMILIES[family]}
    (at / "config.json").write_text(json.dumps(raw))
    return at


def late(
    runner: CardRunner, texts: list[list[int]], each: tuple[SamplingParams, ...], leaves: int = 0
) -> list[list[int]]:
    """Prefills all rows, then launches each step before the last one's tokens are taken; row 0
    leaves after `leaves` steps, if any, and the others move together."""
    rows = [
        make_sequence(text, [3 * at, 3 * at + 2, 3 * at + 1], sampling)
        for at, (text, sampling) in enumerate(zip(texts, each, strict=True))
    ]
    flights = []

    def land() -> None:
        plan, launched = flights.pop(0)
        for row, sampled in zip(plan, launched.results(), strict=True):
            assert sampled is not None
            assert not sampled.corrupt
            row.sequence.token_ids.append(sampled.token_id)

    for step in range(STEPS):
        here = [row for row in rows if not (leaves and step >= leaves and row is rows[0])]
        sizes = [len(row.token_ids) if step == 0 else 1 for row in here]
        plan = [ScheduledRow(row, size, True) for row, size in zip(here, sizes, strict=True)]
        plan.sort(key=lambda row: row.num_new > 1)
        flights.append((plan, runner.launch(plan)))
        for row in plan:
            row.sequence.num_computed += row.num_new
        if len(flights) == 2:
            land()
    land()
    return [row.token_ids[row.num_prompt :] for row in rows]


def make_runner(path: Path, dtype: str, *, graphs: bool = True) -> CardRunner:
    device = torch.device("cuda" if ON_CARD else "cpu")
    return CardRunner(path, settings(dtype), device, graphs=graphs)


def prompts() -> list[list[int]]:
    return [torch.randint(VOCAB, (size,)).tolist() for size in LENGTHS]


def decode(
    runner: CardRunner, texts: list[list[int]], each: tuple[SamplingParams, ...], chunk: int = 0
):
    """Prefills all rows (in chunks of `chunk`, decodes beside them) and goes on for STEPS steps."""
    rows = [
        make_sequence(text, [3 * at, 3 * at + 2, 3 * at + 1], sampling)
        for at, (text, sampling) in enumerate(zip(texts, each, strict=True))
    ]
    return run_on(runner, rows, STEPS, chunk)


def true_logits(runner: CardRunner, path: Path, dtype: str, tokens: list[int]) -> torch.Tensor:
    """Of every position by the plain decoder in float32 on the CPU, from the same weights."""
    config = read_config(path)
    device = runner._device  # the weights' noise depends on it
    weights = loading.load(path, config, settings(dtype), loading.dtype_of(dtype), device)
    wide = {name: weight.float().cpu() for name, weight in weights.items()}
    decoder = Decoder(config, wide, reference, 256)
    shape = (config.num_layers, 4, BLOCK, config.num_kv_heads, config.head_dim)
    size = len(tokens)
    at = torch.arange(size)
    step = Step(
        num_decodes=0, token_ids=torch.tensor(tokens), positions=at, kv_slots=at,
        starts=torch.tensor([0, size]), kv_lens=torch.tensor([size]),
        block_tables=torch.arange(4)[None], logits_at=at, host_starts=[0, size],
        host_kv_lens=[size],
    )  # fmt: skip
    with torch.inference_mode():
        return decoder(step, KvCache(torch.zeros(shape), torch.zeros(shape)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES if ON_CARD else ["qwen3", "qwen3_moe"])
def test_tokens_are_those_of_the_plain_decoder(family: str, dtype: str, tmp_path: Path) -> None:
    path = directory(family, tmp_path)
    runner = make_runner(path, dtype)
    texts = prompts()
    # A filter's border moves with the rounding of bfloat16, and with it the choice.
    each = (*MIXED[: 4 if dtype == "float32" else 2], GREEDY, GREEDY, GREEDY)[: len(texts)]
    outputs = decode(runner, texts, each)
    # A router's choice between nearly equal experts moves with the rounding, too.
    near = 0.0 if dtype == "float32" else 0.3 if family == "qwen3_moe" else 0.12
    for text, output, params in zip(texts, outputs, each, strict=True):
        logits = true_logits(runner, path, dtype, text + output)[len(text) - 1 : -1]
        for at, (row, token) in enumerate(zip(logits, output, strict=True)):
            scores = row
            if params.temperature > 0:
                noise = gumbel(2**63 + 77, len(text) + at, np.arange(VOCAB, dtype=np.uint32))
                kept = kept_scores(row, params)
                scores = kept / params.temperature + noise
            gap = float(scores.max() - scores[token])
            assert gap <= near / max(params.temperature, 0.5) + 1e-3, (at, token, gap)


def kept_scores(row: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """-inf where the filters drop an id."""
    probs = (row / params.temperature).softmax(-1)
    kept = torch.ones_like(row, dtype=torch.bool)
    if params.min_p:
        kept &= probs >= params.min_p * probs.max()
    if params.top_k:
        kept &= row >= row.topk(params.top_k).values[-1]
    if params.top_p < 1:
        inside = torch.where(kept, probs, 0)
        above = (inside[None, :] * (row[None, :] > row[:, None])).sum(-1)
        kept &= above < params.top_p * inside.sum()
    return torch.where(kept, row, -torch.inf)


@pytest.mark.parametrize("family", ["qwen3", *["qwen3_moe"] * ON_CARD])  # a minute without one
def test_batch_chunks_and_graphs_change_no_token(family: str, tmp_path: Path) -> None:
    path = directory(family, tmp_path)
    runner = make_runner(path, "float32")
    texts = prompts()
    each = MIXED[: len(texts)]
    whole = decode(runner, texts, each)
    assert decode(runner, texts, each, chunk=40) == whole
    for at in range(len(texts)) if ON_CARD else [1]:
        assert decode(runner, [texts[at]], (each[at],)) == [whole[at]]
    if ON_CARD:
        assert decode(make_runner(path, "float32", graphs=False), texts, each) == whole


def test_steps_that_overlap_change_no_token(tmp_path: Path) -> None:
    runner = make_runner(directory("qwen3", tmp_path), "float32")
    texts, each = prompts(), (*MIXED[:4], GREEDY)[: len(LENGTHS)]
    whole = decode(runner, texts, each)
    assert late(runner, texts, each) == whole
    gone = late(runner, texts, each, leaves=STEPS - 1)
    assert gone == [whole[0][: STEPS - 1], *whole[1:]]


def test_rows_that_are_adjusted_or_read_overlap_and_change_no_token(tmp_path: Path) -> None:
    runner = make_runner(directory("qwen3", tmp_path), "float32")
    each = (
        SamplingParams(temperature=0, repetition_penalty=1.3, logprobs=2),
        SamplingParams(temperature=0.7, presence_penalty=1.0, frequency_penalty=0.4, min_tokens=2),
        SamplingParams(temperature=0, logit_bias={5: 9.0, 9: 9.0}, frequency_penalty=2.0),
    )
    texts = prompts()[:3]
    whole = decode(runner, texts, each)
    assert late(runner, texts, each) == whole
    assert late(runner, texts, each, leaves=STEPS - 1)[1:] == whole[1:]


def test_only_what_the_host_must_see_holds_up_the_next_step(tmp_path: Path) -> None:
    runner = make_runner(directory("qwen3", tmp_path), "float32", graphs=False)
    waits = []
    for more in ({"repetition_penalty": 1.2, "logprobs": 1}, {"bad_words": ((4, 9),)}):
        row = make_sequence([1, 2, 3], [0], SamplingParams(temperature=0, **more))
        launched = runner.launch([ScheduledRow(row, 3, True)])
        waits.append(not launched.may_wait)
        [first] = launched.results()
        assert first is not None
        assert (first.logprobs is not None) == ("logprobs" in more)
    assert waits == [False, True]
    row.num_computed = 3
    with pytest.raises(ValueError, match="does not know its newest token"):
        runner.launch([ScheduledRow(row, 1, True)])


def test_a_token_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    runner = make_runner(directory("qwen3", tmp_path), "float32", graphs=False)
    row = make_sequence([1, 2, 3], [0], GREEDY)
    row.num_computed = 3
    with pytest.raises(ValueError, match="neither known nor sampled"):
        runner.launch([ScheduledRow(row, 1, True)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [200, 3])
def test_scores_of_a_prompt_are_those_of_the_plain_decoder_beside_rows_that_decode(
    dtype: str, chunk: int, tmp_path: Path
) -> None:
    path = directory("qwen3", tmp_path)
    runner = make_runner(path, dtype)
    text, other = torch.randint(VOCAB, (10,)).tolist(), torch.randint(VOCAB, (4,)).tolist()
    asked = SamplingParams(temperature=0, prompt_logprobs=3)
    row, beside = make_sequence(text, [0], asked), make_sequence(other, [1], GREEDY)
    row.scores_prompt = True
    [first] = runner.execute([ScheduledRow(beside, len(other), True)])
    found, sampled, said = [], None, [first]
    while sampled is None:
        beside.num_computed = len(beside.token_ids)
        beside.token_ids.append(said[-1].token_id)
        num_new = min(chunk, len(text) - row.num_computed)
        ends = row.num_computed + num_new == len(text)
        plan = [
            ScheduledRow(beside, 1, True),
            ScheduledRow(row, num_new, ends, row.to_score(num_new)),
        ]
        launched = runner.launch(plan)
        assert not launched.may_wait or not plan[1].scored
        with_beside, of_row = launched.results()
        said.append(with_beside)
        if of_row is not None:
            found += of_row.scores
            sampled = of_row if ends else None
        row.num_computed += num_new
        row.num_scored = min(row.num_computed, len(text) - 1)
    wanted = true_logits(runner, path, dtype, text).log_softmax(-1)
    near = 1e-3 if dtype == "float32" else 0.1
    assert len(found) == len(text) - 1
    for entry, logprobs, token in zip(found, wanted, text[1:], strict=False):
        assert abs(entry.logprob - float(logprobs[token])) < near
        assert len(entry.top) == 3
        for token_id, value in entry.top:
            assert abs(value - float(logprobs[token_id])) < near
        if dtype == "float32":
            assert entry.rank == int((logprobs > logprobs[token]).sum()) + 1
            assert [each for each, _ in entry.top] == logprobs.topk(3).indices.tolist()
    alone = make_sequence(text, [2], GREEDY)
    [plain] = runner.execute([ScheduledRow(alone, len(text), True)])
    assert dtype != "float32" or plain.token_id == sampled.token_id


def test_a_prefix_in_the_cache_is_as_good_as_a_prefill(tmp_path: Path) -> None:
    runner = make_runner(directory("qwen3", tmp_path), "float32")
    text = torch.randint(VOCAB, (100,)).tolist()
    first = make_sequence(text, [0, 1], GREEDY)
    [whole] = runner.execute([ScheduledRow(first, 100, True)])
    second = make_sequence(text, [0, 5], GREEDY)
    second.num_computed = 64
    [again] = runner.execute([ScheduledRow(second, 36, True)])
    assert whole is not None
    assert again is not None
    assert again.token_id == whole.token_id


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_row_that_is_not_a_number_fails_alone(family: str, tmp_path: Path) -> None:
    runner = make_runner(directory(family, tmp_path), "float32")
    with torch.inference_mode():
        runner._decoder._embedding[7] = torch.nan
    texts = [[1, 2, 3], [4, 7], [5, 6]]
    rows = [make_sequence(text, [at], GREEDY) for at, text in enumerate(texts)]
    results = runner.execute([ScheduledRow(row, len(row.token_ids), True) for row in rows])
    assert [_corrupt(each) for each in results] == [False, True, False]
    for row, each in zip(rows, results, strict=True):
        row.num_computed = len(row.token_ids)
        row.token_ids.append(7 if row is rows[1] else each.token_id if each else 0)
    results = runner.execute([ScheduledRow(row, 1, True) for row in rows])
    assert [_corrupt(each) for each in results] == [False, True, False]


def _corrupt(sampled: Sampled | None) -> bool:
    assert sampled is not None
    return sampled.corrupt


@pytest.mark.skipif(ON_CARD, reason="it has a card")
def test_a_machine_without_a_card_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="torch finds no CUDA card on this machine"):
        devices.make_runner(tmp_path, WorkerSettings(device="cuda"))


def test_a_head_that_no_kernel_takes_is_refused(tmp_path: Path) -> None:
    raw = {"model_type": "llama", **_SIZES, "head_dim": 24, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match="not of 24"):
        make_runner(tmp_path, "float32")
