"""On a card: sequences come, go and are cancelled for 10,000 steps over a cache of NaN.

What a block held is NaN from the moment it is free, so who reads a position that is not its own
fails. In the end some requests are asked again alone: the same tokens.
"""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from engine_fakes import Recorded, make_submit
from forebay_shared.sampling import SamplingParams
from forebay_shared.settings import WorkerSettings
from forebay_shared.wire import Delta, Done, Failed, Submit
from forebay_worker.engine.card_runner import CardRunner
from forebay_worker.engine.core import EngineCore
from forebay_worker.engine.intake import Limits

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a card"),
]

STEPS, VOCAB, BLOCKS = 10_000, 512, 40
_CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


class Poisoned(list[int]):
    """The free blocks; one that comes in is filled with NaN, behind the steps in flight."""

    def __init__(self, blocks: Iterable[int], runner: CardRunner) -> None:
        super().__init__(blocks)
        self._runner = runner
        self.append_all(blocks)

    def append_all(self, blocks: Iterable[int]) -> None:
        with torch.inference_mode():
            for block in blocks:
                self._runner._cache.keys[:, block] = torch.nan
                self._runner._cache.values[:, block] = torch.nan

    def append(self, block: int, /) -> None:
        super().append(block)
        self.append_all([block])


def options(rng: random.Random) -> SamplingParams:
    every: dict[str, Any] = {
        "max_tokens": rng.choice([1, 7, 30, 200]),
        "seed": rng.randrange(2**32),
    }
    if rng.random() < 0.3:
        return SamplingParams(temperature=0, **every)
    return SamplingParams(
        temperature=rng.uniform(0.3, 1.5),
        top_k=rng.choice([0, 0, 1, 20]),
        top_p=rng.choice([1, 1, 0.9]),
        min_p=rng.choice([0, 0, 0.05]),
        stop_token_ids=(rng.randrange(VOCAB),),
        min_tokens=rng.choice([0] * 20 + [3]),
        repetition_penalty=rng.choice([1.0] * 40 + [1.2]),
        presence_penalty=rng.choice([0.0] * 40 + [0.5]),
        logit_bias={3: 2.0} if rng.random() < 0.02 else {},
        logprobs=rng.choice([None] * 40 + [3]),
        **every,
    )


def request(rng: random.Random, name: str, shared: list[int]) -> Submit:
    prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 5, 40, 64, 130]))]
    if rng.random() < 0.4:
        prompt = shared + prompt
    return make_submit(name, prompt, sampling=options(rng), n=rng.choice([1, 1, 1, 2]))


def read(core: EngineCore, tokens: dict[tuple[str, int], list[int]], ended: set[str]) -> None:
    for _, event in core.take_events():
        assert not isinstance(event, Failed), event
        if isinstance(event, Delta):
            tokens.setdefault((event.request_id, event.index), []).extend(event.token_ids)
        if isinstance(event, Done):
            ended.add(event.request_id)


def test_ten_thousand_steps_over_a_cache_of_nan(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG))
    settings = WorkerSettings(
        dtype="float32",
        load_format="dummy",
        max_num_seqs=24,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=2 * 2 * 2 * 16 * 4 * 64 * BLOCKS,
    )
    runner, rng = CardRunner(tmp_path, settings), random.Random(0)
    recorder = Recorded()
    core = EngineCore(runner, Limits.of(runner), settings, recorder)
    core.blocks._blank = Poisoned(core.blocks._blank, runner)
    shared = [rng.randrange(VOCAB) for _ in range(150)]
    tokens: dict[tuple[str, int], list[int]] = {}
    ended: set[str] = set()
    cancelled: set[str] = set()
    submits: list[Submit] = []
    for step in range(STEPS):
        while len(core.scheduler.running) + len(core.scheduler.waiting) < rng.randint(0, 40):
            submits.append(request(rng, f"r{len(submits)}", shared))
            core.submit(submits[-1], monotonic())
        if rng.random() < 0.05 and submits:
            name = rng.choice(submits[-40:]).request_id
            cancelled.add(name)
            core.cancel(name, 1)
        core.step()
        read(core, tokens, ended)
        if step % 500 == 0:
            core.blocks.check_integrity(core.scheduler.running)
    while not core.idle:
        core.step()
    read(core, tokens, ended)
    core.blocks.check_integrity()
    assert core.blocks.num_free == runner.num_blocks
    assert recorder.total("preemptions") > 0
    whole = [each for each in submits if each.request_id not in cancelled]
    for each in rng.sample(whole, 60):
        alone = EngineCore(runner, Limits.of(runner), settings, Recorded())
        answer: dict[tuple[str, int], list[int]] = {}
        alone.submit(each, monotonic())
        while not alone.idle:
            alone.step()
        read(alone, answer, set())
        for key, ids in answer.items():
            assert tokens[key] == ids
