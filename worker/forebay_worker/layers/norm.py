"""RmsNorm: the gain and epsilon of a norm, which the product after it applies."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RmsNorm:
    weight: Tensor
    eps: float
