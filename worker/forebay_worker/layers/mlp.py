"""The gated MLP: down(silu(gate(x)) * up(x)), gate and up packed into one product."""

from dataclasses import dataclass

from torch import Tensor

from forebay_worker.layers.linear import Linear
from forebay_worker.layers.ops import Ops


@dataclass(frozen=True, slots=True)
class Mlp:
    gate_up: Linear
    down: Linear
    ops: Ops

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.ops.silu_mul(self.gate_up(x)))
