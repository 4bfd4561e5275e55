"""Adapters for tests: random ones in PEFT's files, and a model with one merged in by hand."""

import json
import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def make_adapter(
    model: transformers.PreTrainedModel,
    directory: Path,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    modules: tuple[str, ...] = ALL,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> transformers.PreTrainedModel:
    """Writes a random adapter over some modules of every layer, as PEFT does; returns the model
    with it merged in."""
    noise = torch.Generator().manual_seed(seed)
    merged, tensors = deepcopy(model), dict[str, torch.Tensor]()
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    for name, module in merged.named_modules():
        if name.rpartition(".")[2] not in modules or not isinstance(module, torch.nn.Linear):
            continue
        rows, columns = module.weight.shape
        a = (torch.randn(rank, columns, generator=noise) / math.sqrt(columns)).to(dtype)
        b = (torch.randn(rows, rank, generator=noise) / math.sqrt(rank)).to(dtype)
        module.weight.data += scale * b.float() @ a.float()
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    write(directory, tensors, r=rank, lora_alpha=alpha, target_modules=list(modules), **config)
    return merged


def write(directory: Path, tensors: dict[str, torch.Tensor], **config: Any) -> None:
    """The two files of an adapter; `config` over what PEFT writes of a plain one."""
    plain = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "fan_in_fan_out": False,
        "modules_to_save": None, "use_dora": False, "use_rslora": False, "rank_pattern": {},
        "alpha_pattern": {}, "layers_to_transform": None, "lora_dropout": 0.05,
        "init_lora_weights": True, "base_model_name_or_path": "base",
    }  # fmt: skip
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(plain | config))
    save_file(tensors, directory / "adapter_model.safetensors")
