"""Qwen3: an RMS norm on every head of q and k, and a head size of its own."""

from forebay_worker.models.config import ModelConfig, ModelError, RawConfig, base_config


def config(raw: RawConfig) -> ModelConfig:
    if raw.get("use_sliding_window"):
        raise ModelError("config.json: qwen3 with use_sliding_window is not supported.")
    bias = bool(raw.get("attention_bias", False))
    return base_config(
        raw, qk_norm=True, head_dim=raw.get("head_dim") or 128, qkv_bias=bias, output_bias=bias
    )
