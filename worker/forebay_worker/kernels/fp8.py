"""Numbers as e4m3 bytes with float32 scales, in plain torch: products' weights and inputs, and KV.

    x[r, k] = values[r, k] * scale[0, r]            a row at a time
    x[r, k] = values[r, k] * scale[k // 128, r]     or in groups of 128 along it

e4m3 has 3 bits of mantissa, so a number moves by 1 part in 16 at most, and 448 is its largest. It
knows no layer and no kernel.
"""

from typing import NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
GROUP = 128
FEW_ROWS = 16
"""Up to so many rows a product reads its input as it is: the weight's bytes bound it, and what is
not rounded costs no accuracy. With more rows both sides are e4m3: to widen the weights took longer
there than to read them (4,096 -> 24,576 on an H200: 39 us at 8 rows, 47 at 32, 65 at 64)."""
LEAST = 1e-10
"""Of a row's largest number, so that a row of zeros has a scale too."""


class Fp8(NamedTuple):
    """values: [R, K] e4m3. scale: [1 or ceil(K / 128), R] float32.

    Of experts, E matrices: values [E, R, K], and scale [1 or ceil(K / 128), E * R].
    """

    values: Tensor
    scale: Tensor

    def __len__(self) -> int:
        return len(self.values)


Numbers = Tensor | Fp8
"""A matrix, as it is or as e4m3."""


def quantize(x: Tensor) -> Fp8:
    """x [R, K], each row by its largest number; a row with a NaN is NaN."""
    wide = x.float()
    scale = wide.abs().amax(-1).clamp(min=LEAST) / LARGEST
    return Fp8(encode(wide / scale[:, None]), scale[None])


def dequantize(x: Fp8, dtype: torch.dtype) -> Tensor:
    """[R, K] in `dtype`."""
    groups, columns = len(x.scale), x.values.shape[1]
    scale = x.scale if groups == 1 else x.scale.repeat_interleave(GROUP, 0)[:columns]
    return (x.values.float() * scale.t()).to(dtype)


def encode(x: Tensor) -> Tensor:
    """The nearest e4m3, what is beyond 448 at 448; NaN stays."""
    return x.clamp(-LARGEST, LARGEST).to(E4M3)
