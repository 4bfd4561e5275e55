"""A model with experts: what config.json says of them, and what a checkpoint holds of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from forebay_worker.engine import tensor_files, weights
from forebay_worker.kernels import fp8, reference
from forebay_worker.kernels.fp8 import Fp8
from forebay_worker.kernels.reference import ExpertWeights
from forebay_worker.models.config import ModelError
from forebay_worker.models.decoder import quantize
from forebay_worker.models.registry import read_config
from fp8_checkpoints import compress, plain
from safetensors.torch import load_file, save_file
from tiny_models import make_model

CPU = torch.device("cpu")
RAW: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}


def config_of(at: Path, **changes: Any) -> Any:
    raw = {name: value for name, value in (RAW | changes).items() if value is not None}
    (at / "config.json").write_text(json.dumps(raw))
    return read_config(at)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    make_model("qwen3_moe_mixed", tmp_path)
    return tmp_path


def load(directory: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return weights.load(directory, read_config(directory), dtype, CPU, progress=False)


def stacked(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors with those of all experts of a layer in one."""
    layers = sorted({name.partition(".experts.")[0] for name in held if ".experts." in name})
    numbers = {name.partition(".experts.")[2].split(".")[0] for name in held if ".experts." in name}
    kept = {name: value for name, value in held.items() if ".experts." not in name}
    for layer in layers:
        for name, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            kept[f"{layer}.experts.{name}"] = torch.stack([
                torch.cat([held[f"{layer}.experts.{at}.{part}_proj.weight"] for part in parts])
                for at in range(len(numbers))
            ])  # fmt: skip
    return kept


