"""The MLP of a layer with experts: each token goes through those that the router picks for it."""

from dataclasses import dataclass

from torch import Tensor

from forebay_worker.kernels.reference import ExpertWeights
from forebay_worker.layers.norm import RmsNorm
from forebay_worker.layers.ops import Ops


@dataclass(frozen=True, slots=True)
class SparseMlp:
    norm: RmsNorm
    experts: ExpertWeights
    ops: Ops

    def __call__(self, residual: Tensor, adapters: Tensor | None) -> Tensor:
        """The residual after this block, perhaps in place; experts have no adapters."""
        return self.ops.sparse_mlp(residual, self.norm.weight, self.norm.eps, self.experts)
