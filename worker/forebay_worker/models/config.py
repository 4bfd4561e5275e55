"""ModelConfig: a decoder's shape, read from config.json. It knows no family: each family's
file reads its own differences and `registry` picks it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forebay_shared.settings import StartError

RawConfig = Mapping[str, Any]


class ModelError(StartError):
    """The model cannot be served; the message is one line that says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Frequencies below a wavelength stay, far above it are divided by `factor`, between: blended.

    `kind` linear divides all of them and reads `factor` alone; llama3 is Llama 3.1's rule.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0


@dataclass(frozen=True, slots=True)
class Quantization:
    """What a checkpoint has, or is meant to have, in e4m3. `scale`: what a `….weight`'s scale is
    called in its place; None when no weight has one."""

    scale: str | None
    kv_cache: bool


@dataclass(frozen=True, slots=True)
class Experts:
    """In `layers` the MLP is `number` small ones of `intermediate_size`, of which a router picks
    `per_token` for each token, by the softmax over all; `renormalise`: theirs add up to 1."""

    layers: frozenset[int]
    number: int
    per_token: int
    intermediate_size: int
    renormalise: bool


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes in elements; `max_position` in tokens; `dtype` is the checkpoint's own."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: str
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    quantization: Quantization | None = None
    experts: Experts | None = None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def weights_are_fp8(self) -> bool:
        return self.quantization is not None and self.quantization.scale is not None

    @property
    def kv_is_fp8(self) -> bool:
        return self.quantization is not None and self.quantization.kv_cache

    def experts_of(self, layer: int) -> Experts | None:
        """None where the layer has one MLP for all tokens."""
        return self.experts if self.experts and layer in self.experts.layers else None

    def kv_bytes(self, itemsize: int) -> int:
        """Bytes of keys and values per position, over all layers."""
        return 2 * self.num_layers * self.kv_size * itemsize


def base_config(raw: RawConfig, **differences: Any) -> ModelConfig:
    """What all families share. `differences` sets the fields that one family reads otherwise.

    Raises ModelError for a missing or impossible field.
    """
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(
            f"config.json: hidden_act {raw['hidden_act']!r} is not supported, only silu."
        )
    heads = positive(raw, "num_attention_heads")
    hidden = positive(raw, "hidden_size")
    kv_heads = raw.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ModelError("config.json: num_key_value_heads must divide num_attention_heads.")
    fields: dict[str, Any] = {
        "family": raw["model_type"],
        "vocab_size": positive(raw, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": positive(raw, "intermediate_size"),
        "num_layers": positive(raw, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": raw.get("head_dim") or hidden // heads,
        "norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "max_position": positive(raw, "max_position_embeddings"),
        "tied_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "eos_token_ids": _ids(raw.get("eos_token_id")),
        "dtype": str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        **_rope(raw),
    }
    return ModelConfig(**fields | differences)


def positive(raw: RawConfig, name: str) -> int:
    """A size of config.json. Raises ModelError when it is missing or none."""
    value = raw.get(name)
    if not isinstance(value, int) or value <= 0:
        raise ModelError(f"config.json: {name} must be a positive integer.")
    return value


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _rope(raw: RawConfig) -> dict[str, Any]:
    """Older files have rope_theta and rope_scaling, newer ones both in rope_parameters."""
    rope: RawConfig = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    if float(rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1) != 1:
        raise ModelError("config.json: partial_rotary_factor is not supported.")
    return {"rope_theta": theta, "rope_scaling": _scaling(rope)}


def _scaling(rope: RawConfig) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise ModelError(
            f"config.json: rope type {kind!r} is not supported, only default, linear and llama3."
        )
    try:
        if kind == "linear":
            return RopeScaling(kind, float(rope["factor"]))
        return RopeScaling(
            kind,
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            int(rope["original_max_position_embeddings"]),
        )
    except KeyError as missing:
        raise ModelError(f"config.json: rope scaling lacks {missing.args[0]}.") from None
