"""RmsNorm, alone and with the residual added first."""

from dataclasses import dataclass

from torch import Tensor

from forebay_worker.layers.ops import Ops


@dataclass(frozen=True, slots=True)
class RmsNorm:
    weight: Tensor
    eps: float
    ops: Ops

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual)."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)
