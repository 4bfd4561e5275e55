"""The gated MLP: down(silu(gate(x)) * up(x)), gate and up packed into one product."""

from dataclasses import dataclass

from torch import Tensor

from forebay_worker.layers.linear import Linear
from forebay_worker.layers.norm import RmsNorm


@dataclass(frozen=True, slots=True)
class Mlp:
    norm: RmsNorm
    gate_up: Linear
    down: Linear

    def __call__(self, residual: Tensor, adapters: Tensor | None) -> Tensor:
        """The residual after this block, perhaps in place. `adapters` are `Step.adapters`."""
        gated = self.gate_up.of_norm_gated(self.norm, residual, self.down, adapters)
        return self.down.added(gated, residual, adapters)
