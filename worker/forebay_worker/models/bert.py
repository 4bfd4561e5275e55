"""Bert and its kin: encoders whose tokens all see each other, over packed inputs of any lengths.

It knows shapes and names of weights, not files; it reads ids and lengths, not requests. Products
run over the tokens that there are; only attention is padded, within groups of nearly equal lengths.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from forebay_worker.models.config import ModelError, RawConfig
from forebay_worker.models.decoder import Parameter

FAMILIES = ("bert", "roberta", "xlm-roberta")
UNUSED = (
    "embeddings.position_ids",
    "pooler.dense.weight",
    "pooler.dense.bias",
    "cls.predictions.bias",
    "cls.predictions.transform.dense.weight",
    "cls.predictions.transform.dense.bias",
    "cls.predictions.transform.LayerNorm.weight",
    "cls.predictions.transform.LayerNorm.bias",
    "cls.predictions.decoder.weight",
    "cls.predictions.decoder.bias",
    "cls.seq_relationship.weight",
    "cls.seq_relationship.bias",
    "lm_head.bias",
    "lm_head.decoder.weight",
    "lm_head.decoder.bias",
    "lm_head.dense.weight",
    "lm_head.dense.bias",
    "lm_head.layer_norm.weight",
    "lm_head.layer_norm.bias",
)
"""Heads of pre-training, which checkpoints carry along."""

_STEP = 1.125
"""Lengths of one attention group differ by this factor at most, or by 4 tokens."""


@dataclass(frozen=True, slots=True)
class BertConfig:
    """Sizes in elements; `max_position` in tokens; positions count from `first_position`."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    position_rows: int
    first_position: int
    type_rows: int
    norm_eps: float
    activation: str

    @property
    def max_position(self) -> int:
        return self.position_rows - self.first_position


def config(raw: RawConfig) -> BertConfig:
    """Reads config.json. Raises ModelError for a missing field or what is not supported."""
    family = str(raw.get("model_type"))
    kind = raw.get("position_embedding_type", "absolute")
    if kind not in (None, "absolute"):
        raise ModelError(f"config.json: position_embedding_type {kind!r} is not supported.")
    activation = str(raw.get("hidden_act", "gelu"))
    if activation not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ModelError(f"config.json: hidden_act {activation!r} is not supported, only {known}.")
    if raw.get("is_decoder"):
        raise ModelError("config.json: an encoder with is_decoder is not supported.")
    found = BertConfig(
        family=family,
        vocab_size=_positive(raw, "vocab_size"),
        hidden_size=_positive(raw, "hidden_size"),
        intermediate_size=_positive(raw, "intermediate_size"),
        num_layers=_positive(raw, "num_hidden_layers"),
        num_heads=_positive(raw, "num_attention_heads"),
        position_rows=_positive(raw, "max_position_embeddings"),
        # Roberta's positions begin behind that of padding.
        first_position=0 if family == "bert" else int(raw.get("pad_token_id", 1)) + 1,
        type_rows=_positive(raw, "type_vocab_size"),
        norm_eps=float(raw.get("layer_norm_eps", 1e-12)),
        activation=activation,
    )
    if found.hidden_size % found.num_heads:
        raise ModelError("config.json: num_attention_heads must divide hidden_size.")
    return found


def known_as(name: str) -> str:
    """The name of a stored tensor without the prefix of the model around the encoder."""
    for family in FAMILIES:
        name = name.removeprefix(f"{family.replace('xlm-', '')}.")
    return name


def parameters(config: BertConfig) -> Iterator[Parameter]:
    """Every parameter of the encoder, in the order of the layers."""
    hidden, inner = config.hidden_size, config.intermediate_size
    rows = {
        "word_embeddings": config.vocab_size,
        "position_embeddings": config.position_rows,
        "token_type_embeddings": config.type_rows,
    }
    for kind, number in rows.items():
        name = f"embeddings.{kind}.weight"
        yield Parameter(name, (name,), (number,), hidden)
    yield from _vectors("embeddings.LayerNorm", hidden)
    for layer in range(config.num_layers):
        at = f"encoder.layer.{layer}"
        qkv = tuple(f"{at}.attention.self.{part}" for part in ("query", "key", "value"))
        yield from _linear(f"{at}.qkv", qkv, (hidden,) * 3, hidden)
        yield from _linear(f"{at}.attention.output.dense", None, (hidden,), hidden)
        yield from _vectors(f"{at}.attention.output.LayerNorm", hidden)
        yield from _linear(f"{at}.intermediate.dense", None, (inner,), hidden)
        yield from _linear(f"{at}.output.dense", None, (hidden,), inner)
        yield from _vectors(f"{at}.output.LayerNorm", hidden)


