"""Loading: sharded, tied and random weights give the right model; a flaw is named in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from forebay_worker.engine import tensor_files, weights
from forebay_worker.models.config import ModelError
from forebay_worker.models.registry import read_config
from safetensors.torch import load_file, save_file
from tiny_models import make_model

CPU = torch.device("cpu")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    make_model("qwen3", tmp_path)
    return tmp_path


def load(directory: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return weights.load(directory, read_config(directory), dtype, CPU, progress=False)


def change(directory: Path, **tensors: torch.Tensor | None) -> None:
    """Replaces tensors of the checkpoint's file; None removes one."""
    path = directory / tensor_files.SINGLE
    held = load_file(path) | {name.replace("__", "."): value for name, value in tensors.items()}
    save_file({name: value for name, value in held.items() if value is not None}, path)


def edit_config(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_parts_are_packed_in_order(checkpoint: Path) -> None:
    held = load_file(checkpoint / tensor_files.SINGLE)
    layer = "model.layers.1"
    packed = load(checkpoint)
    parts = [held[f"{layer}.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(packed[f"{layer}.self_attn.qkv.weight"], torch.cat(parts))
    halves = [held[f"{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(packed[f"{layer}.mlp.gate_up.weight"], torch.cat(halves))


def test_shards_give_what_one_file_gives(checkpoint: Path) -> None:
    whole = load(checkpoint)
    single = checkpoint / tensor_files.SINGLE
    held = load_file(single)
    names = sorted(held)
    files = {name: f"model-{at % 3}.safetensors" for at, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: held[name] for name in names if files[name] == file}, checkpoint / file)
    single.unlink()
    (checkpoint / tensor_files.INDEX).write_text(json.dumps({"weight_map": files}))
    sharded = load(checkpoint)
    assert sharded.keys() == whole.keys()
    assert all(torch.equal(sharded[name], whole[name]) for name in whole)


def test_a_tied_head_is_not_loaded_even_when_stored(checkpoint: Path) -> None:
    edit_config(checkpoint, tie_word_embeddings=True)
    assert "lm_head.weight" in load_file(checkpoint / tensor_files.SINGLE)
    assert "lm_head.weight" not in load(checkpoint)


def test_dummy_weights_have_every_shape_and_follow_the_seed(checkpoint: Path) -> None:
    config = read_config(checkpoint)
    real = load(checkpoint)
    one, same, other = (weights.dummy(config, torch.bfloat16, CPU, seed=seed) for seed in (1, 1, 2))
    assert {name: each.shape for name, each in one.items()} == {
        name: each.shape for name, each in real.items()
    }
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_stored_type_is_that_of_all_matrices(checkpoint: Path, dtype: torch.dtype) -> None:
    path = checkpoint / tensor_files.SINGLE
    save_file(
        {
            name: value if value.ndim == 1 else value.to(dtype)
            for name, value in load_file(path).items()
        },
        path,
    )
    assert weights.stored_dtype(checkpoint) == dtype
    change(checkpoint, lm_head__weight=torch.zeros(20, 48))
    assert weights.stored_dtype(checkpoint) == torch.float32


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"model__norm__weight": None}, "The checkpoint lacks tensor model.norm.weight."),
        (
            {"model__extra": torch.zeros(2)},
            "The checkpoint holds tensor model.extra, which qwen3 lacks.",
        ),
        (
            {"model__norm__weight": torch.zeros(7)},
            "Tensor model.norm.weight has shape [7], not [48].",
        ),
        (
            {"model__norm__weight": torch.zeros(48, dtype=torch.int8)},
            "Tensor model.norm.weight holds torch.int8, not floating point numbers.",
        ),
    ],
)
def test_a_wrong_tensor_is_named(
    checkpoint: Path, tensors: dict[str, torch.Tensor | None], message: str
) -> None:
    change(checkpoint, **tensors)
    with pytest.raises(ModelError) as error:
        load(checkpoint)
    assert str(error.value) == message


def test_a_broken_or_missing_file_is_named(checkpoint: Path) -> None:
    path = checkpoint / tensor_files.SINGLE
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors is not a whole safetensors file"):
        load(checkpoint)
    path.unlink()
    with pytest.raises(ModelError, match=r"lacks model\.safetensors"):
        load(checkpoint)
    (checkpoint / tensor_files.INDEX).write_text("[]")
    with pytest.raises(ModelError, match="is not a safetensors index"):
        load(checkpoint)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model_type": "gpt2"},
            "Model family 'gpt2' is not supported; supported are: "
            "llama, mistral, qwen2, qwen3, qwen3_moe.",
        ),
        ({"hidden_size": 0}, "config.json: hidden_size must be a positive integer."),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2}},
            "config.json: rope type 'yarn' is not supported, only default, linear and llama3.",
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 2}},
            "config.json: rope scaling lacks low_freq_factor.",
        ),
        (
            {"model_type": "mistral", "sliding_window": 64},
            "config.json: mistral with sliding_window 64 is not supported, only null.",
        ),
        (
            {"use_sliding_window": True},
            "config.json: qwen3 with use_sliding_window is not supported.",
        ),
    ],
)
def test_a_config_that_is_not_ours_says_why(
    checkpoint: Path, fields: dict[str, Any], message: str
) -> None:
    edit_config(checkpoint, **fields)
    with pytest.raises(ModelError) as error:
        read_config(checkpoint)
    assert str(error.value) == message


def test_older_and_newer_config_fields_mean_the_same(checkpoint: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 64}
    edit_config(checkpoint, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    newer = read_config(checkpoint)
    edit_config(
        checkpoint,
        rope_parameters=None,
        rope_theta=5e5,
        rope_scaling={"type": "llama3", **scaling},
    )
    assert read_config(checkpoint) == newer
