"""Ten thousand steps of a small model on a CPU, over a cache whose free blocks are NaN."""

from pathlib import Path

import pytest
from forebay_shared.settings import WorkerSettings
from forebay_worker.engine import runner
from forebay_worker.engine.grammar import Grammars
from forebay_worker.engine.runner import Runner
from fuzz_house import EOS, Fuzz
from tiny_checkpoint import VOCAB, make_directory

SETTINGS = WorkerSettings(
    block_size=8,
    max_model_len=256,
    kv_cache_memory_bytes=2 * 2 * 2 * 16 * 4 * 8 * 48,  # 48 blocks: preemptions are common
    max_num_seqs=8,
    max_num_batched_tokens=48,
    max_num_prefill_tokens=24,
    debug_poison_freed_blocks=True,
)


@pytest.mark.timeout(1800)  # some 50 s of a quiet core
def test_ten_thousand_steps_over_a_cache_of_nan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "physical_cores", lambda: 1)  # two would mostly wait for each other
    home = make_directory(tmp_path)
    grammars = Grammars((home / "tokenizer.json").read_bytes(), VOCAB, (EOS,))
    fuzz = Fuzz(Runner(home, SETTINGS), grammars, most_open=10)
    recorder = fuzz.run(10_000, SETTINGS)
    assert recorder.total("preemptions") > 0
    assert recorder.total("prefix_hits") > 0
    fuzz.check_alone(60, SETTINGS)
    grammars.close()
