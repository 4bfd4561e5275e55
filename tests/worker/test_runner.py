"""The runner: sizes that fit or say why not, and rows that fail alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from forebay_shared.sampling import SamplingParams
from forebay_shared.settings import WorkerSettings
from forebay_worker.engine import runner
from forebay_worker.engine.batch import ScheduledRow, flatten
from forebay_worker.engine.runner import Runner
from forebay_worker.kernels import cpu_step
from forebay_worker.models.config import ModelError
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB, make_model, make_sequence

POISON = 7
BLOCK_BYTES = 2 * 3 * 2 * 8 * 4 * 16  # keys, values; layers; KV heads; head size; float32; slots


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose embedding of one token is not a number."""
    directory = tmp_path_factory.mktemp("poisoned")
    make_model("llama", directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, path)
    return directory


@pytest.fixture(scope="module", params=["compiled", "torch"])
def engine(request: pytest.FixtureRequest, checkpoint: Path) -> Runner:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(runner, "_fused", lambda: None)
        return Runner(checkpoint, WorkerSettings(kv_cache_memory_bytes=64 * BLOCK_BYTES))


def test_a_row_of_nan_fails_alone_and_leaves_nothing_in_its_blocks(engine: Runner) -> None:
    asked = SamplingParams(temperature=0, logprobs=3)
    texts = ([1, 2, 3, 4, 5], [1, POISON, 3], [9, 9])
    each = [make_sequence(text, [at], asked) for at, text in enumerate(texts)]
    sampled = engine.execute([ScheduledRow(one, len(one.token_ids), True) for one in each])
    assert [one is not None and one.corrupt for one in sampled] == [False, True, False]
    heir = make_sequence(texts[0], [1], asked)
    assert engine.execute([ScheduledRow(heir, 3, False)]) == [None]
    heir.num_computed = 3
    [after] = engine.execute([ScheduledRow(heir, 2, True)])
    assert after is not None
    assert sampled[0] is not None
    assert after.token_id == sampled[0].token_id


def test_a_step_without_sampling_rows_only_fills_the_cache(engine: Runner) -> None:
    sequence = make_sequence([3, 4, 5, 6], [5], SamplingParams(temperature=0))
    assert engine.execute([ScheduledRow(sequence, 4, samples=False)]) == [None]


def test_the_pool_has_the_bytes_asked_for(engine: Runner) -> None:
    assert (engine.num_blocks, engine.block_size) == (64, 16)
    assert (engine.max_model_len, engine.vocab_size) == (128, VOCAB)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            WorkerSettings(kv_cache_memory_bytes=7 * BLOCK_BYTES),
            "One sequence of 128 tokens needs 0.00 GiB of KV cache, more than"
            " --kv-cache-memory-bytes: lower --max-model-len.",
        ),
        (
            WorkerSettings(max_model_len=129),
            "--max-model-len 129 is more than the model's 128 positions.",
        ),
    ],
)
def test_sizes_that_cannot_fit_say_why(
    checkpoint: Path, settings: WorkerSettings, message: str
) -> None:
    with pytest.raises(ModelError) as error:
        Runner(checkpoint, settings)
    assert str(error.value) == message


def test_random_weights_need_only_a_config(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    settings = WorkerSettings(load_format="dummy", dtype="bfloat16", kv_cache_memory_bytes=2**20)
    engine = Runner(tmp_path, settings)
    sequence = make_sequence([1, 2], [0], SamplingParams(temperature=0))
    [sampled] = engine.execute([ScheduledRow(sequence, 2, samples=True)])
    assert sampled is not None
    assert not sampled.corrupt


def test_rows_are_flattened_with_their_slots_and_bounds() -> None:
    decode = make_sequence([5, 6, 7, 8, 9], [4, 2], SamplingParams())
    decode.num_computed = 4
    chunk = make_sequence([10, 11, 12, 13, 14, 15], [7, 1, 3], SamplingParams())
    chunk.num_computed = 1
    step = flatten([ScheduledRow(decode, 1, True), ScheduledRow(chunk, 4, False)], block_size=3)
    assert step.num_decodes == 1
    assert step.token_ids.tolist() == [9, 11, 12, 13, 14]
    assert step.positions.tolist() == [4, 1, 2, 3, 4]
    assert step.kv_slots.tolist() == [7, 22, 23, 3, 4]
    assert step.starts.tolist() == [0, 1, 5]
    assert step.kv_lens.tolist() == [5, 5]
    assert step.block_tables.tolist() == [[4, 2, 0], [7, 1, 3]]
    assert step.logits_at.tolist() == [0]
    with pytest.raises(ValueError, match="more tokens than its sequence has"):
        flatten([ScheduledRow(decode, 2, True)], block_size=3)


def test_a_thread_that_fails_does_not_leave_the_others_waiting(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "physical_cores", lambda: 2)
    engine = Runner(checkpoint, WorkerSettings(kv_cache_memory_bytes=64 * BLOCK_BYTES))
    run_step = cpu_step.run_step

    def fail_in_the_second(*arguments: Any) -> None:
        if arguments[-2] == 1:
            raise MemoryError
        run_step(*arguments)

    monkeypatch.setattr(engine._decode, "_run_step", fail_in_the_second)
    row = ScheduledRow(make_sequence([3, 4], [5], SamplingParams(temperature=0)), 2, True)
    with pytest.raises(MemoryError):
        engine.execute([row])
    monkeypatch.undo()
    assert engine.execute([row])[0] is not None
