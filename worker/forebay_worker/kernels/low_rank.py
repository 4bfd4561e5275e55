"""Low-rank adapters: what each row's own adapter adds to a product.

    out[t] = out[t] + (x[t] @ A[n]^T) @ B[n]        n = adapters[t]; a row of -1 stays as it is

Shrink computes x A^T in slices of the depth, expand sums these up and multiplies by B, part by part
of a packed product. Which adapters a tile of rows has is read on the card, so that a graph holds
for any of them. A tile multiplies once for each adapter that one of its rows has, the other rows
being zeros then: neighbours are mostly of one request. Nothing of a row reaches another, and the
slices depend on the depth alone, so a row's result does not depend on who else is in the step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay_worker.kernels.overlap import let_next_in, overlaps, wait_for_inputs
from forebay_worker.kernels.reference import LowRank

_TILE_M, _TILE_N, _TILE_K = 16, 64, 128
_MOST_A = 8192
"""Elements of a tile of A: of rank 512 one of 128 columns would leave no room on a card."""
_SLICE = 512
_MOST_SLICES = 8
"""A decode step has a tile of rows or a few: the slices are what spreads over the card."""


@triton.jit
def _shrink_kernel(
    out, x, a, adapters, rows, depth, slice_depth, stride_x,
    PARTS: tl.constexpr, RANK: tl.constexpr,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out [slices, T, parts, R] float32 = x [T, K] @ a [N, parts, R, K]^T, by slice."""
    row = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    part, each = tl.program_id(1), tl.program_id(2)
    rank = tl.arange(0, RANK)
    inside = row < rows
    first = each * slice_depth
    end = tl.minimum(first + slice_depth, depth)
    wait_for_inputs(OVERLAP)
    let_next_in(OVERLAP)
    which = tl.load(adapters + row, mask=inside, other=-1)
    x_row = x + row[:, None].to(tl.int64) * stride_x
    acc = tl.zeros((TILE_M, RANK), tl.float32)
    for number in range(tl.max(which, 0) + 1):
        own = which == number
        if tl.max(own.to(tl.int32), 0) > 0:
            at = (tl.cast(number, tl.int64) * PARTS + part) * RANK
            a_row = a + (at + rank)[None, :] * depth
            for start in range(first, end, TILE_K):
                k = start + tl.arange(0, TILE_K)
                known = k < end
                value = tl.load(x_row + k[None, :], mask=own[:, None] & known[None, :], other=0.0)
                weight = tl.load(a_row + k[:, None], mask=known[:, None], other=0.0)
                acc = tl.dot(value, weight, acc, input_precision="ieee")
    at = ((tl.cast(each, tl.int64) * rows + row)[:, None] * PARTS + part) * RANK + rank[None, :]
    tl.store(out + at, acc, mask=inside[:, None])


@triton.jit
def _expand_kernel(
    out, low, b, adapters, rows, columns, stride_out, size_0, size_1, size_2,
    SLICES: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out [T, columns] += the sum of low's slices, a part's columns by b [N, R, columns]."""
    row = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    column = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    part = tl.program_id(2)
    rank = tl.arange(0, RANK)
    size = tl.where(part == 0, size_0, tl.where(part == 1, size_1, size_2))
    first = tl.where(part == 0, 0, tl.where(part == 1, size_0, size_0 + size_1))
    inside, known = row < rows, column < size
    wait_for_inputs(OVERLAP)
    let_next_in(OVERLAP)
    if tl.program_id(1) * TILE_N >= size:
        return
    which = tl.load(adapters + row, mask=inside, other=-1)
    has_one = which >= 0
    kind = out.dtype.element_ty
    at = (row[:, None].to(tl.int64) * PARTS + part) * RANK + rank[None, :]
    total = tl.zeros((TILE_M, RANK), tl.float32)
    for each in tl.static_range(SLICES):
        step = tl.cast(rows, tl.int64) * (each * PARTS * RANK)
        total += tl.load(low + step + at, mask=has_one[:, None], other=0.0)
    acc = tl.zeros((TILE_M, TILE_N), tl.float32)
    for number in range(tl.max(which, 0) + 1):
        own = which == number
        if tl.max(own.to(tl.int32), 0) > 0:
            value = tl.where(own[:, None], total, 0.0).to(kind)
            b_row = b + (tl.cast(number, tl.int64) * RANK + rank)[:, None] * columns + first
            weight = tl.load(b_row + column[None, :], mask=known[None, :], other=0.0)
            acc = tl.dot(value, weight, acc, input_precision="ieee")
    touched = has_one[:, None] & known[None, :]
    target = out + row[:, None].to(tl.int64) * stride_out + first + column[None, :]
    before = tl.load(target, mask=touched, other=0.0)
    tl.store(target, (before.to(tl.float32) + acc).to(kind), mask=touched)


def filled(rank: int) -> int:
    """The rank that these kernels take it for: a power of two, and a tile of the matrix unit."""
    return max(16, triton.next_power_of_2(rank))


def adapt(out: Tensor, x: Tensor, low: LowRank, adapters: Tensor) -> Tensor:
    """Adds to each row of out [T, columns], in place, what its adapter makes of its row of x
    [T, K], whose last dimensions are contiguous; `adapters` is [T], -1 for none."""
    rows, depth = x.shape
    parts, rank = low.a.shape[1:3]
    slices = min(_MOST_SLICES, triton.cdiv(depth, _SLICE))
    slice_depth = triton.cdiv(triton.cdiv(depth, slices), _TILE_K) * _TILE_K
    shrunk = torch.empty((slices, rows, parts, rank), dtype=torch.float32, device=x.device)
    tiles, overlap = triton.cdiv(rows, _TILE_M), overlaps(x.device)
    _shrink_kernel[(tiles, parts, slices)](
        shrunk, x, low.a, adapters, rows, depth, slice_depth, x.stride(0),
        PARTS=parts, RANK=rank, TILE_M=_TILE_M, TILE_K=max(16, min(_TILE_K, _MOST_A // rank)),
        OVERLAP=overlap, launch_pdl=overlap, num_warps=4,
    )  # fmt: skip
    sizes = (*low.sizes, 0, 0)[:3]
    _expand_kernel[(tiles, triton.cdiv(max(sizes), _TILE_N), parts)](
        out, shrunk, low.b, adapters, rows, low.b.shape[2], out.stride(0), *sizes,
        SLICES=slices, PARTS=parts, RANK=rank, TILE_M=_TILE_M, TILE_N=_TILE_N,
        OVERLAP=overlap, launch_pdl=overlap, num_warps=4,
    )  # fmt: skip
    return out
