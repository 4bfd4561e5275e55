"""Self-attention over the paged cache: q, k and v from one packed product, optional head norms."""

from dataclasses import dataclass

from torch import Tensor

from forebay_worker.kernels.reference import KvCache, Step
from forebay_worker.layers.linear import Linear
from forebay_worker.layers.norm import RmsNorm
from forebay_worker.layers.ops import Ops


@dataclass(frozen=True, slots=True)
class Attention:
    """q_norm and k_norm are [head_dim] weights, or None. cos_sin is `rope.cos_sin_table`."""

    norm: RmsNorm
    qkv: Linear
    output: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    cos_sin: Tensor
    ops: Ops

    def __call__(self, residual: Tensor, step: Step, cache: KvCache) -> Tensor:
        """The residual after this block, perhaps in place."""
        qkv = self.qkv.of_norm(self.norm, residual, adapters=step.adapters)
        q = self.ops.rope_store(qkv, step, self.cos_sin, cache, self.q_norm, self.k_norm, self.eps)
        mixed = self.ops.paged_attention(q, step, cache)
        return self.output.added(mixed, residual, step.adapters)
