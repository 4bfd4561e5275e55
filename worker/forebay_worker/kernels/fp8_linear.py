"""Linear layer whose input and weight are e4m3: for rows enough that arithmetic bounds it.

    out[m, n] = sum over k of x[m, k] * weight[n, k]

cuBLAS does it where a weight has a scale per row; an own kernel where it has one for each 128
numbers of a row, and wherever cuBLAS does not: off the card, and at sizes not divisible by 16.

Hopper's matrix units add e4m3 products up in some 14 bits. So sums are on two levels: after each
128 numbers what the units have goes to a float32 sum outside of them. cuBLAS does likewise unless
it is told `use_fast_accum`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay_worker.kernels.fp8 import GROUP, Fp8


class Fp8Config(NamedTuple):
    """Tile of the output, warps and pipeline depth; `band`: row tiles that share their columns'
    weights in the L2 cache."""

    tile_m: int = 128
    tile_n: int = 128
    num_warps: int = 8
    num_stages: int = 4
    band: int = 8


DEFAULT = Fp8Config()


@triton.jit(do_not_specialize=["rows"])
def _fp8_linear_kernel(
    out, x, weight, x_scale, w_scale, rows, columns, depth, stride_x, stride_w, stride_out,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    BAND: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(rows, TILE_M)
    tiles_n = tl.cdiv(columns, TILE_N)
    band = tl.program_id(0) // (BAND * tiles_n)
    height = tl.minimum(tiles_m - band * BAND, BAND)
    within = tl.program_id(0) % (BAND * tiles_n)
    row = (band * BAND + within % height) * TILE_M + tl.arange(0, TILE_M)
    column = within // height * TILE_N + tl.arange(0, TILE_N)
    inside = (row < rows)[:, None]
    known = (column < columns)[None, :]
    x_row = x + row[:, None].to(tl.int64) * stride_x
    w_row = weight + column[None, :].to(tl.int64) * stride_w
    acc = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in tl.range(0, depth, GROUP):
        k = start + tl.arange(0, GROUP)
        a = tl.load(x_row + k[None, :], mask=inside & (k < depth)[None, :], other=0.0)
        w = tl.load(w_row + k[:, None], mask=known & (k < depth)[:, None], other=0.0)
        part = tl.dot(a, w)
        if GROUPS:
            scale = tl.load(w_scale + start // GROUP * columns + column, mask=column < columns)
            part = part * scale[None, :]
        acc += part
    acc = acc * tl.load(x_scale + row, mask=row < rows, other=0.0)[:, None]
    if not GROUPS:
        acc = acc * tl.load(w_scale + column, mask=column < columns, other=0.0)[None, :]
    to = out + row[:, None].to(tl.int64) * stride_out + column[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=inside & known)


def fp8_linear(x: Fp8, weight: Fp8, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x [M, K] @ weight [N, K]^T + bias [N]: [M, N] in `dtype`. x has a scale per row."""
    columns, depth = weight.values.shape
    if x.values.is_cuda and len(weight.scale) == 1 and not (columns % 16 or depth % 16):
        product = torch._scaled_mm(
            x.values,
            weight.values.t(),
            scale_a=x.scale.t(),
            scale_b=weight.scale,
            out_dtype=dtype,
            use_fast_accum=False,
        )
    else:
        product = own_fp8_linear(x, weight, dtype)
    return product if bias is None else product.add_(bias)


def own_fp8_linear(x: Fp8, weight: Fp8, dtype: torch.dtype, config: Fp8Config = DEFAULT) -> Tensor:
    """The same by the own kernel, without a bias."""
    (rows, depth), columns = x.values.shape, len(weight)
    out = torch.empty((rows, columns), dtype=dtype, device=x.values.device)
    tiles = triton.cdiv(rows, config.tile_m) * triton.cdiv(columns, config.tile_n)
    _fp8_linear_kernel[(tiles,)](
        out, x.values, weight.values, x.scale, weight.scale, rows, columns, depth,
        x.values.stride(0), weight.values.stride(0), out.stride(0),
        GROUPS=len(weight.scale) > 1, GROUP=GROUP, TILE_M=config.tile_m, TILE_N=config.tile_n,
        BAND=config.band, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out