class Bert:
    """Embeddings and layers over packed inputs. `weights` holds each of `parameters(config)`."""

    def __init__(self, config: BertConfig, weights: Mapping[str, Tensor]) -> None:
        self._config = config
        self._weights = weights
        embeddings = weights["embeddings.token_type_embeddings.weight"][0]
        rows = weights["embeddings.position_embeddings.weight"][config.first_position :]
        self._positions = rows + embeddings  # every token is of the first segment
        self._activation = _ACTIVATIONS[config.activation]

    def __call__(self, token_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """The final states [T, hidden] of inputs that lie one after the other, sorted by length:
        token_ids [T] int64, T the sum of `lengths`."""
        weights, device = self._weights, token_ids.device
        positions = torch.cat([torch.arange(length, device=device) for length in lengths])
        hidden = functional.embedding(token_ids, weights["embeddings.word_embeddings.weight"])
        hidden = self._norm("embeddings.LayerNorm", hidden + self._positions[positions])
        groups = [_Group.of(start, part, device) for start, part in _groups(lengths)]
        for layer in range(self._config.num_layers):
            hidden = self._layer(f"encoder.layer.{layer}", hidden, groups)
        return hidden

    def _layer(self, at: str, hidden: Tensor, groups: Sequence["_Group"]) -> Tensor:
        qkv = self._linear(f"{at}.qkv", hidden)
        mixed = torch.cat([group.attend(qkv, self._config.num_heads) for group in groups])
        mixed = self._linear(f"{at}.attention.output.dense", mixed)
        hidden = self._norm(f"{at}.attention.output.LayerNorm", mixed.add_(hidden))
        inner = self._activation(self._linear(f"{at}.intermediate.dense", hidden))
        inner = self._linear(f"{at}.output.dense", inner)
        return self._norm(f"{at}.output.LayerNorm", inner.add_(hidden))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return functional.layer_norm(x, weight.shape, weight, bias, self._config.norm_eps)


@dataclass(frozen=True, slots=True)
class _Group:
    """Inputs that attend in one call: `rows` of `width` tokens, from token `start` on.

    Where lengths differ, `index` [rows, width] says which token stands where (a shorter input
    repeats its last), `mask` [rows, 1, 1, width] which of them are meant.
    """

    start: int
    end: int
    rows: int
    width: int
    index: Tensor | None
    mask: Tensor | None

    @staticmethod
    def of(start: int, lengths: Sequence[int], device: torch.device) -> "_Group":
        rows, width = len(lengths), lengths[-1]
        end = start + sum(lengths)
        if lengths[0] == width:
            return _Group(start, end, rows, width, None, None)
        sizes = torch.tensor(lengths, device=device)[:, None]
        columns = torch.arange(width, device=device)
        starts = start + sizes.cumsum(0) - sizes
        index = starts + torch.minimum(columns, sizes - 1)
        return _Group(start, end, rows, width, index, (columns < sizes)[:, None, None, :])

    def attend(self, qkv: Tensor, heads: int) -> Tensor:
        """The attended values of the group's tokens: [T, 3 * hidden] -> [end - start, hidden]."""
        part = qkv[self.start : self.end] if self.index is None else qkv[self.index]
        q, k, v = part.view(self.rows, self.width, 3, heads, -1).permute(2, 0, 3, 1, 4)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        out = out.transpose(1, 2).reshape(self.rows * self.width, -1)
        return out if self.mask is None else out[self.mask.flatten()]


def _groups(lengths: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Runs of nearly equal lengths and the token that each begins at."""
    start = 0
    part: list[int] = []
    for length in lengths:
        if part and length > max(part[0] * _STEP, part[0] + 4):
            yield start, part
            start += sum(part)
            part = []
        part.append(length)
    yield start, part


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


_ACTIVATIONS: dict[str, Any] = {
    "gelu": functional.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": functional.relu,
}


def _positive(raw: RawConfig, name: str) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or value <= 0:
        raise ModelError(f"config.json: {name} must be a positive integer.")
    return value


def _linear(
    name: str, parts: tuple[str, ...] | None, sizes: tuple[int, ...], columns: int
) -> Iterator[Parameter]:
    parts = parts or (name,)
    yield Parameter(f"{name}.weight", tuple(f"{part}.weight" for part in parts), sizes, columns)
    yield Parameter(f"{name}.bias", tuple(f"{part}.bias" for part in parts), sizes)


def _vectors(name: str, size: int) -> Iterator[Parameter]:
    for kind in ("weight", "bias"):
        yield Parameter(f"{name}.{kind}", (f"{name}.{kind}",), (size,))
