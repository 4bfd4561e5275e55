"""A product's step along k, and what the scales of an e4m3 weight do to its sums.

SCALES says which a weight has: NONE; BY_ROW, so that they multiply the sums at the end; BY_GROUP of
128 along k, so that they multiply each group's part. A weight is widened to x's type, which holds
each e4m3 number exactly; where x is e4m3 too, neither is, and sums are on two levels as in
`fp8_linear`.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from forebay_worker.kernels.fp8 import GROUP, Fp8, Numbers
from forebay_worker.kernels.widen import widen

NONE, BY_ROW, BY_GROUP = 0, 1, 2


class Operand(NamedTuple):
    """A weight as a kernel takes it; where there are no scales, the values stand for them."""

    values: Tensor
    scales: Tensor
    kind: int


def operand(weight: Numbers, tile_k: int) -> Operand:
    """Of a weight that is read in steps of `tile_k`; with scales by group at most a group deep."""
    if not isinstance(weight, Fp8):
        return Operand(weight, weight, NONE)
    kind = BY_GROUP if len(weight.scale) > 1 else BY_ROW
    assert kind == BY_ROW or GROUP % tile_k == 0, "a tile may not lie in two groups"
    return Operand(weight.values, weight.scale, kind)


@triton.jit
def add_product(acc, a, w, scales, known, SCALES: tl.constexpr):
    """acc + a @ w; `scales` are those of w's columns in this group."""
    if SCALES == 0:
        acc = tl.dot(a, w, acc, input_precision="ieee")
    elif a.dtype == w.dtype:
        part = tl.dot(a, w)  # e4m3: the units' own sum is for no more than a tile
        if SCALES == 2:
            part *= tl.load(scales, mask=known, other=0.0)[None, :]
        acc += part
    elif SCALES == 1:
        acc = tl.dot(a, widen(w, a.dtype), acc, input_precision="ieee")
    else:
        scale = tl.load(scales, mask=known, other=0.0)
        acc += tl.dot(a, widen(w, a.dtype), input_precision="ieee") * scale[None, :]
    return acc


@triton.jit
def scaled(acc, scales, known, SCALES: tl.constexpr):
    """acc times the scales of its columns, unless they are in it already."""
    if SCALES == 1:
        acc *= tl.load(scales, mask=known, other=0.0)[None, :]
    return acc
