"""The card's runner under random clients, over a cache whose free blocks are NaN.

On a card ten thousand steps; in Triton's interpreter, which takes seconds for one, a few.
"""

from pathlib import Path

import pytest
import torch
from forebay_shared.settings import WorkerSettings
from forebay_worker.engine.card_runner import CardRunner
from forebay_worker.engine.grammar import Grammars
from fuzz_house import EOS, Fuzz
from tiny_checkpoint import VOCAB, make_directory

pytestmark = pytest.mark.usefixtures("few_programs")

ON_CARD = torch.cuda.is_available()
# Blocks of 16: with longer ones a row seldom asks for another, and is never preempted.
BLOCK, BLOCKS, SEATS = (16, 64, 24) if ON_CARD else (64, 12, 3)
SETTINGS = WorkerSettings(
    dtype="float32",
    block_size=BLOCK,
    max_model_len=512,
    max_num_seqs=SEATS,
    max_num_batched_tokens=256,
    max_num_prefill_tokens=128,
    kv_cache_memory_bytes=2 * 2 * 2 * 16 * 4 * BLOCK * BLOCKS,
    debug_poison_freed_blocks=True,
)


def test_random_clients_over_a_cache_of_nan(tmp_path: Path) -> None:
    home = make_directory(tmp_path)
    grammars = Grammars((home / "tokenizer.json").read_bytes(), VOCAB, (EOS,))
    device = torch.device("cuda" if ON_CARD else "cpu")
    runner = CardRunner(home, SETTINGS, device)
    if ON_CARD:
        fuzz = Fuzz(runner, grammars, most_open=40)
        assert fuzz.run(10_000, SETTINGS).total("preemptions") > 0
        fuzz.check_alone(60, SETTINGS)
    else:
        fuzz = Fuzz(runner, grammars, most_open=3, prompts=(1, 5, 17), outputs=(1, 2))
        fuzz.run(3, SETTINGS)
        fuzz.check_alone(1, SETTINGS)
    grammars.close()
