"""Linear layer for one row: out = x @ weight^T, bound by the bytes of the weight.

    out[n] = sum over k of x[k] * weight[n, k]

It gives what `small_linear` gives, without matrix units. A program multiplies a few of the weight's
rows from end to end, so that no sums meet in memory, and asks for the first of them before it waits
for its input: they are on their way while the kernel before still runs. A step of Qwen3-0.6B at one
row went from 0.89 to 0.75 ms on an H200, one of the 8B from 4.47 to 4.07. Two rows that share what
is read lose by it (0.94 to 1.02 ms): their sums cost more than the matrix units' do.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from forebay_worker.kernels.fp8 import Numbers
from forebay_worker.kernels.overlap import let_next_in, wait_for_inputs
from forebay_worker.kernels.products import operand, scaled
from forebay_worker.kernels.small_linear import Norm, compiled, finish
from forebay_worker.kernels.widen import widen

_GROUP = 8  # products that a thread sums up by itself: 16 bytes of a 16-bit weight


class RowConfig(NamedTuple):
    """Shape of the launch: rows of the weight of a program, numbers of each that it reads at once,
    and warps. The best of nine over Qwen3 0.6B and 8B on an H200."""

    tile_n: int = 8
    tile_k: int = 1024
    num_warps: int = 4


@triton.jit
def _products(
    w, a, SCALES: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr
):
    """w [TILE_N, TILE_K] times a [TILE_K], in sums of GROUP neighbours."""
    w = w.to(tl.float32) if SCALES == 0 else widen(w, tl.float32)
    return tl.sum(tl.reshape(w * a[None, :], (TILE_N, TILE_K // GROUP, GROUP)), 2)


@triton.jit(do_not_specialize=["norm_tiles"])
def _row_linear_kernel(
    out, x, weight, scales, squares_in, squares_out, columns, norm_tiles, eps, stride_w,
    SCALES: tl.constexpr, DEPTH: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    GROUP: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr,
    SQUARES: tl.constexpr, MOST: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    column = tile * TILE_N + tl.arange(0, TILE_N)
    known = column < columns
    k = tl.arange(0, TILE_K)
    at = weight + column[:, None].to(tl.int64) * stride_w + k[None, :]
    up_at = at + columns.to(tl.int64) * stride_w
    inside = known[:, None] & (k < DEPTH)[None, :]
    w = tl.load(at, mask=inside, other=0.0)
    u = tl.load(up_at, mask=inside, other=0.0) if GATE else w
    let_next_in(OVERLAP)
    wait_for_inputs(OVERLAP)
    acc = tl.zeros((TILE_N, TILE_K // GROUP), tl.float32)
    up = tl.zeros((TILE_N, TILE_K // GROUP), tl.float32)
    for start in tl.static_range(0, DEPTH, TILE_K):
        this_w, this_u = w, u
        a = tl.load(x + start + k, mask=start + k < DEPTH, other=0.0).to(tl.float32)
        if start + TILE_K < DEPTH:
            inside = known[:, None] & (start + TILE_K + k < DEPTH)[None, :]
            w = tl.load(at + start + TILE_K, mask=inside, other=0.0)
            u = tl.load(up_at + start + TILE_K, mask=inside, other=0.0) if GATE else w
        acc += _products(this_w, a, SCALES, TILE_N, TILE_K, GROUP)
        if GATE:
            up += _products(this_u, a, SCALES, TILE_N, TILE_K, GROUP)
    scale = tl.zeros((1,), tl.float32)
    if NORM > 0:
        of_tile = tl.arange(0, NORM)
        squares = tl.load(squares_in + of_tile * MOST, mask=of_tile < norm_tiles, other=0.0)
        scale += tl.rsqrt(tl.sum(squares, 0) / DEPTH + eps)
    of_acc = scales + column
    total = scaled(tl.sum(acc, 1)[None, :], of_acc, known, SCALES)
    total_up = total
    if GATE:
        total_up = scaled(tl.sum(up, 1)[None, :], of_acc + columns, known, SCALES)
    to = out + column[None, :]
    own_squares = squares_out + tile * MOST + tl.arange(0, 1)
    finish(total, total_up, scale, to, own_squares, known[None, :], NORM > 0, GATE, ADD, SQUARES)


def row_linear(
    x: Tensor,
    weight: Numbers,
    out: Tensor,
    config: RowConfig,
    *,
    norm: Norm | None = None,
    gate: bool = False,
    add: bool = False,
    squares: Tensor | None = None,
) -> Tensor:
    """x [1, K] @ weight [N, K]^T into `out` [1, N], or [1, N / 2] with `gate`, as `small_linear`.

    A weight of e4m3 has scales by row; `squares` are of `make_squares` for this config's tiles.
    """
    weight, scales, kind = operand(weight, 1)
    columns, tile = out.shape[1], config.tile_n // (2 if gate else 1)
    _row_linear_kernel[(triton.cdiv(columns, tile),)](
        out, x, weight, scales, norm.squares if norm else x, x if squares is None else squares,
        columns, norm.tiles if norm else 0, norm.eps if norm else 0.0, weight.stride(0),
        SCALES=kind, DEPTH=x.shape[1], TILE_N=tile, TILE_K=config.tile_k, GROUP=_GROUP,
        **compiled(x, norm, gate, add, squares), num_warps=config.num_warps,
    )  # fmt: skip
    return out
