"""Small random checkpoints of each family, made by transformers, and sequences to run on them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from forebay_shared.sampling import SamplingParams
from forebay_worker.engine.sequence import Sequence

VOCAB = 20  # so that 20 log-probabilities are the whole distribution
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "eos_token_id": [1, 2],
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LINEAR = {"rope_type": "linear", "factor": 2.5, "rope_theta": 10_000.0}

# Experts that barely make it among the chosen weigh little, so a router's rounding matters little.
_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 5,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
    "head_dim": 16,
}

VARIANTS: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**_SIZES),
    "llama3_rope": lambda: transformers.LlamaConfig(
        **_SIZES, rope_parameters=_LLAMA3, attention_bias=True, mlp_bias=True
    ),
    "linear_rope_tied": lambda: transformers.LlamaConfig(
        **_SIZES | {"tie_word_embeddings": True}, rope_parameters=_LINEAR
    ),
    "qwen2": lambda: transformers.Qwen2Config(**_SIZES, use_sliding_window=False),
    "qwen3": lambda: transformers.Qwen3Config(**_SIZES, head_dim=16),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**_SIZES | _EXPERTS),
    "qwen3_moe_mixed": lambda: transformers.Qwen3MoeConfig(
        **_SIZES | _EXPERTS | {"norm_topk_prob": False, "num_experts": 7}, mlp_only_layers=[1]
    ),
    "mistral": lambda: transformers.MistralConfig(**_SIZES, head_dim=8, sliding_window=None),
}


def make_model(variant: str, directory: Path, **changes: Any) -> transformers.PreTrainedModel:
    """Saves a random model of the variant, every bias and norm drawn too, and returns it.

    `changes` are of its config.
    """
    torch.manual_seed(0)
    config = VARIANTS[variant]()
    for name, value in changes.items():
        setattr(config, name, value)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, 0, 0.5)
        elif "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    model.save_pretrained(directory)
    return model.eval()


def make_sequence(
    token_ids: list[int], blocks: list[int], sampling: SamplingParams, seed: int = 0
) -> Sequence:
    """A sequence whose prompt is `token_ids`, at these blocks."""
    sequence = Sequence(
        request_id="request",
        attempt=1,
        gateway="gateway",
        index=0,
        token_ids=list(token_ids),
        num_prompt=len(token_ids),
        sampling=sampling,
        seed=seed,
        limit=10**6,
        stop_ids=frozenset(),
    )
    sequence.block_table = blocks
    return sequence
