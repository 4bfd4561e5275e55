"""The layers' ops on a CUDA card: the Triton kernels behind the signatures of `reference`.

Unlike the reference it needs a word before each step: `begin` plans the decode rows once for all
layers. Only `begin` and the ops run in a step, all on the device, so a step of decode rows can be
captured in a graph. It knows no model and no request.
"""

import torch
import triton
from torch import Tensor
from torch.nn import functional

from forebay_worker.kernels import rms_norm as norms
from forebay_worker.kernels.decode_attention import (
    DecodePlan,
    make_plan,
    paged_decode_attention,
    plan_decode,
)
from forebay_worker.kernels.linear_table import LinearTable
from forebay_worker.kernels.norm_rope_store import norm_rope_store
from forebay_worker.kernels.prefill_attention import paged_prefill_attention
from forebay_worker.kernels.reference import KvCache, Step
from forebay_worker.kernels.silu_mul import silu_mul
from forebay_worker.kernels.small_linear import small_linear


class CardOps:
    """Satisfies `layers.ops.Ops` for one model's attention shape on one card."""

    rms_norm = staticmethod(norms.rms_norm)
    silu_mul = staticmethod(silu_mul)

    def __init__(self, heads: int, kv_heads: int, head_dim: int, device: torch.device) -> None:
        self._kv_heads = kv_heads
        self._group = heads // kv_heads
        self._head_dim = head_dim
        self._device = device
        self._plans: dict[int, DecodePlan] = {}
        self.products = LinearTable(device)

    def begin(self, step: Step) -> None:
        """Plans the decode attention of `step`; in a graph, of the lengths at each replay."""
        if step.num_decodes:
            plan_decode(self._plan(step.num_decodes), step.kv_lens[: step.num_decodes])

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """x [T, K] @ weight [N, K]^T + bias [N], by what `products` chose; `out` takes no bias."""
        choice = None if bias is not None else self.products.find(len(x), weight)
        if choice is not None:
            config, scratch = choice
            if out is None:
                out = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
            return small_linear(x, weight, out, scratch, config)
        if out is not None:
            return torch.mm(x, weight.t(), out=out)
        return functional.linear(x, weight, bias)

    @staticmethod
    def add_rms_norm(
        x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual); overwrites both operands."""
        return norms.add_rms_norm(x, residual, weight, eps, out=x), residual

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
            qkv, cache.keys, cache.values, step.positions, step.kv_slots, cos_sin, heads, norm
        )

    def paged_attention(self, q: Tensor, step: Step, cache: KvCache) -> Tensor:
        """Attention of q [T, H, D], decode rows first: [T, H * D]."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        scale = self._head_dim**-0.5
        keys, values, decodes = cache.keys, cache.values, step.num_decodes
        if decodes:
            plan = self._plan(decodes)
            tables, lens = step.block_tables, step.kv_lens[:decodes]
            paged_decode_attention(
                q[:decodes], keys, values, tables, lens, plan, scale, out[:decodes]
            )
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
            )
        return out.view(len(q), -1)

    def _plan(self, rows: int) -> DecodePlan:
        """A plan for so many rows; kept, since a graph goes on using its memory.

        Those of 129 to 256 rows share one: 256 plans would hold 0.3 GB for 16/8 heads of 128.
        """
        size = triton.next_power_of_2(rows)
        plan = self._plans.get(size)
        if plan is None:
            plan = make_plan(size, self._kv_heads, self._group, self._head_dim, self._device)
            self._plans[size] = plan
        return plan
