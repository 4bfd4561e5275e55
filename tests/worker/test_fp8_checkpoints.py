"""fp8 checkpoints: every scheme loads as the numbers it stands for; what is not taken is named."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from forebay_shared.settings import WorkerSettings
from forebay_worker.engine import devices, fp8_weights, weights
from forebay_worker.kernels import fp8
from forebay_worker.kernels.fp8 import Fp8
from forebay_worker.models.config import ModelError
from forebay_worker.models.registry import read_config
from forebay_worker.pooling.files import pooling_files
from forebay_worker.pooling.runner import TorchVectors
from fp8_checkpoints import compress, plain, scheme
from safetensors.torch import load_file, save_file
from tiny_models import make_model

CPU = torch.device("cpu")
LAYER = "model.layers.1"
SIZES = {"hidden_size": 144, "intermediate_size": 200, "num_attention_heads": 6}
"""So that blocks of 128 end within rows, columns, and the parts of a packed weight."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    make_model("qwen3", tmp_path, **SIZES)
    return tmp_path


def load(directory: Path) -> dict[str, torch.Tensor]:
    return weights.load(directory, read_config(directory), torch.float32, CPU, progress=False)


def change(directory: Path, **tensors: torch.Tensor | None) -> None:
    """Replaces tensors of the checkpoint's file; None removes one."""
    path = directory / "model.safetensors"
    held = load_file(path) | {name.replace("__", "."): value for name, value in tensors.items()}
    save_file({name: value for name, value in held.items() if value is not None}, path)


def edit_config(directory: Path, said: dict[str, Any]) -> None:
    path = directory / "config.json"
    raw = json.loads(path.read_text()) | {"quantization_config": said}
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block", "fine_grained"])
def test_each_scheme_loads_as_the_numbers_it_stands_for(checkpoint: Path, strategy: str) -> None:
    before = load(checkpoint)
    compress(checkpoint, strategy)
    packed, wanted = load(checkpoint), plain(checkpoint)
    parts = {
        "self_attn.qkv": [f"self_attn.{part}_proj" for part in "qkv"],
        "mlp.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "mlp.down_proj": ["mlp.down_proj"],
    }
    for name, of in parts.items():
        at = f"{LAYER}.{name}.weight"
        found = Fp8(packed[at], packed[f"{at}_scale"])
        assert found.values.dtype == torch.float8_e4m3fn
        assert len(found.scale) == (2 if "block" in strategy or "fine" in strategy else 1)
        expected = torch.cat([wanted[f"{LAYER}.{part}.weight"] for part in of])
        assert torch.equal(fp8.dequantize(found, torch.float32), expected)
        assert float((expected - before[at]).norm() / before[at].norm()) < 0.04
    assert torch.equal(packed["lm_head.weight"], before["lm_head.weight"])
    assert {name for name in packed if not name.endswith("_scale")} == before.keys()


def test_scales_of_keys_and_values_are_per_layer_and_per_head(checkpoint: Path) -> None:
    compress(checkpoint, "channel", kv=(0.5, 0.25))
    heads = torch.tensor([0.1, 0.2])[:, None, None]
    change(checkpoint, model__layers__2__self_attn__v_scale=heads)
    change(
        checkpoint,
        model__layers__0__self_attn__k_scale=None,
        model__layers__0__self_attn__v_scale=None,
        model__layers__0__self_attn__k_proj__output_scale=torch.tensor(0.75),
    )
    packed = load(checkpoint)
    found = [packed[fp8_weights.kv_scales_of(layer)] for layer in range(3)]
    wanted = [[[0.75, 0.75], [1, 1]], [[0.5, 0.5], [0.25, 0.25]], [[0.5, 0.5], [0.1, 0.2]]]
    assert torch.allclose(torch.stack(found), torch.tensor(wanted))
    assert read_config(checkpoint).kv_is_fp8


def test_a_layer_that_is_left_as_it_was_loads_so(checkpoint: Path) -> None:
    name = f"{LAYER}.mlp.down_proj.weight"
    original = load_file(checkpoint / "model.safetensors")[name]
    compress(checkpoint, "channel")
    change(checkpoint, **{name: original, f"{name}_scale": None})
    packed = load(checkpoint)
    assert torch.equal(packed[name], original)
    assert f"{name}_scale" not in packed


