"""Decoder: the one transformer that all families share, and the list of its parameters.

It knows shapes and names of weights, not files; it reads a flattened step, not requests.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor
from torch.nn import functional

from forebay_worker.kernels import fp8, reference
from forebay_worker.kernels.fp8 import Fp8, Numbers
from forebay_worker.kernels.reference import ExpertWeights, KvCache, LowRank, Step
from forebay_worker.layers import rope
from forebay_worker.layers.attention import Attention
from forebay_worker.layers.linear import Linear
from forebay_worker.layers.mlp import Mlp
from forebay_worker.layers.norm import RmsNorm
from forebay_worker.layers.ops import Ops
from forebay_worker.layers.sparse_mlp import SparseMlp
from forebay_worker.models.config import Experts, ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
LAYERS = "model.layers."
ROUTER = "mlp.gate.weight"
NO_LOW_RANKS: Mapping[str, LowRank] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Parameter:
    """A packed parameter: the checkpoint's tensors `parts`, of `sizes` rows, one under another.

    Of `experts` that many are stacked, each of as many rows; `whole` is what a checkpoint may store
    in place of the parts, of the parameter's own shape.
    """

    name: str
    parts: tuple[str, ...]
    sizes: tuple[int, ...]
    columns: int | None = None
    experts: int | None = None
    whole: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        rows = sum(self.sizes)
        if self.columns is None:
            return (rows,)
        if self.experts is None:
            return rows, self.columns
        return self.experts, rows // self.experts, self.columns


def parameters(config: ModelConfig) -> Iterator[Parameter]:
    """Every parameter of the decoder, in the order of the layers."""
    yield Parameter(EMBEDDING, (EMBEDDING,), (config.vocab_size,), config.hidden_size)
    for layer in range(config.num_layers):
        yield from _layer_parameters(config, layer)
    yield Parameter(FINAL_NORM, (FINAL_NORM,), (config.hidden_size,))
    if not config.tied_embeddings:
        yield Parameter(HEAD, (HEAD,), (config.vocab_size,), config.hidden_size)


def _layer_parameters(config: ModelConfig, layer: int) -> Iterator[Parameter]:
    hidden, at = config.hidden_size, f"{LAYERS}{layer}"
    attention = f"{at}.self_attn"
    qkv = tuple(f"{attention}.{part}_proj" for part in "qkv")
    qkv_sizes = (config.q_size, config.kv_size, config.kv_size)
    yield _plain(f"{at}.input_layernorm.weight", hidden)
    yield from _linear(f"{attention}.qkv", qkv, qkv_sizes, hidden, config.qkv_bias)
    if config.qk_norm:
        yield _plain(f"{attention}.q_norm.weight", config.head_dim)
        yield _plain(f"{attention}.k_norm.weight", config.head_dim)
    output = f"{attention}.o_proj"
    yield from _linear(output, (output,), (hidden,), config.q_size, config.output_bias)
    yield _plain(f"{at}.post_attention_layernorm.weight", hidden)
    experts = config.experts_of(layer)
    if experts is None:
        yield from _mlp_parameters(config, f"{at}.mlp")
    else:
        yield from _expert_parameters(experts, hidden, at)


def _mlp_parameters(config: ModelConfig, mlp: str) -> Iterator[Parameter]:
    hidden, inner = config.hidden_size, config.intermediate_size
    gate_up, down = (f"{mlp}.gate_proj", f"{mlp}.up_proj"), f"{mlp}.down_proj"
    yield from _linear(f"{mlp}.gate_up", gate_up, (inner, inner), hidden, config.mlp_bias)
    yield from _linear(down, (down,), (hidden,), inner, config.mlp_bias)


def _expert_parameters(experts: Experts, hidden: int, at: str) -> Iterator[Parameter]:
    number, inner = experts.number, experts.intermediate_size
    router, stack = f"{at}.{ROUTER}", f"{at}.mlp.experts"
    yield Parameter(router, (router,), (number,), hidden)

    def stacked(name: str, parts: tuple[str, ...], rows: int, columns: int) -> Parameter:
        names = tuple(f"{stack}.{each}.{part}.weight" for each in range(number) for part in parts)
        sizes, whole = (rows,) * len(names), f"{stack}.{name}_proj"
        return Parameter(f"{stack}.{name}.weight", names, sizes, columns, number, whole)

    yield stacked("gate_up", ("gate_proj", "up_proj"), inner, hidden)
    yield stacked("down", ("down_proj",), hidden, inner)


def _plain(name: str, size: int) -> Parameter:
    return Parameter(name, (name,), (size,))


def _linear(
    name: str, parts: tuple[str, ...], sizes: tuple[int, ...], columns: int, bias: bool
) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", tuple(f"{part}.weight" for part in parts), sizes, columns)
    if bias:
        yield Parameter(f"{name}.bias", tuple(f"{part}.bias" for part in parts), sizes)


_NORMS = {
    "self_attn.qkv.weight": "input_layernorm.weight",
    "mlp.gate_up.weight": "post_attention_layernorm.weight",
}
"""Products that come after a norm of the layer."""


def fold_norm(
    name: str, weights: Mapping[str, Tensor], adapters: Mapping[str, LowRank] = NO_LOW_RANKS
) -> None:
    """If weight `name` comes after a norm, moves the norm's gain into it, and into what adapters
    add to it, in place: gain * x @ W^T is x @ (W * gain)^T. The norm's own gain becomes 1."""
    for product, norm in _NORMS.items():
        if name.endswith(product):
            gain = weights[name.removesuffix(product) + norm]
            weights[name].mul_(gain)
            if (low := adapters.get(name)) is not None:
                low.a.mul_(gain)
            gain.fill_(1)


