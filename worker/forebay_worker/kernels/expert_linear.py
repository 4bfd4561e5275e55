"""The products of a layer's experts, over tiles of the rows that `routing` found for each.

    gated[i]    = silu(gate) * up,  gate, up: halves of x[token of pair order[i]] @ gate_up[e]^T
    parts[p]    = gated[i] @ down[e]^T                                       for pair p = order[i]
    residual[t] = residual[t] + sum over slots s of weights[t, s] * parts[t * K + s]

Gate and up are one product: a tile's columns alternate between the two, which costs nothing since
every row of the weight is read along its own k, and leaves both in the same thread. What an expert
gives is rounded to the storage type, as the models' own code does; the sum is float32, in the order
of the slots, so a token's does not depend on who else is in the step.

A weight may be e4m3, x never: at any number of rows it is widened, see `products`.

A few rows per expert are bound by the bytes of the weights of the experts chosen, so a tile is no
taller than it need be; many by arithmetic.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay_worker.kernels.fp8 import GROUP, Fp8, Numbers
from forebay_worker.kernels.overlap import let_next_in, overlaps, wait_for_inputs
from forebay_worker.kernels.products import add_product, operand, scaled
from forebay_worker.kernels.routing import Routing
from forebay_worker.kernels.small_linear import MOST_ROWS


class ExpertConfig(NamedTuple):
    """Tile of the output, of rows (pairs) and columns; its step along k; warps, pipeline depth."""

    tile_m: int
    tile_n: int
    tile_k: int
    num_warps: int
    num_stages: int


_WIDE = ExpertConfig(16, 64, 64, 4, 2)  # float32, which no matrix unit multiplies as it is
_BY_ROWS = (
    (10, ExpertConfig(16, 64, 128, 4, 4)),
    (24, ExpertConfig(32, 128, 64, 4, 4)),
    (256, ExpertConfig(64, 128, 64, 4, 4)),
)
"""By pairs per expert, on average: tiles in which the rows of nearly every expert fit at once, so
that its weights are read once; later those of which little is left empty."""
_MANY = ExpertConfig(128, 128, 64, 8, 3)


def config_for(pairs: int, experts: int, itemsize: int) -> ExpertConfig:
    """For so many pairs, of which nothing more is known."""
    if itemsize > 2:
        return _WIDE
    return next((found for rows, found in _BY_ROWS if pairs <= rows * experts), _MANY)


@triton.jit
def _expert_linear_kernel(
    out, x, weight, scales, order, tiles, count, columns, depth,
    stride_x, stride_w, stride_expert, stride_out, stride_scales,
    SCALES: tl.constexpr, GROUP: tl.constexpr,
    GATE: tl.constexpr, PER_TOKEN: tl.constexpr, FIELDS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """GATE: from tokens, by pair, to the place in `order`; else from there to pairs."""
    WIDTH: tl.constexpr = TILE_N // 2 if GATE else TILE_N
    across = tl.cdiv(columns, WIDTH)
    # Programs of one tile of rows are neighbours: the rows, and the weights of an expert with more
    # than one tile, stay in the L2 cache.
    tile = tl.program_id(0) // across
    first = tl.program_id(0) % across * WIDTH
    wait_for_inputs(OVERLAP)
    let_next_in(OVERLAP)
    if tile >= tl.load(count):
        return
    entry = tiles + tile * FIELDS
    expert = tl.load(entry).to(tl.int64)
    at = tl.load(entry + 1) + tl.arange(0, TILE_M)
    inside = at < tl.load(entry + 2)
    pair = tl.load(order + at, mask=inside, other=0)
    each = tl.arange(0, TILE_N)
    if GATE:  # columns of the output, each twice: of the gate, then of up
        column = first + each // 2
        w_at = column + each % 2 * columns
        of_acc = scales + expert * 2 * columns + w_at
        x_at = pair // PER_TOKEN
    else:
        column = first + each
        w_at = column
        of_acc = scales + expert * columns + w_at
        x_at = at
    known = column < columns
    x_row = x + x_at[:, None].to(tl.int64) * stride_x
    w_row = weight + expert * stride_expert + w_at[None, :].to(tl.int64) * stride_w
    acc = tl.zeros((TILE_M, TILE_N), tl.float32)
    for start in tl.range(0, depth, TILE_K):
        k = start + tl.arange(0, TILE_K)
        a = tl.load(x_row + k[None, :], mask=inside[:, None] & (k < depth)[None, :], other=0.0)
        w = tl.load(w_row + k[:, None], mask=(k < depth)[:, None] & known[None, :], other=0.0)
        group = start // GROUP * stride_scales
        acc = add_product(acc, a, w, of_acc + group, known, SCALES)
    acc = scaled(acc, of_acc, known, SCALES)
    kind = out.dtype.element_ty
    if GATE:
        gate, up = tl.split(tl.reshape(acc, (TILE_M, TILE_N // 2, 2)))
        gate = gate.to(kind).to(tl.float32)
        silu = (gate * tl.sigmoid(gate)).to(kind).to(tl.float32)
        result = silu * up.to(kind).to(tl.float32)
        to_column = first + tl.arange(0, TILE_N // 2)
        to_row = at
    else:
        result = acc
        to_column = column
        to_row = pair
    to = out + to_row[:, None].to(tl.int64) * stride_out + to_column[None, :]
    tl.store(to, result.to(kind), mask=inside[:, None] & (to_column < columns)[None, :])


@triton.jit
def _combine_kernel(
    residual, parts, chosen, weights, squares, stride_residual, stride_parts, columns,
    EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, COLUMNS: tl.constexpr,
    SQUARES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < columns
    to = residual + row * stride_residual + column
    wait_for_inputs(OVERLAP)
    let_next_in(OVERLAP)
    total = tl.zeros((COLUMNS,), tl.float32)
    for slot in tl.static_range(PER_TOKEN):
        pair = row * PER_TOKEN + slot
        # What belongs to no expert was never written.
        there = tl.where(tl.load(chosen + pair) < EXPERTS, columns, 0)
        part = tl.load(parts + pair * stride_parts + column, mask=column < there, other=0.0)
        total += tl.load(weights + pair) * part.to(tl.float32)
    kind = residual.dtype.element_ty
    before = tl.load(to, mask=inside, other=0.0).to(tl.float32)
    after = (before + total.to(kind).to(tl.float32)).to(kind)
    tl.store(to, after, mask=inside)
    if SQUARES:
        wide = after.to(tl.float32)
        tl.store(squares + row, tl.sum(wide * wide, 0))


def experts_gate_up(x: Tensor, weight: Numbers, routing: Routing, config: ExpertConfig) -> Tensor:
    """silu(gate) * up of x [T, hidden], by pair in the order of `routing`: [T * K, I], of which the
    rows past the last tile are not written. weight [E, 2 I, hidden]; all are contiguous along their
    last dimension. The routing's tiles are those of the config."""
    columns = _values(weight).shape[1] // 2
    out = torch.empty((len(routing.order), columns), dtype=x.dtype, device=x.device)
    return _launch(x, weight, routing, config, out, gate=True)


