"""Which families there are, and reading a model directory's config.json with the right one."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from forebay_worker.models import llama, mistral, qwen2, qwen3, qwen3_moe
from forebay_worker.models.config import ModelConfig, ModelError, RawConfig
from forebay_worker.models.quantization import quantization

FAMILIES: dict[str, Callable[[RawConfig], ModelConfig]] = {
    "llama": llama.config,
    "mistral": mistral.config,
    "qwen2": qwen2.config,
    "qwen3": qwen3.config,
    "qwen3_moe": qwen3_moe.config,
}


def read_config(directory: Path) -> ModelConfig:
    """The config of a Hugging Face directory. Raises ModelError when it is none of our families."""
    path = directory / "config.json"
    try:
        raw: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{directory} holds no config.json.") from None
    except ValueError:
        raise ModelError(f"{path} is not JSON.") from None
    family = raw.get("model_type")
    if family not in FAMILIES:
        ours = ", ".join(FAMILIES)
        raise ModelError(f"Model family {family!r} is not supported; supported are: {ours}.")
    return replace(FAMILIES[family](raw), quantization=quantization(raw))
