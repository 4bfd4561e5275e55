"""What config.json says of a checkpoint's fp8: which schemes there are, and which of them we take.

compressed-tensors (llm-compressor writes it) and the fp8 of Hugging Face (DeepSeek, Qwen) store a
weight as e4m3 beside its scales: one for all, one per row, or one per block of 128 by 128. What
was not quantised is stored as ever, so the list of such layers need not be read. It knows names and
numbers, not files.
"""

from typing import Any

from forebay_worker.kernels.fp8 import GROUP
from forebay_worker.models.config import ModelError, Quantization, RawConfig

_BLOCK = [GROUP, GROUP]
_FORMATS = ("float-quantized", "naive-quantized", None)
_STRATEGIES = ("tensor", "channel", "block")


def quantization(raw: RawConfig) -> Quantization | None:
    """Of a config.json; None where nothing is quantised. Raises ModelError for other schemes."""
    said: RawConfig | None = raw.get("quantization_config") or raw.get("compression_config")
    if not said:
        return None
    method = said.get("quant_method")
    if method == "fp8":
        return _fine_grained(said)
    if method == "compressed-tensors":
        return _compressed(said)
    raise ModelError(
        f"config.json: quant_method {method!r} is not supported, only compressed-tensors and fp8."
    )


def _fine_grained(said: RawConfig) -> Quantization:
    block = said.get("weight_block_size")
    if block not in (None, _BLOCK):
        raise ModelError(f"config.json: weight_block_size {block} is not supported, only {_BLOCK}.")
    if said.get("fmt", "e4m3") != "e4m3":
        raise ModelError(f"config.json: fp8 of fmt {said['fmt']!r} is not supported, only e4m3.")
    return Quantization("weight_scale" if block is None else "weight_scale_inv", kv_cache=False)


def _compressed(said: RawConfig) -> Quantization:
    for name in ("sparsity_config", "transform_config"):
        if said.get(name) and said[name].get("format") != "dense":
            raise ModelError(f"config.json: compressed-tensors with {name} is not supported.")
    if said.get("format") not in _FORMATS:
        raise ModelError(
            f"config.json: compressed-tensors of format {said['format']!r} is not supported, only "
            "float-quantized."
        )
    groups: RawConfig = said.get("config_groups") or {}
    for group in groups.values():
        _check_weights(group.get("weights") or {})
    cache: dict[str, Any] | None = said.get("kv_cache_scheme")
    if cache is not None and not _is_fp8(cache):
        raise ModelError("config.json: kv_cache_scheme is not of 8-bit floats, as it must be.")
    return Quantization("weight_scale" if groups else None, kv_cache=cache is not None)


def _check_weights(weights: RawConfig) -> None:
    strategy = weights.get("strategy")
    if not _is_fp8(weights) or strategy not in _STRATEGIES:
        raise ModelError(
            "config.json: of compressed-tensors only symmetric 8-bit floats with a scale per "
            "tensor, channel or block are supported."
        )
    if strategy == "block" and weights.get("block_structure") not in (_BLOCK, "128x128"):
        raise ModelError(f"config.json: block_structure must be {_BLOCK}.")


def _is_fp8(scheme: RawConfig) -> bool:
    kind = scheme.get("num_bits"), scheme.get("type"), scheme.get("symmetric", True)
    return kind == (8, "float", True) and not scheme.get("dynamic")
