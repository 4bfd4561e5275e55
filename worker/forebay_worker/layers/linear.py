"""Linear: x @ weight.T + bias, by whatever product the ops choose for its shape."""

from dataclasses import dataclass

from torch import Tensor

from forebay_worker.layers.ops import Ops


@dataclass(frozen=True, slots=True)
class Linear:
    """weight [out, in], bias [out] or None."""

    weight: Tensor
    bias: Tensor | None
    ops: Ops

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[T, out]; written to `out` where that is given."""
        return self.ops.linear(x, self.weight, self.bias, out)
