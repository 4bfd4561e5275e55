"""Linear: x @ weight.T + bias, with the norm before it or the residual after it.

Both are the ops' to do, since a card does them in the product itself where rows are few.
"""

from dataclasses import dataclass

from torch import Tensor

from forebay_worker.kernels.fp8 import Fp8, Numbers
from forebay_worker.layers.norm import RmsNorm
from forebay_worker.layers.ops import Ops


@dataclass(frozen=True, slots=True)
class Linear:
    """weight [out, in], bias [out] or None."""

    weight: Numbers
    bias: Tensor | None
    ops: Ops

    def of_norm(self, norm: RmsNorm, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[T, out] of the normed x; written to `out` where that is given."""
        return self.ops.norm_linear(x, norm.weight, norm.eps, self.weight, self.bias, out)

    def of_norm_gated(self, norm: RmsNorm, x: Tensor, then: "Linear") -> Numbers:
        """[T, out / 2]: SiLU of the first half times the second, as `then` takes it."""
        is_fp8 = isinstance(then.weight, Fp8)
        return self.ops.norm_gate_up(
            x, norm.weight, norm.eps, self.weight, self.bias, for_fp8=is_fp8
        )

    def added(self, x: Numbers, residual: Tensor) -> Tensor:
        """The residual with the product added, perhaps in place."""
        return self.ops.linear_add(x, self.weight, self.bias, residual)
