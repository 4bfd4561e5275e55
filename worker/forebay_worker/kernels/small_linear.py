"""Linear layer for few rows: out = x @ weight^T, bound by the bytes of the weight.

    out[m, n] = sum over k of x[m, k] * weight[n, k]

A decode step multiplies 2 to 64 rows by every weight, and up to 256 by some; with e4m3 up to 128.
The rows fill one tile, and the weight is cut along n and along k into enough programs to keep the
whole card loading. The programs of an n tile leave float32 partial sums; the one that arrives last
adds them in order, so the result does not depend on who that is.

What stands before and after a product in a layer is done on the way, since a launch alone costs
some 2 us, as much as such a product:

    add:  out = out + x @ weight^T, the residual in place; its squares are summed up for a norm
    norm: out = x @ weight^T / sqrt(mean(x^2) + eps), of an x whose squares have been summed up so;
          a norm's gain is a factor of the weight's columns, which `decoder.fold_norm` puts there
    gate: weight holds the gate's rows and then those of up:  out = silu(gate) * up

A weight may be e4m3, half the bytes, and x too: see `products`.
"""

from typing import NamedTuple, TypedDict

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay_worker.kernels.fp8 import GROUP, Fp8, Numbers
from forebay_worker.kernels.overlap import let_next_in, overlaps, wait_for_inputs
from forebay_worker.kernels.products import add_product, operand, scaled

MOST_ROWS = 64
MOST_E4M3_ROWS = 128
_LEAST_E4M3_ROWS = 64
"""Hopper multiplies e4m3 in tiles of 64 rows; smaller ones would be widened after all."""


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


class Norm(NamedTuple):
    """RMS norm of the input, whose squares are in the first `tiles` rows of `squares`."""

    squares: Tensor
    tiles: int
    eps: float


class Around(TypedDict, total=False):
    """What is done before and after a product: a norm of its input; the gate; the sum with what is
    in its output; and the sums of the outputs' squares, into a tensor of `make_squares`."""

    norm: Norm | None
    gate: bool
    add: bool
    squares: Tensor | None


def make_scratch(
    columns: int, config: LinearConfig, device: torch.device, most_rows: int = MOST_ROWS
) -> LinearScratch:
    """Scratch for so many rows and a weight of `columns` rows; launches in one stream may share
    it."""
    tiles = triton.cdiv(columns, config.tile_n)
    size = config.splits * tiles * config.tile_n * most_rows if config.splits > 1 else 1
    return LinearScratch(
        torch.empty(size, dtype=torch.float32, device=device),
        torch.zeros(tiles, dtype=torch.int32, device=device),
    )


def make_squares(columns: int, tile_n: int, device: torch.device) -> Tensor:
    """For the squares of `columns` outputs: [tiles, 64] float32, a row for each tile's part."""
    tiles = triton.cdiv(columns, tile_n)
    return torch.zeros((tiles, MOST_ROWS), dtype=torch.float32, device=device)


def compiled(
    x: Tensor, norm: Norm | None, gate: bool, add: bool, squares: Tensor | None
) -> dict[str, int | bool]:
    """What a kernel is compiled for, of what stands around the product of x; and how it is
    launched."""
    overlap = overlaps(x.device)
    tiles = triton.next_power_of_2(norm.tiles) if norm else 0
    return {
        "NORM": tiles, "GATE": gate, "ADD": add, "SQUARES": squares is not None, "MOST": MOST_ROWS,
        "OVERLAP": overlap, "launch_pdl": overlap,
    }  # fmt: skip


