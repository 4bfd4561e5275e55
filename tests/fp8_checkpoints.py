"""Small checkpoints as llm-compressor and DeepSeek's tools write them."""

import json
from pathlib import Path
from typing import Any

import torch
from forebay_worker.models.decoder import parameters
from forebay_worker.models.registry import read_config
from safetensors.torch import load_file, save_file

BLOCK = 128
_FILE = "model.safetensors"


def write_plain(directory: Path, **raw: Any) -> None:
    """A random float32 checkpoint of a config.json."""
    (directory / "config.json").write_text(json.dumps(raw))
    tensors: dict[str, torch.Tensor] = {}
    for each in parameters(read_config(directory)):
        for part, rows in zip(each.parts, each.sizes, strict=True):
            if each.columns is None:
                tensors[part] = torch.rand(rows) + 0.5
            else:
                tensors[part] = torch.randn(rows, each.columns) * each.columns**-0.5
    save_file(tensors, directory / _FILE)


def scheme(strategy: str) -> dict[str, Any]:
    """A compressed-tensors `quantization_config` of fp8 weights with dynamic inputs."""
    weights: dict[str, Any] = {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False,
        "group_size": None,
    }  # fmt: skip
    if strategy == "block":
        weights["block_structure"] = [BLOCK, BLOCK]
    inputs = {**weights, "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": inputs,
                "output_activations": None,
            }
        },
    }


def compress(directory: Path, strategy: str, *, kv: tuple[float, float] | None = None) -> None:
    """Quantises the matrices of a directory's layers in place: by tensor, channel, block, or as
    `fine_grained` (DeepSeek). `kv` are the scales of every layer's keys and values."""
    tensors = load_file(directory / _FILE)
    fine = strategy == "fine_grained"
    for name, weight in list(tensors.items()):
        if ".layers." not in name or weight.ndim != 2 or name.endswith("mlp.gate.weight"):
            continue
        values, scale = quantized(weight.float(), "block" if fine else strategy)
        tensors[name] = values
        tensors[name + ("_scale_inv" if fine else "_scale")] = scale
        if strategy == "tensor":
            tensors[name.replace("weight", "input_scale")] = torch.tensor([0.02])
    said = scheme(strategy)
    if fine:
        said = {
            "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
            "weight_block_size": [BLOCK, BLOCK],
        }  # fmt: skip
    if kv is not None:
        said["kv_cache_scheme"] = {
            "num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor",
            "dynamic": False,
        }  # fmt: skip
        layers = {name.split(".")[2] for name in tensors if ".layers." in name}
        for layer in layers:
            for side, scale in zip("kv", kv, strict=True):
                at = f"model.layers.{layer}.self_attn.{side}_scale"
                tensors[at] = torch.tensor([scale])
    save_file(tensors, directory / _FILE)
    path = directory / "config.json"
    raw = json.loads(path.read_text()) | {"quantization_config": said}
    path.write_text(json.dumps(raw))


def quantized(weight: torch.Tensor, strategy: str) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 and its scale as the format has it: [1], [rows, 1] or [row blocks, column blocks]."""
    if strategy == "block":
        rows, columns = (-(-size // BLOCK) for size in weight.shape)
        room = torch.zeros(rows * BLOCK, columns * BLOCK)
        room[: weight.shape[0], : weight.shape[1]] = weight
        largest = room.view(rows, BLOCK, columns, BLOCK).abs().amax((1, 3))
        scale = largest.clamp(min=1e-12) / 448
        wide = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        wide = wide[: weight.shape[0], : weight.shape[1]]
    elif strategy == "channel":
        scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 448
        wide = scale
    else:
        scale = weight.abs().max().clamp(min=1e-12)[None] / 448
        wide = scale
    return (weight / wide).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def plain(directory: Path) -> dict[str, torch.Tensor]:
    """A compressed directory's tensors, multiplied out in float32, without their scales."""
    tensors = load_file(directory / _FILE)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float8_e4m3fn:
            if "scale" not in name:
                found[name] = tensor.float()
            continue
        scale = tensors.get(f"{name}_scale", tensors.get(f"{name}_scale_inv"))
        assert scale is not None
        if scale.ndim == 2 and len(scale) != len(tensor):
            scale = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            scale = scale[: tensor.shape[0], : tensor.shape[1]]
        found[name] = tensor.float() * scale
    return found