ONE = torch.ones(1)
V_PROJ = "model__layers__0__self_attn__v_proj__weight"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {f"{V_PROJ}_scale": None},
            "The checkpoint lacks tensor model.layers.0.self_attn.v_proj.weight_scale.",
        ),
        (
            {f"{V_PROJ}_scale": torch.ones(3, 2)},
            "Tensor model.layers.0.self_attn.v_proj.weight_scale has shape [3, 2], which is no "
            "scale of 32x144.",
        ),
        (
            {f"{V_PROJ}_scale": ONE / 0},
            "Tensor model.layers.0.self_attn.v_proj.weight_scale holds a scale that is no number.",
        ),
        (
            {V_PROJ: torch.zeros(32, 144)},
            "Of tensors model.layers.0.self_attn.k_proj.weight and "
            "model.layers.0.self_attn.q_proj.weight and model.layers.0.self_attn.v_proj.weight "
            "only some are e4m3: they must be alike.",
        ),
        (
            {V_PROJ: torch.zeros(8, 144).to(torch.float8_e4m3fn)},
            "Tensor model.layers.0.self_attn.v_proj.weight has shape [8, 144], not [32, 144].",
        ),
        (
            {"lm_head__weight": torch.zeros(20, 144).to(torch.float8_e4m3fn)},
            "Tensor lm_head.weight is e4m3: only matrices of layers may be, and config.json says "
            "so.",
        ),
        (
            {"model__layers__0__input_layernorm__weight": ONE.expand(144).to(torch.float8_e4m3fn)},
            "Tensor model.layers.0.input_layernorm.weight is e4m3: only matrices of layers may be, "
            "and config.json says so.",
        ),
        (
            {"model__layers__0__self_attn__k_scale": torch.ones(3)},
            "Tensor model.layers.0.self_attn.k_scale has 3 numbers, not 1 or 2.",
        ),
        (
            {"model__layers__0__self_attn__k_scale": 0 * ONE},
            "Tensor model.layers.0.self_attn.k_scale holds a scale that is not above 0.",
        ),
        (
            {f"{V_PROJ}_zero_point": ONE},
            "The checkpoint holds tensor model.layers.0.self_attn.v_proj.weight_zero_point, which "
            "qwen3 lacks.",
        ),
    ],
)
def test_a_wrong_tensor_is_named(
    checkpoint: Path, tensors: dict[str, torch.Tensor | None], message: str
) -> None:
    compress(checkpoint, "channel")
    change(checkpoint, **tensors)
    with pytest.raises(ModelError) as error:
        load(checkpoint)
    assert str(error.value) == message


def test_e4m3_of_which_the_config_says_nothing_is_refused(checkpoint: Path) -> None:
    compress(checkpoint, "channel")
    edit_config(checkpoint, {})
    change(checkpoint, **{f"{name}": None for name in _scales(checkpoint)})
    with pytest.raises(ModelError, match="is e4m3: only matrices of layers may be, and config"):
        load(checkpoint)


def _scales(directory: Path) -> list[str]:
    held = load_file(directory / "model.safetensors")
    return [name.replace(".", "__") for name in held if name.endswith("_scale")]


def _with_weights(**changes: object) -> dict[str, Any]:
    said = scheme("channel")
    said["config_groups"]["group_0"]["weights"] |= changes
    return said


ONLY_FP8 = (
    "config.json: of compressed-tensors only symmetric 8-bit floats with a scale per tensor, "
    "channel or block are supported."
)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"quant_method": "gptq", "bits": 4},
            "config.json: quant_method 'gptq' is not supported, only compressed-tensors and fp8.",
        ),
        (
            scheme("channel") | {"format": "pack-quantized"},
            "config.json: compressed-tensors of format 'pack-quantized' is not supported, only "
            "float-quantized.",
        ),
        (_with_weights(num_bits=4), ONLY_FP8),
        (_with_weights(type="int"), ONLY_FP8),
        (_with_weights(symmetric=False), ONLY_FP8),
        (_with_weights(strategy="group", group_size=32), ONLY_FP8),
        (
            _with_weights(strategy="block", block_structure=[64, 64]),
            "config.json: block_structure must be [128, 128].",
        ),
        (
            scheme("channel") | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "config.json: compressed-tensors with sparsity_config is not supported.",
        ),
        (
            scheme("channel") | {"kv_cache_scheme": {"num_bits": 8, "type": "int"}},
            "config.json: kv_cache_scheme is not of 8-bit floats, as it must be.",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [1, 128]},
            "config.json: weight_block_size [1, 128] is not supported, only [128, 128].",
        ),
        (
            {"quant_method": "fp8", "fmt": "e5m2"},
            "config.json: fp8 of fmt 'e5m2' is not supported, only e4m3.",
        ),
    ],
)
def test_a_scheme_that_is_not_taken_is_named(
    checkpoint: Path, said: dict[str, Any], message: str
) -> None:
    edit_config(checkpoint, said)
    with pytest.raises(ModelError) as error:
        read_config(checkpoint)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"quantization": "fp8"}, "--quantization fp8"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
        ({}, "config.json: quantization_config"),
    ],
)
@pytest.mark.parametrize("pools", [False, True])
def test_fp8_without_a_card_is_refused_in_one_line(
    checkpoint: Path, flags: dict[str, Any], name: str, pools: bool
) -> None:
    if not flags:
        compress(checkpoint, "channel")
    settings = WorkerSettings(device="cpu", **flags)
    make: Callable[[], object] = partial(devices.make_runner, checkpoint, settings)
    if pools:
        make = partial(TorchVectors, checkpoint, pooling_files(checkpoint), settings)
    with pytest.raises(ModelError) as error:
        make()
    assert str(error.value) == f"{name}: fp8 needs a CUDA card, and a model that generates."
