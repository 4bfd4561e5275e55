"""What every runner does alike, whatever its device: sizes that fit or say why not, and weights.

It knows settings and checkpoints, no kernel and no step.
"""

from pathlib import Path

import torch
from forebay_shared.settings import WorkerSettings
from torch import Tensor

from forebay_worker.engine import weights
from forebay_worker.models.config import ModelConfig, ModelError

GIB = 2**30


def dtype_of(name: str) -> torch.dtype:
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(name, torch.float32)


def max_model_len(config: ModelConfig, settings: WorkerSettings) -> int:
    if settings.max_model_len > config.max_position:
        raise ModelError(
            f"--max-model-len {settings.max_model_len} is more than the model's "
            f"{config.max_position} positions."
        )
    return settings.max_model_len or config.max_position


def load(
    checkpoint: Path,
    config: ModelConfig,
    settings: WorkerSettings,
    dtype: torch.dtype,
    device: torch.device,
    prepare: weights.Prepare = weights.as_it_is,
) -> dict[str, Tensor]:
    """The packed parameters by name, or random ones, for which config.json is enough."""
    if settings.load_format == "dummy":
        return weights.dummy(config, dtype, device, settings.seed, prepare)
    return weights.load(checkpoint, config, dtype, device, progress=True, prepare=prepare)


def refuse_fp8(settings: WorkerSettings, config: ModelConfig | None) -> None:
    """Raises ModelError where fp8 is asked for, by a flag or a checkpoint, of what has none."""
    asked = {
        "--quantization fp8": settings.quantization == "fp8",
        "--kv-cache-dtype fp8": settings.kv_cache_dtype == "fp8",
        "config.json: quantization_config": config is not None and config.quantization is not None,
    }
    for name in (name for name, is_asked in asked.items() if is_asked):
        raise ModelError(f"{name}: fp8 needs a CUDA card, and a model that generates.")


def check_pool(blocks: int, least: int, block_bytes: int, length: int, limit: str) -> None:
    """Raises ModelError when a pool of `blocks` cannot hold one sequence of `length` tokens."""
    if blocks < least:
        raise ModelError(
            f"One sequence of {length} tokens needs {least * block_bytes / GIB:.2f}"
            f" GiB of KV cache, more than {limit}: lower --max-model-len."
        )
