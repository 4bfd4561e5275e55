"""Linear layer for few rows: out = x @ weight^T, bound by the bytes of the weight.

    out[m, n] = sum over k of x[m, k] * weight[n, k]

A decode step multiplies 1 to 64 rows by every weight. The rows fill one tile, and the weight is cut
along n and along k into enough programs to keep the whole card loading. The programs of an n tile
leave float32 partial sums; the one that arrives last adds them in order, so the result does not
depend on who that is.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay_worker.kernels.overlap import overlaps, wait_for_inputs


class LinearConfig(NamedTuple):
    """Shape of the launch: tile of the weight, programs per tile along k, warps, pipeline depth."""

    tile_n: int = 32
    tile_k: int = 256
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 4


class LinearScratch(NamedTuple):
    """partial: float32 sums of all programs; arrivals: int32 counters, zero between launches."""

    partial: Tensor
    arrivals: Tensor


def make_scratch(columns: int, config: LinearConfig, device: torch.device) -> LinearScratch:
    """Scratch for up to 64 rows and `columns` outputs; launches in one stream may share it."""
    tiles = triton.cdiv(columns, config.tile_n)
    size = config.splits * tiles * config.tile_n * 64 if config.splits > 1 else 1
    return LinearScratch(
        torch.empty(size, dtype=torch.float32, device=device),
        torch.zeros(tiles, dtype=torch.int32, device=device),
    )


@triton.jit(do_not_specialize=["rows"])
def _small_linear_kernel(
    out, x, weight, partial, arrivals, rows, columns, depth, stride_x, stride_w, stride_out,
    M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.arange(0, M)
    column = tile * TILE_N + tl.arange(0, TILE_N)
    inside = (row < rows)[:, None]
    known = (column < columns)[None, :]
    span = tl.cdiv(tl.cdiv(depth, TILE_K), SPLITS) * TILE_K
    first = split * span
    last = tl.minimum(first + span, depth)
    acc = tl.zeros((M, TILE_N), tl.float32)
    x_row = x + row[:, None] * stride_x
    w_row = weight + column[None, :].to(tl.int64) * stride_w
    wait_for_inputs(OVERLAP)
    for start in tl.range(first, last, TILE_K):
        k = start + tl.arange(0, TILE_K)
        w = tl.load(w_row + k[:, None], mask=(k < depth)[:, None] & known, other=0.0)
        a = tl.load(x_row + k[None, :], mask=inside & (k < depth)[None, :], other=0.0)
        acc = tl.dot(a, w, acc, input_precision="ieee")
    to = out + row[:, None] * stride_out + column[None, :]
    keep = inside & known
    if SPLITS == 1:
        tl.store(to, acc.to(out.dtype.element_ty), mask=keep)
    else:
        cell = row[:, None] * TILE_N + tl.arange(0, TILE_N)[None, :]
        own = partial + tile * (SPLITS * M * TILE_N)
        tl.store(own + split * (M * TILE_N) + cell, acc, mask=inside)
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            total = tl.zeros((M, TILE_N), tl.float32)
            for each in tl.static_range(SPLITS):
                part = own + each * (M * TILE_N) + cell
                total += tl.load(part, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(to, total.to(out.dtype.element_ty), mask=keep)
            tl.store(arrivals + tile, 0)


def small_linear(
    x: Tensor, weight: Tensor, out: Tensor, scratch: LinearScratch, config: LinearConfig
) -> Tensor:
    """x [M, K] @ weight [N, K]^T, written to `out` [M, N]; M is at most 64, rows are contiguous.

    `scratch` is of this N and config, and of no launch that may run at the same time.
    """
    rows, depth = x.shape
    columns = weight.shape[0]
    _small_linear_kernel[(triton.cdiv(columns, config.tile_n), config.splits)](
        out, x, weight, *scratch, rows, columns, depth,
        x.stride(0), weight.stride(0), out.stride(0),
        M=max(16, triton.next_power_of_2(rows)), TILE_N=config.tile_n, TILE_K=config.tile_k,
        SPLITS=config.splits, num_warps=config.num_warps, num_stages=config.num_stages,
        OVERLAP=overlaps(x.device), launch_pdl=overlaps(x.device),
    )  # fmt: skip
    return out
