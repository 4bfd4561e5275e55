"""Linear: x @ weight.T + bias, with the norm before it or the residual after it; and what adapters
add to it, for the tokens that have one.

Both are the ops' to do, since a card does them in the product itself where rows are few.
"""

from dataclasses import dataclass

from torch import Tensor

from forebay_worker.kernels.fp8 import Fp8, Numbers
from forebay_worker.kernels.reference import LowRank
from forebay_worker.layers.norm import RmsNorm
from forebay_worker.layers.ops import Ops


@dataclass(frozen=True, slots=True)
class Linear:
    """weight [out, in], bias [out] or None; `low` is there where adapters are loaded. `adapters`
    are `Step.adapters`."""

    weight: Numbers
    bias: Tensor | None
    ops: Ops
    low: LowRank | None = None

    def of_norm(self, norm: RmsNorm, x: Tensor, adapters: Tensor | None = None) -> Tensor:
        """[T, out] of the normed x."""
        product = self.ops.norm_linear(x, norm.weight, norm.eps, self.weight, self.bias)
        if adapters is None or self.low is None:
            return product
        normed = self.ops.rms_norm(x, norm.weight, norm.eps)
        return self.ops.adapt(product, normed, self.low, adapters)

    def of_norm_gated(
        self, norm: RmsNorm, x: Tensor, then: "Linear", adapters: Tensor | None = None
    ) -> Numbers:
        """[T, out / 2]: SiLU of the first half times the second, as `then` takes it."""
        if adapters is not None and self.low is not None:
            return self.ops.silu_mul(self.of_norm(norm, x, adapters))
        is_fp8 = isinstance(then.weight, Fp8)
        return self.ops.norm_gate_up(
            x, norm.weight, norm.eps, self.weight, self.bias, for_fp8=is_fp8
        )

    def added(self, x: Numbers, residual: Tensor, adapters: Tensor | None = None) -> Tensor:
        """The residual with the product added, perhaps in place."""
        total = self.ops.linear_add(x, self.weight, self.bias, residual)
        if adapters is None or self.low is None:
            return total
        assert not isinstance(x, Fp8), "a step with adapters has no e4m3 activations"
        return self.ops.adapt(total, x, self.low, adapters)
