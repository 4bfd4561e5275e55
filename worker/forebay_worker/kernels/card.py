"""The layers' ops on a CUDA card: the Triton kernels behind the signatures of `reference`.

Unlike the reference it needs a word before each step: `begin` plans the decode rows once for all
layers. Only `begin` and the ops run in a step, all on the device, so a step of decode rows can be
captured in a graph. It knows no model and no request.
"""

import torch
import triton
from torch import Tensor
from torch.nn import functional

from forebay_worker.kernels.decode_attention import (
    DecodePlan,
    config_for,
    make_plan,
    paged_decode_attention,
    plan_decode,
)
from forebay_worker.kernels.expert_linear import combine, experts_down, experts_gate_up
from forebay_worker.kernels.expert_linear import config_for as config_for_experts
from forebay_worker.kernels.fp8 import FEW_ROWS, Fp8, Numbers
from forebay_worker.kernels.fp8_linear import fp8_linear
from forebay_worker.kernels.linear_table import Choice, LinearTable
from forebay_worker.kernels.low_rank import adapt
from forebay_worker.kernels.norm_rope_store import norm_rope_store
from forebay_worker.kernels.prefill_attention import paged_prefill_attention
from forebay_worker.kernels.quantize import quantize, rms_norm_quantize, silu_mul_quantize
from forebay_worker.kernels.reference import ExpertWeights, KvCache, LowRank, Step
from forebay_worker.kernels.rms_norm import rms_norm
from forebay_worker.kernels.routing import route
from forebay_worker.kernels.silu_mul import silu_mul
from forebay_worker.kernels.small_linear import MOST_ROWS, Norm, make_squares

_GATED_ROWS = 16
"""Most rows whose gate is applied within the product: two sums of 32 rows fill the registers (a
step of 32 rows of Qwen3-8B took 7.2 ms with it, 5.9 without)."""


