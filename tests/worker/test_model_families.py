"""Each family's logits equal transformers' in float32, however prompts are cut and batched."""

from pathlib import Path
from typing import Any

import pytest
import torch
from forebay_shared.sampling import SamplingParams
from forebay_shared.settings import WorkerSettings
from forebay_shared.wire import TokenLogprobs
from forebay_worker.engine import runner
from forebay_worker.engine.batch import ScheduledRow
from forebay_worker.engine.runner import Runner
from forebay_worker.engine.sequence import Sequence
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from tiny_models import VARIANTS, VOCAB, make_model, make_sequence

BLOCK = 4
LONGEST = 48
ALL_LOGPROBS = SamplingParams(temperature=0, logprobs=VOCAB)

prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=LONGEST)


@pytest.fixture(
    scope="module",
    params=[(kind, torch_only) for kind in VARIANTS for torch_only in (False, True)],
    ids=str,
)
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Runner, Any]:
    """A runner, compiled or in plain torch, and transformers' model of the same weights."""
    kind, torch_only = request.param
    directory: Path = tmp_path_factory.mktemp(kind)
    model = make_model(kind, directory)
    with pytest.MonkeyPatch.context() as patch:
        if torch_only:
            patch.setattr(runner, "_fused", lambda: None)
        settings = WorkerSettings(block_size=BLOCK, kv_cache_memory_bytes=2**22)
        return runner.Runner(directory, settings), model


def close(found: TokenLogprobs, expected: torch.Tensor) -> bool:
    """Whether the whole distribution lies within 1e-4 of the expected log-probabilities [VOCAB]."""
    ours = torch.empty(VOCAB)
    ours[[token for token, _ in found.top]] = torch.tensor([value for _, value in found.top])
    return torch.allclose(ours, expected, atol=1e-4)


def expected_logprobs(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0].log_softmax(-1)


def poison(engine: Runner) -> None:
    """Fills the cache with NaN: who reads a slot that is not its own gets no number."""
    engine._cache.keys.fill_(torch.nan)
    engine._cache.values.fill_(torch.nan)


def blocks_for(lengths: list[int], order: list[int]) -> list[list[int]]:
    """Distinct blocks for each length, scattered over the pool."""
    free = iter(order)
    return [[next(free) for _ in range(-(-length // BLOCK))] for length in lengths]


@given(data=st.data())
@examples(max_examples=4, deadline=None)
def test_logits_equal_transformers_however_prompts_are_cut_and_batched(
    pair: tuple[Runner, Any], data: st.DataObject
) -> None:
    engine, model = pair
    poison(engine)
    texts = data.draw(st.lists(prompts, min_size=1, max_size=4))
    order = data.draw(st.permutations(range(min(engine.num_blocks, 4 * LONGEST))))
    tables = blocks_for([len(text) for text in texts], order)
    expected = [expected_logprobs(model, text) for text in texts]
    open_rows = [
        make_sequence(text, table, ALL_LOGPROBS) for text, table in zip(texts, tables, strict=True)
    ]
    numbers = {id(sequence): at for at, sequence in enumerate(open_rows)}
    while open_rows:
        sizes = [
            data.draw(st.integers(1, len(each.token_ids) - each.num_computed)) for each in open_rows
        ]
        rows = sorted(
            (ScheduledRow(each, size, True) for each, size in zip(open_rows, sizes, strict=True)),
            key=lambda row: row.num_new > 1,
        )
        for row, sampled in zip(rows, engine.execute(rows), strict=True):
            sequence = row.sequence
            assert isinstance(sequence, Sequence)
            sequence.num_computed += row.num_new
            logprobs = expected[numbers[id(sequence)]][sequence.num_computed - 1]
            assert sampled is not None
            assert sampled.logprobs is not None
            assert close(sampled.logprobs, logprobs)
        open_rows = [each for each in open_rows if each.num_computed < len(each.token_ids)]


@given(text=prompts, tails=st.lists(prompts, min_size=1, max_size=3), shared=st.integers(0, 99))
@examples(max_examples=3, deadline=None)
def test_cached_prefix_blocks_serve_other_sequences(
    pair: tuple[Runner, Any], text: list[int], tails: list[list[int]], shared: int
) -> None:
    engine, model = pair
    poison(engine)
    tables = blocks_for([len(text)], list(range(LONGEST)))
    first = make_sequence(text, tables[0], ALL_LOGPROBS)
    engine.execute([ScheduledRow(first, len(text), samples=False)])
    kept = shared % (len(text) // BLOCK + 1)
    rows: list[ScheduledRow] = []
    for number, tail in enumerate(tails):
        own = list(range(100 + 20 * number, 120 + 20 * number))
        sequence = make_sequence(text[: kept * BLOCK] + tail, tables[0][:kept] + own, ALL_LOGPROBS)
        sequence.num_computed = kept * BLOCK
        rows.append(ScheduledRow(sequence, len(tail), samples=True))
    rows.sort(key=lambda row: row.num_new > 1)
    for row, sampled in zip(rows, engine.execute(rows), strict=True):
        assert sampled is not None
        assert sampled.logprobs is not None
        assert close(sampled.logprobs, expected_logprobs(model, row.sequence.token_ids)[-1])