def scale_of(name: str) -> str:
    """What the scales of an e4m3 weight are called, which lie beside it."""
    return f"{name}_scale"


def is_product(name: str) -> bool:
    """Whether a matrix of this name may be e4m3 and have adapters: one of a layer, but no router,
    which is small and chooses."""
    return name.startswith(LAYERS) and not name.endswith(ROUTER)


def quantize(name: str, weights: dict[str, Tensor]) -> None:
    """If weight `name` is such a matrix, puts one of e4m3 and its scales in its place."""
    weight = weights[name]
    if weight.dim() > 1 and is_product(name):
        values, weights[scale_of(name)] = fp8.quantize(weight.view(-1, weight.shape[-1]))
        weights[name] = values.view(weight.shape)


def adaptable(config: ModelConfig) -> Iterator[Parameter]:
    """The matrices that adapters may add to: of attention, and of the MLPs that are no experts."""
    for each in parameters(config):
        if each.columns is not None and each.experts is None and is_product(each.name):
            yield each


@dataclass(frozen=True, slots=True)
class Layer:
    attention: Attention
    mlp: Mlp | SparseMlp


class Decoder:
    """Embedding, layers, final norm and head over a step's tokens."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        ops: Ops,
        max_model_len: int,
        adapters: Mapping[str, LowRank] = NO_LOW_RANKS,
    ) -> None:
        """`weights` holds each of `parameters(config)` by its name, all on one device; beside a
        weight of e4m3 its `scale_of`, as `Fp8` has it. `adapters`: of `adaptable`, likewise."""
        self._embedding = weights[EMBEDDING]
        cos_sin = cos_sin_table(config, max_model_len).to(self._embedding.device)
        self._layers = [
            _layer(config, weights, adapters, layer, cos_sin, ops)
            for layer in range(config.num_layers)
        ]
        self._norm = RmsNorm(weights[FINAL_NORM], config.norm_eps)
        self._head = weights[EMBEDDING if config.tied_embeddings else HEAD]
        self._ops = ops

    def __call__(self, step: Step, cache: KvCache) -> Tensor:
        """Writes the step's KV into the cache of [layers, …]; returns the logits of the tokens that
        `step.logits_at` names: [S, vocabulary] float32."""
        return self.logits(step, cache).float()

    def logits(self, step: Step, cache: KvCache, out: Tensor | None = None) -> Tensor:
        """The same in the type of the weights, written to `out` where that is given."""
        return self.head(self.hidden(step, cache)[step.logits_at], out)

    def head(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """The logits of some rows of `hidden`, in the type of the weights."""
        return self._ops.logits(hidden, self._norm.weight, self._norm.eps, self._head, out)

    def states(self, step: Step, cache: KvCache) -> Tensor:
        """The final states, normed, of the tokens that `step.logits_at` names: [S, hidden]."""
        hidden = self.hidden(step, cache)
        return reference.rms_norm(hidden[step.logits_at], self._norm.weight, self._norm.eps)

    def hidden(self, step: Step, cache: KvCache) -> Tensor:
        """What the last layer leaves of every token: [T, hidden]."""
        hidden = functional.embedding(step.token_ids, self._embedding)
        for number, layer in enumerate(self._layers):
            hidden = layer.attention(hidden, step, cache.layer(number))
            hidden = layer.mlp(hidden, step.adapters)
        return hidden


def _layer(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    adapters: Mapping[str, LowRank],
    layer: int,
    cos_sin: Tensor,
    ops: Ops,
) -> Layer:
    at = f"{LAYERS}{layer}"

    def linear(name: str) -> Linear:
        weight, bias = f"{at}.{name}.weight", weights.get(f"{at}.{name}.bias")
        return Linear(_numbers(weights, weight), bias, ops, adapters.get(weight))

    def norm(name: str) -> RmsNorm:
        return RmsNorm(weights[f"{at}.{name}.weight"], config.norm_eps)

    attention = Attention(
        norm=norm("input_layernorm"),
        qkv=linear("self_attn.qkv"),
        output=linear("self_attn.o_proj"),
        q_norm=weights.get(f"{at}.self_attn.q_norm.weight"),
        k_norm=weights.get(f"{at}.self_attn.k_norm.weight"),
        eps=config.norm_eps,
        cos_sin=cos_sin,
        ops=ops,
    )
    before, experts = norm("post_attention_layernorm"), config.experts_of(layer)
    if experts is None:
        return Layer(attention, Mlp(before, linear("mlp.gate_up"), linear("mlp.down_proj")))
    return Layer(attention, SparseMlp(before, _expert_weights(experts, weights, at), ops))


def _expert_weights(experts: Experts, weights: Mapping[str, Tensor], at: str) -> ExpertWeights:
    return ExpertWeights(
        router=weights[f"{at}.{ROUTER}"],
        gate_up=_numbers(weights, f"{at}.mlp.experts.gate_up.weight"),
        down=_numbers(weights, f"{at}.mlp.experts.down.weight"),
        per_token=experts.per_token,
        renormalise=experts.renormalise,
    )


def _numbers(weights: Mapping[str, Tensor], name: str) -> Numbers:
    """A weight, with its scales where it is e4m3."""
    weight, scale = weights[name], weights.get(scale_of(name))
    return weight if scale is None else Fp8(weight, scale)


def cos_sin_table(config: ModelConfig, positions: int) -> Tensor:
    """[positions, head_dim] float32: the cosines of each position's angles, then the sines."""
    freq = rope.frequencies(config.head_dim, config.rope_theta)
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "linear":
        freq = freq / scaling.factor
    elif scaling is not None:
        freq = rope.llama3_scaled(
            freq,
            scaling.factor,
            scaling.low_freq_factor,
            scaling.high_freq_factor,
            scaling.original_max_position,
        )
    return rope.cos_sin_table(freq, positions)
