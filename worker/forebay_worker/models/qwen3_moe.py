"""Qwen3 with experts: its attention; in most layers a router picks a few of many small MLPs."""

from dataclasses import replace

from forebay_worker.models import qwen3
from forebay_worker.models.config import Experts, ModelConfig, ModelError, RawConfig, positive


def config(raw: RawConfig) -> ModelConfig:
    head_dim = raw.get("head_dim") or (
        positive(raw, "hidden_size") // positive(raw, "num_attention_heads")
    )
    plain = qwen3.config({**raw, "head_dim": head_dim})
    layers = frozenset(layer for layer in range(plain.num_layers) if _is_sparse(raw, layer))
    return replace(plain, experts=_experts(raw, layers)) if layers else plain


def _experts(raw: RawConfig, layers: frozenset[int]) -> Experts:
    # transformers 5 writes num_local_experts.
    number = positive(raw, "num_experts" if "num_experts" in raw else "num_local_experts")
    per_token = positive(raw, "num_experts_per_tok")
    if per_token > number:
        raise ModelError(
            f"config.json: num_experts_per_tok {per_token} is more than the {number} experts."
        )
    return Experts(
        layers=layers,
        number=number,
        per_token=per_token,
        intermediate_size=positive(raw, "moe_intermediate_size"),
        renormalise=bool(raw.get("norm_topk_prob", False)),
    )


def _is_sparse(raw: RawConfig, layer: int) -> bool:
    step = int(raw.get("decoder_sparse_step", 1))
    dense: list[int] = raw.get("mlp_only_layers") or []
    return layer not in dense and step > 0 and (layer + 1) % step == 0