def unstacked(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors with one of each matrix of each expert."""
    kept: dict[str, torch.Tensor] = {}
    for name, value in held.items():
        layer, is_expert, last = name.partition(".experts.")
        if not is_expert or last not in ("gate_up_proj", "down_proj"):
            kept[name] = value
            continue
        parts = ("gate", "up") if last == "gate_up_proj" else ("down",)
        for at, matrix in enumerate(value):
            for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                kept[f"{layer}.experts.{at}.{part}_proj.weight"] = rows.clone()
    return kept


def save_shards(directory: Path, held: dict[str, torch.Tensor], count: int = 3) -> None:
    """In place of the one file."""
    files = {name: f"model-{at % count}.safetensors" for at, name in enumerate(sorted(held))}
    for file in set(files.values()):
        save_file({name: held[name] for name in held if files[name] == file}, directory / file)
    (directory / tensor_files.SINGLE).unlink()
    (directory / tensor_files.INDEX).write_text(json.dumps({"weight_map": files}))


def test_config_says_how_many_experts_a_token_takes(tmp_path: Path) -> None:
    experts = config_of(tmp_path).experts
    assert (experts.number, experts.per_token, experts.intermediate_size) == (8, 2, 24)
    assert experts.renormalise
    assert experts.layers == frozenset(range(6))
    assert not config_of(tmp_path, norm_topk_prob=None).experts.renormalise
    newer = config_of(tmp_path, num_experts=None, num_local_experts=16)
    assert newer.experts.number == 16


def test_some_layers_stay_dense(tmp_path: Path) -> None:
    assert config_of(tmp_path, mlp_only_layers=[0, 5]).experts.layers == {1, 2, 3, 4}
    every_second = config_of(tmp_path, decoder_sparse_step=2, mlp_only_layers=[3])
    assert every_second.experts.layers == {1, 5}
    assert every_second.experts_of(1) is every_second.experts
    assert every_second.experts_of(0) is None
    assert config_of(tmp_path, decoder_sparse_step=7).experts is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": None}, "num_local_experts must be a positive integer"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size must be a positive integer"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than the 8 experts"),
        ({"use_sliding_window": True}, "use_sliding_window is not supported"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_of(tmp_path, **changes)


def test_both_layouts_load_alike_in_one_file_or_in_shards(checkpoint: Path) -> None:
    held = unstacked(load_file(checkpoint / tensor_files.SINGLE))
    loaded: list[dict[str, torch.Tensor]] = []
    for layout in (held, stacked(held)):
        save_file(layout, checkpoint / tensor_files.SINGLE)
        loaded.append(load(checkpoint))
        save_shards(checkpoint, layout)
        loaded.append(load(checkpoint))
        (checkpoint / tensor_files.INDEX).unlink()
    first, *others = loaded
    for other in others:
        assert other.keys() == first.keys()
        assert all(torch.equal(other[name], first[name]) for name in first)
    at = "model.layers.2.mlp.experts"
    assert first[f"{at}.gate_up.weight"].shape == (7, 80, 48)
    third = [held[f"{at}.3.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(first[f"{at}.gate_up.weight"][3], torch.cat(third))
    assert torch.equal(first[f"{at}.down.weight"][3], held[f"{at}.3.down_proj.weight"])
    assert "model.layers.1.mlp.gate_up.weight" in first


@pytest.mark.parametrize("strategy", ["tensor", "channel", "fine_grained"])
def test_e4m3_of_each_expert_loads_as_the_numbers_it_stands_for(
    checkpoint: Path, strategy: str
) -> None:
    save_file(
        unstacked(load_file(checkpoint / tensor_files.SINGLE)), checkpoint / tensor_files.SINGLE
    )
    compress(checkpoint, strategy)
    packed, wanted = load(checkpoint), plain(checkpoint)
    at = "model.layers.2.mlp"
    assert packed[f"{at}.gate.weight"].dtype == torch.float32
    for name, parts in (("gate_up", ("gate", "up")), ("down", ("down",))):
        values = packed[f"{at}.experts.{name}.weight"]
        scale = packed[f"{at}.experts.{name}.weight_scale"]
        assert values.dtype == torch.float8_e4m3fn
        found = fp8.dequantize(Fp8(values.flatten(0, 1), scale), torch.float32)
        every = [
            wanted[f"{at}.experts.{expert}.{part}_proj.weight"]
            for expert in range(len(values))
            for part in parts
        ]
        assert torch.equal(found, torch.cat(every))


def test_experts_become_e4m3_and_the_router_does_not(checkpoint: Path) -> None:
    def prepare(name: str, loaded: dict[str, torch.Tensor]) -> None:
        quantize(name, loaded)

    config = read_config(checkpoint)
    found = weights.load(checkpoint, config, torch.float32, CPU, progress=False, prepare=prepare)
    at = "model.layers.0.mlp"
    assert found[f"{at}.experts.down.weight"].shape == (7, 48, 40)
    assert found[f"{at}.experts.down.weight"].dtype == torch.float8_e4m3fn
    assert found[f"{at}.experts.down.weight_scale"].shape == (1, 7 * 48)
    assert found[f"{at}.gate.weight"].dtype == torch.float32


def test_a_wrong_tensor_of_an_expert_is_named(checkpoint: Path) -> None:
    held = unstacked(load_file(checkpoint / tensor_files.SINGLE))
    name = "model.layers.0.mlp.experts.4.up_proj.weight"
    save_file({**held, name: torch.zeros(39, 48)}, checkpoint / tensor_files.SINGLE)
    with pytest.raises(ModelError, match=r"experts\.4\.up_proj\.weight has shape \[39, 48\]"):
        load(checkpoint)
    del held[name]
    save_file(held, checkpoint / tensor_files.SINGLE)
    with pytest.raises(ModelError, match=r"lacks tensor .*experts\.4\.up_proj\.weight"):
        load(checkpoint)


def test_dummy_experts_have_their_shapes(checkpoint: Path) -> None:
    real = load(checkpoint)
    drawn = weights.dummy(read_config(checkpoint), torch.bfloat16, CPU, seed=1)
    assert {name: each.shape for name, each in drawn.items()} == {
        name: each.shape for name, each in real.items()
    }
    one, two = drawn["model.layers.0.mlp.experts.down.weight"][:2]
    assert not torch.equal(one, two)


def test_the_lower_of_equal_experts_is_taken_and_weights_add_up() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    weights_, chosen = reference.route(logits, 2, renormalise=True)
    assert chosen.tolist() == [[1, 2]]
    assert weights_.sum().item() == pytest.approx(1)
    plain, _ = reference.route(logits, 2, renormalise=False)
    assert plain[0].tolist() == pytest.approx(logits.softmax(-1)[0, 1:3].tolist())


def test_a_token_without_numbers_fails_alone() -> None:
    experts = ExpertWeights(
        torch.randn(4, 8), torch.randn(4, 12, 8), torch.randn(4, 8, 6), 2, renormalise=True
    )
    residual = torch.randn(3, 8)
    clean = reference.sparse_mlp(residual, torch.ones(8), 1e-6, experts)
    residual[1, 0] = torch.nan
    out = reference.sparse_mlp(residual, torch.ones(8), 1e-6, experts)
    assert bool(out[1].isnan().all())
    assert torch.allclose(out[[0, 2]], clean[[0, 2]])
