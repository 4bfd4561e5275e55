"""Mistral: Llama without biases. An active sliding window is refused."""

from forebay_worker.models.config import ModelConfig, ModelError, RawConfig, base_config


def config(raw: RawConfig) -> ModelConfig:
    plain = base_config(raw)
    window = raw.get("sliding_window")
    if window is not None and window < plain.max_position:
        raise ModelError(
            f"config.json: mistral with sliding_window {window} is not supported, only null."
        )
    return plain