def experts_down(gated: Tensor, weight: Numbers, routing: Routing, config: ExpertConfig) -> Tensor:
    """[T * K, hidden] by pair, of what `experts_gate_up` gives; a pair of no expert is not written.
    weight [E, hidden, I]."""
    columns = _values(weight).shape[1]
    out = torch.empty((len(gated), columns), dtype=gated.dtype, device=gated.device)
    return _launch(gated, weight, routing, config, out, gate=False)


def _launch(
    x: Tensor, weight: Numbers, routing: Routing, config: ExpertConfig, out: Tensor, *, gate: bool
) -> Tensor:
    weight, scales, kind = operand(weight, config.tile_k)
    columns, overlap = out.shape[1], overlaps(x.device)
    across = triton.cdiv(columns, config.tile_n // (2 if gate else 1))
    _expert_linear_kernel[(across * len(routing.tiles),)](
        out, x, weight, scales, routing.order, routing.tiles, routing.count,
        columns, weight.shape[2],
        x.stride(0), weight.stride(1), weight.stride(0), out.stride(0),
        scales.shape[1], SCALES=kind, GROUP=GROUP, GATE=gate,
        PER_TOKEN=routing.chosen.shape[1], FIELDS=routing.tiles.shape[1],
        TILE_M=config.tile_m, TILE_N=config.tile_n, TILE_K=config.tile_k,
        OVERLAP=overlap, launch_pdl=overlap,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def _values(weight: Numbers) -> Tensor:
    return weight.values if isinstance(weight, Fp8) else weight


def combine(
    residual: Tensor, parts: Tensor, routing: Routing, experts: int, squares: Tensor | None = None
) -> Tensor:
    """Adds each token's weighted parts [T * K, hidden] to the residual [T, hidden], in place.
    `squares` [1, 64] takes the sums of the squares of what it is then, of 64 rows at most."""
    rows, columns = residual.shape
    size = triton.next_power_of_2(columns)
    assert squares is None or rows <= MOST_ROWS, "the squares have room for 64 rows"
    overlap = overlaps(residual.device)
    _combine_kernel[(rows,)](
        residual, parts, routing.chosen, routing.weights, residual if squares is None else squares,
        residual.stride(0), parts.stride(0), columns,
        EXPERTS=experts, PER_TOKEN=routing.chosen.shape[1], COLUMNS=size,
        SQUARES=squares is not None, OVERLAP=overlap, launch_pdl=overlap,
        num_warps=max(1, min(16, size // 256)),
    )  # fmt: skip
    return residual