@triton.jit
def finish(
    acc, up, scale, to, squares, keep,
    SCALED: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    """Stores the output tile of whole sums, rounded wherever the layers' own code rounds. `scale`:
    of each row."""
    kind = to.dtype.element_ty
    if SCALED:
        acc = acc * scale[:, None]
        up = up * scale[:, None]
    if GATE:
        gate = acc.to(kind).to(tl.float32)
        silu = (gate * tl.sigmoid(gate)).to(kind).to(tl.float32)
        acc = silu * up.to(kind).to(tl.float32)
    if ADD:
        before = tl.load(to, mask=keep, other=0.0)
        acc = acc.to(kind).to(tl.float32) + before.to(tl.float32)
    rounded = acc.to(kind)
    tl.store(to, rounded, mask=keep)
    if SQUARES:
        wide = tl.where(keep, rounded.to(tl.float32), 0.0)
        tl.store(squares, tl.sum(wide * wide, 1))


@triton.jit(do_not_specialize=["rows", "norm_tiles"])
def _small_linear_kernel(
    out, x, weight, x_scales, scales, partial, arrivals, squares_in, squares_out,
    rows, columns, depth, norm_tiles, eps, stride_x, stride_w, stride_out, stride_scales,
    X_SCALES: tl.constexpr, SCALES: tl.constexpr, GROUP: tl.constexpr,
    M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, SPLITS: tl.constexpr,
    NORM: tl.constexpr, GATE: tl.constexpr, ADD: tl.constexpr, SQUARES: tl.constexpr,
    MOST: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.arange(0, M)
    column = tile * TILE_N + tl.arange(0, TILE_N)
    inside = (row < rows)[:, None]
    is_known = column < columns
    known = is_known[None, :]
    span = tl.cdiv(tl.cdiv(depth, TILE_K), SPLITS) * TILE_K
    first = split * span
    last = tl.minimum(first + span, depth)
    acc = tl.zeros((M, TILE_N), tl.float32)
    up = tl.zeros((M, TILE_N), tl.float32)
    x_row = x + row[:, None] * stride_x
    w_row = weight + column[None, :].to(tl.int64) * stride_w
    up_row = w_row + columns.to(tl.int64) * stride_w
    of_acc = scales + column
    of_up = of_acc + columns
    let_next_in(OVERLAP)
    wait_for_inputs(OVERLAP)
    scale = tl.zeros((M,), tl.float32)
    if X_SCALES:
        scale = tl.load(x_scales + row, mask=row < rows, other=0.0)
    if NORM > 0:
        of_tile = tl.arange(0, NORM)
        squares = tl.load(
            squares_in + of_tile[:, None] * MOST + row[None, :],
            mask=(of_tile < norm_tiles)[:, None],
            other=0.0,
        )
        scale = tl.rsqrt(tl.sum(squares, 0) / depth + eps)
    for start in tl.range(first, last, TILE_K):
        k = start + tl.arange(0, TILE_K)
        w = tl.load(w_row + k[:, None], mask=(k < depth)[:, None] & known, other=0.0)
        a = tl.load(x_row + k[None, :], mask=inside & (k < depth)[None, :], other=0.0)
        group = start // GROUP * stride_scales
        acc = add_product(acc, a, w, of_acc + group, is_known, SCALES)
        if GATE:
            u = tl.load(up_row + k[:, None], mask=(k < depth)[:, None] & known, other=0.0)
            up = add_product(up, a, u, of_up + group, is_known, SCALES)
    to = out + row[:, None] * stride_out + column[None, :]
    keep = inside & known
    own_squares = squares_out + tile * MOST + row
    if SPLITS == 1:
        acc = scaled(acc, of_acc, is_known, SCALES)
        if GATE:
            up = scaled(up, of_up, is_known, SCALES)
        finish(acc, up, scale, to, own_squares, keep, X_SCALES or NORM > 0, GATE, ADD, SQUARES)
    else:
        PARTS: tl.constexpr = 2 if GATE else 1
        cell = row[:, None] * TILE_N + tl.arange(0, TILE_N)[None, :]
        own = partial + tile * (SPLITS * PARTS * M * TILE_N) + cell
        mine = own + split * (PARTS * M * TILE_N)
        tl.store(mine, acc, mask=inside)
        if GATE:
            tl.store(mine + M * TILE_N, up, mask=inside)
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            acc = tl.zeros((M, TILE_N), tl.float32)
            up = tl.zeros((M, TILE_N), tl.float32)
            for each in tl.static_range(SPLITS):
                part = own + each * (PARTS * M * TILE_N)
                acc += tl.load(part, mask=inside, other=0.0, cache_modifier=".cg")
                if GATE:
                    up += tl.load(part + M * TILE_N, mask=inside, other=0.0, cache_modifier=".cg")
            acc = scaled(acc, of_acc, is_known, SCALES)
            if GATE:
                up = scaled(up, of_up, is_known, SCALES)
            finish(acc, up, scale, to, own_squares, keep, X_SCALES or NORM > 0, GATE, ADD, SQUARES)
            tl.store(arrivals + tile, 0)


def small_linear(
    x: Numbers,
    weight: Numbers,
    out: Tensor,
    scratch: LinearScratch,
    config: LinearConfig,
    *,
    norm: Norm | None = None,
    gate: bool = False,
    add: bool = False,
    squares: Tensor | None = None,
) -> Tensor:
    """x [M, K] @ weight [N, K]^T into `out` [M, N], or [M, N / 2] with `gate`; rows are contiguous.
    M is at most 64 with `norm` or `squares`; the config's tiles must have room for M. An x of e4m3
    takes no `norm`.

    `add` adds to what is in `out`. `squares`, of `make_squares`, takes the sums of the outputs'
    squares. `scratch` is of this N and config, and of no launch that may run at the same time. For
    a weight scaled in groups the config's tiles are at most a group deep.
    """
    x, x_scales = x if isinstance(x, Fp8) else (x, None)
    assert x_scales is None or norm is None, "normed before it was rounded"
    rows, depth = x.shape
    weight, scales, kind = operand(weight, config.tile_k)
    columns, tile = out.shape[1], config.tile_n // (2 if gate else 1)
    _small_linear_kernel[(triton.cdiv(columns, tile), config.splits)](
        out, x, weight, x if x_scales is None else x_scales, scales, *scratch,
        norm.squares if norm else x, x if squares is None else squares,
        rows, columns, depth, norm.tiles if norm else 0, norm.eps if norm else 0.0,
        x.stride(0), weight.stride(0), out.stride(0), len(weight),
        X_SCALES=x_scales is not None, SCALES=kind, GROUP=GROUP,
        M=max(16 if x_scales is None else _LEAST_E4M3_ROWS, triton.next_power_of_2(rows)),
        TILE_N=tile, TILE_K=config.tile_k, SPLITS=config.splits,
        **compiled(x, norm, gate, add, squares),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out
