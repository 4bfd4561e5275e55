"""Adapters on a card's runner: each row's tokens are those of the model into which its adapter is
merged, in any company; with weights of e4m3 near enough.

Without a card the same kernels run in Triton's interpreter, without graphs and in float32.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_house import ATTENTION, make_adapter
from forebay_shared.sampling import SamplingParams
from forebay_shared.settings import WorkerSettings
from forebay_worker.engine.batch import ScheduledRow
from forebay_worker.engine.card_runner import CardRunner
from kernel_house import make_sequence, run_on
from tiny_models import VOCAB, make_model

pytestmark = pytest.mark.usefixtures("few_programs")

ON_CARD = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_CARD else "cpu")
DTYPES = ["float32", "bfloat16"] if ON_CARD else ["float32"]
STEPS = 16 if ON_CARD else 2
GREEDY = SamplingParams(temperature=0)
WHOLE = SamplingParams(temperature=0, logprobs=VOCAB)
ROWS = [(5, 0), (9, -1), (66, 1), (3, 0), (1, -1)] if ON_CARD else [(5, 0), (3, -1), (9, 1)]
"""Tokens of a prompt, and the number of its adapter."""
Output = list[list[int]]


class House:
    """A model, two adapters, and each of them merged into it, by number."""

    def __init__(self, home: Path) -> None:
        self.path = home / "model"
        base = make_model("qwen3", self.path)
        self.paths = {"whole": home / "whole", "part": home / "part"}
        self.merged = {
            -1: base,
            0: make_adapter(base, self.paths["whole"], rank=8, seed=1),
            1: make_adapter(base, self.paths["part"], rank=20, modules=ATTENTION, seed=2),
        }
        self.texts = [torch.randint(VOCAB, (size,)).tolist() for size, _ in ROWS]

    def runner(self, dtype: str = "float32", *, adapts: bool = True, **more: Any) -> CardRunner:
        graphs = more.pop("graphs", True)
        settings = WorkerSettings(
            dtype=dtype,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            kv_cache_memory_bytes=8 << 20,
            max_lora_rank=32,
            **more,
        )
        paths = self.paths if adapts else {}
        return CardRunner(self.path, settings, DEVICE, graphs=graphs, adapters=paths)

    def decode(self, runner: CardRunner, chosen: list[int], chunk: int = 0) -> Output:
        """Prefills the chosen rows (in chunks, decodes beside them), then STEPS tokens of each."""
        rows = [make_sequence(self.texts[at], [2 * at, 2 * at + 1], GREEDY) for at in chosen]
        for row, at in zip(rows, chosen, strict=True):
            row.adapter = ROWS[at][1]
        return run_on(runner, rows, STEPS, chunk)

    def check(self, outputs: Output, near: float) -> None:
        """Each token is the likeliest of the merged model, or so much less likely at most."""
        for text, output, (_, number) in zip(self.texts, outputs, ROWS, strict=True):
            with torch.inference_mode():
                logits = self.merged[number](torch.tensor([text + output])).logits[0]
            wanted = logits[len(text) - 1 : -1]
            for row, token in zip(wanted, output, strict=True):
                assert float(row.max() - row[token]) <= near, (number, token)


EVERY = list(range(len(ROWS)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_are_those_of_the_merged_models(dtype: str, tmp_path: Path) -> None:
    house = House(tmp_path)
    outputs = house.decode(house.runner(dtype), EVERY)
    house.check(outputs, 1e-3 if dtype == "float32" else 0.5)


def test_chunks_company_and_graphs_change_no_token(tmp_path: Path) -> None:
    house = House(tmp_path)
    runner = house.runner()
    whole = house.decode(runner, EVERY)
    assert house.decode(runner, EVERY, chunk=4) == whole
    for at in EVERY if ON_CARD else EVERY[2:]:
        assert house.decode(runner, [at]) == [whole[at]]
    plain = [at for at, (_, number) in enumerate(ROWS) if number < 0]
    alone = house.decode(house.runner(adapts=False), plain)
    assert alone == [whole[at] for at in plain]
    if ON_CARD:
        assert house.decode(house.runner(graphs=False), EVERY) == whole


def test_adapters_go_with_weights_of_e4m3(tmp_path: Path) -> None:
    """Quantised, a row is off its merged model, and much less so than the others are off it."""
    house = House(tmp_path)
    runner = house.runner(quantization="fp8")
    rows = [make_sequence(text, [2 * at, 2 * at + 1], WHOLE) for at, text in enumerate(house.texts)]
    for row, (_, number) in zip(rows, ROWS, strict=True):
        row.adapter = number
    plan = [ScheduledRow(row, len(row.token_ids), True) for row in rows if len(row.token_ids) > 1]
    for each, sampled in zip(plan, runner.execute(plan), strict=True):
        assert sampled is not None
        assert sampled.logprobs is not None
        ours = torch.empty(VOCAB)
        ours[[token for token, _ in sampled.logprobs.top]] = torch.tensor(
            [value for _, value in sampled.logprobs.top]
        )
        ids = torch.tensor([each.sequence.token_ids])
        with torch.inference_mode():
            off = {
                number: float((model(ids).logits[0, -1].log_softmax(-1) - ours).abs().mean())
                for number, model in house.merged.items()
            }
        own = off.pop(each.sequence.adapter)
        assert own < 0.6 * min(off.values()), (own, off)
