"""Qwen2: biases on q, k and v. An active sliding window is refused."""

from forebay_worker.models.config import ModelConfig, ModelError, RawConfig, base_config


def config(raw: RawConfig) -> ModelConfig:
    if raw.get("use_sliding_window"):
        raise ModelError("config.json: qwen2 with use_sliding_window is not supported.")
    return base_config(raw, qkv_bias=True)
