"""Llama: the plain decoder. Optional biases are named in the config."""

from forebay_worker.models.config import ModelConfig, RawConfig, base_config


def config(raw: RawConfig) -> ModelConfig:
    bias = bool(raw.get("attention_bias", False))
    return base_config(
        raw, qkv_bias=bias, output_bias=bias, mlp_bias=bool(raw.get("mlp_bias", False))
    )
