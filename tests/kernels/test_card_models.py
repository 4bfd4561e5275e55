"""On a card: each family's logits are those of transformers in float32, in chunks and batches."""

from pathlib import Path

import numpy as np
import pytest
import torch
from forebay_shared.sampling import SamplingParams
from forebay_shared.settings import WorkerSettings
from forebay_shared.wire import TokenLogprobs
from forebay_worker.engine.batch import ScheduledRow
from forebay_worker.engine.card_runner import CardRunner
from tiny_models import VARIANTS, VOCAB, make_model, make_sequence

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a card")

LENGTHS = (1, 7, 30, 64, 65, 100)
WHOLE = SamplingParams(temperature=0, logprobs=VOCAB)
# Of a log-probability: rounding of sums over 48 to 96 terms of either type.
TOLERANCE = {"float32": 2e-4, "float16": 0.1, "bfloat16": 0.5}
# In 16 bits a router may choose otherwise between nearly equal experts, and that changes all that
# comes after: nine in ten tokens are to be near. (0.07 and 0.7 on a CPU.)
TOLERANCE_OF_EXPERTS = {"float32": 2e-4, "float16": 0.2, "bfloat16": 1.0}


def distribution(found: TokenLogprobs) -> torch.Tensor:
    ours = torch.empty(VOCAB)
    ours[[token for token, _ in found.top]] = torch.tensor([value for _, value in found.top])
    return ours


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(variant: str, dtype: str, tmp_path: Path) -> None:
    model = make_model(variant, tmp_path, head_dim=16)
    settings = WorkerSettings(dtype=dtype, kv_cache_memory_bytes=2**22, max_num_seqs=8)
    runner = CardRunner(tmp_path, settings)
    texts = [torch.randint(VOCAB, (size,)).tolist() for size in LENGTHS]
    with torch.inference_mode():
        expected = [model(torch.tensor([text])).logits[0].log_softmax(-1) for text in texts]
    rows = [make_sequence(text, [2 * at, 2 * at + 1], WHOLE) for at, text in enumerate(texts)]
    numbers = {row: at for at, row in enumerate(rows)}
    distances: list[float] = []
    for chunk in (13, 1, 50, 1, 100):  # prefill, decode beside nothing, mixed, decode, the rest
        plan = [
            ScheduledRow(
                row, min(chunk if at % 2 else 1, len(row.token_ids) - row.num_computed), True
            )
            for at, row in enumerate(rows)
            if row.num_computed < len(row.token_ids)
        ]
        plan.sort(key=lambda row: row.num_new > 1)
        for row, sampled in zip(plan, runner.execute(plan), strict=True):
            row.sequence.num_computed += row.num_new
            assert sampled is not None
            assert sampled.logprobs is not None
            wanted = expected[numbers[row.sequence]][row.sequence.num_computed - 1]
            distances.append(float((distribution(sampled.logprobs) - wanted).abs().max()))
    if runner.config.experts is None:
        assert max(distances) < TOLERANCE[dtype]
    else:
        share = 1.0 if dtype == "float32" else 0.9
        assert np.quantile(distances, share) < TOLERANCE_OF_EXPERTS[dtype]