class CardOps:
    """Satisfies `layers.ops.Ops` for one model's attention shape on one card."""

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
        *,
        folded: bool = False,
        e4m3_cache: bool = False,
    ) -> None:
        """`folded`: the gains of the layers' norms are in the weights, as `decoder.fold_norm`
        puts them there."""
        self._kv_heads = kv_heads
        self._group = heads // kv_heads
        self._head_dim = head_dim
        self._device = device
        self.folded = folded
        self._e4m3_cache = e4m3_cache
        self._plans: dict[int, DecodePlan] = {}
        self.products = LinearTable(device)
        self._squares: dict[int, Tensor] = {}
        """By the columns of a tile: where `linear_add` sums the squares of each row up."""
        self._row_squares = torch.zeros((1, MOST_ROWS), dtype=torch.float32, device=device)
        """Where `sparse_mlp` does."""
        self._summed: tuple[Tensor, Tensor] | None = None
        """The residual whose squares are known, and where they are."""
        self._kv_slots: Tensor | None = None

    def begin(self, step: Step) -> None:
        """Plans the decode attention of `step`; in a graph, of the lengths at each replay. Tokens
        whose KV slot is negative are padding, which takes no expert."""
        self._summed, self._kv_slots = None, step.kv_slots
        if step.num_decodes:
            plan_decode(self._plan(step.num_decodes), step.kv_lens[: step.num_decodes])

    def norm_linear(
        self,
        x: Tensor,
        gain: Tensor,
        eps: float,
        weight: Numbers,
        bias: Tensor | None = None,
    ) -> Tensor:
        """rms_norm(x) [T, K] @ weight [N, K]^T + bias [N], by what `products` chose."""
        choice = self._own(x, weight, bias)
        if choice is not None:
            normed, norm = self._normed(x, gain, eps)
            product = choice.multiply(normed, weight, _empty(x, len(weight)), norm=norm)
            return product if bias is None else product.add_(bias)
        if isinstance(weight, Fp8):
            return self._e4m3_linear(rms_norm_quantize(x, gain, eps), weight, bias, x.dtype)
        return functional.linear(rms_norm(x, gain, eps), weight, bias)

    def logits(
        self, x: Tensor, gain: Tensor, eps: float, weight: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """rms_norm(x) @ weight^T, to `out` where that is given. This norm's gain is in no weight,
        for the head may be the embedding."""
        x = rms_norm(x, gain, eps)
        choice = self.products.find(len(x), weight)
        if choice is not None:
            return choice.multiply(x, weight, _empty(x, len(weight)) if out is None else out)
        return torch.mm(x, weight.t(), out=out)

    def norm_gate_up(
        self,
        x: Tensor,
        gain: Tensor,
        eps: float,
        weight: Numbers,
        bias: Tensor | None = None,
        *,
        for_fp8: bool = False,
    ) -> Numbers:
        """[T, N / 2]: SiLU of the first half of rms_norm(x) @ weight^T times the second; of more
        than a few rows as e4m3, if it is `for_fp8`."""
        gated = len(x) <= _GATED_ROWS and bias is None
        choice = self._own(x, weight, bias) if gated else None
        if choice is None:
            both = self.norm_linear(x, gain, eps, weight, bias)
            return silu_mul_quantize(both) if for_fp8 and len(x) > FEW_ROWS else silu_mul(both)
        normed, norm = self._normed(x, gain, eps)
        out = _empty(x, len(weight) // 2)
        return choice.multiply(normed, weight, out, norm=norm, gate=True)

    def linear_add(
        self, x: Numbers, weight: Numbers, bias: Tensor | None, residual: Tensor
    ) -> Tensor:
        """Adds x @ weight^T + bias to the residual [T, N], in place."""
        self._summed = None
        choice = self._own(x, weight, bias)
        if choice is not None:
            return self._add_own(x, weight, bias, residual, choice)
        if isinstance(weight, Fp8):
            return self._add_e4m3(x if isinstance(x, Fp8) else quantize(x), weight, bias, residual)
        if bias is not None:
            return residual.add_(functional.linear(x, weight, bias))
        return torch.addmm(residual, x, weight.t(), out=residual)

    def adapt(self, out: Tensor, x: Tensor, low: LowRank, adapters: Tensor) -> Tensor:
        """Adds to each row of out what its adapter makes of its row of x, in place."""
        self._summed = None  # out may be the residual: its squares are others now
        return adapt(out, x, low, adapters)

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    @staticmethod
    def silu_mul(gate_up: Tensor) -> Tensor:
        return silu_mul(gate_up)

    def _e4m3_linear(self, x: Fp8, weight: Fp8, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """x @ weight^T + bias in `dtype`."""
        choice = self.products.find_e4m3(len(x), weight)
        if choice is None:
            return fp8_linear(x, weight, bias, dtype)
        out = torch.empty((len(x), len(weight)), dtype=dtype, device=self._device)
        product = choice.multiply(x, weight, out)
        return product if bias is None else product.add_(bias)

    def _add_e4m3(self, x: Fp8, weight: Fp8, bias: Tensor | None, residual: Tensor) -> Tensor:
        choice = self.products.find_e4m3(len(x), weight)
        if choice is None:
            return residual.add_(fp8_linear(x, weight, bias, residual.dtype))
        choice.multiply(x, weight, residual, add=True)
        return residual if bias is None else residual.add_(bias)

    def sparse_mlp(
        self, residual: Tensor, gain: Tensor, eps: float, experts: ExpertWeights
    ) -> Tensor:
        """Adds to the residual [T, hidden], in place, what the experts of each token give."""
        rows, number = len(residual), len(experts.gate_up)
        x = rms_norm(residual, gain, eps)
        logits = self._router(x, experts.router)
        config = config_for_experts(rows * experts.per_token, number, x.itemsize)
        routing = route(
            logits, experts.per_token, experts.renormalise, config.tile_m, self._kv_slots
        )
        gated = experts_gate_up(x, experts.gate_up, routing, config)
        parts = experts_down(gated, experts.down, routing, config)
        squares = self._row_squares if rows <= MOST_ROWS else None
        combine(residual, parts, routing, number, squares)
        self._summed = None if squares is None else (residual, squares)
        return residual

    def _router(self, x: Tensor, weight: Tensor) -> Tensor:
        """x @ weight^T, by what `products` chose."""
        choice = self.products.find(len(x), weight)
        if choice is None:
            return functional.linear(x, weight)
        return choice.multiply(x, weight, _empty(x, len(weight)))

    def _add_own(
        self,
        x: Tensor,
        weight: Numbers,
        bias: Tensor | None,
        residual: Tensor,
        choice: Choice,
    ) -> Tensor:
        """The same by an own kernel, which sums the squares of few rows up unless a bias comes
        after it."""
        if bias is not None or len(x) > MOST_ROWS:
            choice.multiply(x, weight, residual, add=True)
            return residual if bias is None else residual.add_(bias)
        tile = choice.config.tile_n
        squares = self._squares.get(tile)
        if squares is None:
            squares = make_squares(len(weight), tile, self._device)
            self._squares[tile] = squares
        choice.multiply(x, weight, residual, add=True, squares=squares)
        self._summed = residual, squares
        return residual

    def _normed(self, x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Norm | None]:
        """x as a product takes it: as it is, if its squares are known and no gain is left to
        apply, else normed."""
        if self._summed is not None and self._summed[0] is x and self.folded:
            squares = self._summed[1]
            return x, Norm(squares, len(squares), eps)
        return rms_norm(x, gain, eps), None

    def _own(self, x: Numbers, weight: Numbers, bias: Tensor | None) -> Choice | None:
        """An own product, if that is the choice. cuBLAS takes any bias."""
        theirs = bias is not None and not isinstance(weight, Fp8)
        return None if theirs else self.products.find(len(x), weight)

    @staticmethod
    def rope_store(
        qkv: Tensor,
        step: Step,
        cos_sin: Tensor,
        cache: KvCache,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        """q [T, H, D], a view of `qkv`, which it overwrites; a negative KV slot stores nothing."""
        kv_heads, head_dim = cache.keys.shape[-2:]
        heads = qkv.shape[1] // head_dim - 2 * kv_heads
        norm = None if q_norm is None or k_norm is None else (q_norm, k_norm, eps)
        return norm_rope_store(
            qkv, cache.keys, cache.values, step.positions, step.kv_slots, cos_sin, heads, norm,
            cache.scales,
        )  # fmt: skip

    def paged_attention(self, q: Tensor, step: Step, cache: KvCache) -> Tensor:
        """Attention of q [T, H, D], decode rows first: [T, H * D]."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        scale = self._head_dim**-0.5
        keys, values, scales, decodes = cache.keys, cache.values, cache.scales, step.num_decodes
        if decodes:
            plan = self._plan(decodes)
            tables, lens = step.block_tables, step.kv_lens[:decodes]
            paged_decode_attention(
                q[:decodes], keys, values, tables, lens, plan, scale, out[:decodes],
                kv_scales=scales,
            )  # fmt: skip
        if decodes < len(step.kv_lens):
            paged_prefill_attention(
                q,
                keys,
                values,
                step.block_tables[decodes:],
                step.kv_lens[decodes:],
                step.starts[decodes:],
                scale,
                out,
                kv_scales=scales,
            )
        return out.view(len(q), -1)

    def _plan(self, rows: int) -> DecodePlan:
        """A plan for so many rows; kept, since a graph goes on using its memory.

        Those of 129 to 256 rows share one: 256 plans would hold 0.3 GB for 16/8 heads of 128.
        """
        size = triton.next_power_of_2(rows)
        plan = self._plans.get(size)
        if plan is None:
            config = config_for(size, e4m3=self._e4m3_cache)
            plan = make_plan(
                size, self._kv_heads, self._group, self._head_dim, self._device, config
            )
            self._plans[size] = plan
        return plan


def _empty(x: Tensor, columns: int) -> Tensor:
    return torch.empty((len(x), columns), dtype=x.dtype, device=x.device)
