"""Which experts each token takes, and the rows of each expert as tiles of its products.

    p = softmax(logits[t]),  chosen[t] = the K largest of p,  weights[t] = p[chosen]  (/ their sum)

A pair is a token's slot: pair t * K + s is token t at its s-th likeliest expert. `order` has the
pairs sorted by expert, then by token; a tile is up to M of them, all of one expert. How many tiles
there are is known on the card alone, so a product launches as many programs as there may be, and
those past `count` leave. Nothing is summed up by atomics: the same logits give the same lists.

One row alone has each of its pairs at another expert: they are its tiles as they are, unsorted.

A row whose logits hold a NaN takes the first experts with weights that are NaN. A row that is
padding, with a negative KV slot, takes none: its pairs have the expert E, and are in no tile.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay_worker.kernels.overlap import let_next_in, overlaps, wait_for_inputs

_BLOCK = 4096  # pairs that a program counts or ranks at a time
_FIELDS = 3  # of a tile: its expert, and where it begins and ends in `order`


class Routing(NamedTuple):
    """chosen [T, K] int32, weights [T, K] float32; order [T * K] int32; tiles [most, 3] int32:
    expert, start and end in `order`; count [1] int32: of the tiles that there are."""

    chosen: Tensor
    weights: Tensor
    order: Tensor
    tiles: Tensor
    count: Tensor


def most_tiles(pairs: int, experts: int, tile: int) -> int:
    """Tiles of so many pairs at most, however they fall on the experts."""
    return min(pairs, triton.cdiv(pairs, tile) + experts - 1)


@triton.jit
def _choose_kernel(
    chosen, weights, order, tiles, count, logits, kv_slots, stride_logits,
    EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, RENORMALISE: tl.constexpr,
    HAS_SLOTS: tl.constexpr, ALONE: tl.constexpr, FIELDS: tl.constexpr,
    COLUMNS: tl.constexpr, SLOTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """ALONE: the only row, which so knows the order and the tiles, too."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    slot = tl.arange(0, SLOTS)
    inside = column < EXPERTS
    wait_for_inputs(OVERLAP)
    let_next_in(OVERLAP)
    logit = tl.load(logits + row * stride_logits + column, mask=inside, other=float("-inf"))
    logit = logit.to(tl.float32)
    share = tl.where(inside, tl.exp(logit - tl.max(logit, 0)), 0.0)
    total = tl.sum(share, 0)
    # What is not there, or was taken, is below all that may be. Nothing is likelier than a NaN, nor
    # less likely: such a row takes the first.
    left = tl.where(inside, tl.where(total == total, share, 0.0), -1.0)
    ids = tl.full((SLOTS,), EXPERTS, tl.int32)
    taken = tl.zeros((SLOTS,), tl.float32)
    for each in tl.static_range(PER_TOKEN):
        largest = tl.max(left, 0)
        at = tl.min(tl.where(left == largest, column, COLUMNS), 0)
        ids = tl.where(slot == each, at, ids)
        taken = tl.where(slot == each, largest, taken)
        left = tl.where(column == at, -1.0, left)
    whole = tl.sum(taken, 0) + (total - total) if RENORMALISE else total  # NaN where total is
    weight = taken / whole
    if HAS_SLOTS:
        is_padding = tl.load(kv_slots + row) < 0
        ids = tl.where(is_padding, EXPERTS, ids)
        weight = tl.where(is_padding, 0.0, weight)
    to = row * PER_TOKEN + slot
    tl.store(chosen + to, ids, mask=slot < PER_TOKEN)
    tl.store(weights + to, weight, mask=slot < PER_TOKEN)
    if ALONE:
        entry = tiles + slot * FIELDS
        tl.store(order + slot, slot, mask=slot < PER_TOKEN)
        tl.store(entry, ids, mask=slot < PER_TOKEN)
        tl.store(entry + 1, slot, mask=slot < PER_TOKEN)
        tl.store(entry + 2, slot + 1, mask=slot < PER_TOKEN)
        tl.store(count, tl.sum((ids < EXPERTS).to(tl.int32), 0))


@triton.jit(do_not_specialize=["pairs"])
def _sort_kernel(
    order, tiles, count, chosen, pairs,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    FIELDS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program per expert counts the pairs of all, so that it knows where its own begin."""
    expert = tl.program_id(0)
    bin = tl.arange(0, BINS)
    wait_for_inputs(OVERLAP)
    let_next_in(OVERLAP)
    counts = tl.zeros((BINS,), tl.int32)
    for first in tl.range(0, pairs, BLOCK):
        at = first + tl.arange(0, BLOCK)
        ids = tl.load(chosen + at, mask=at < pairs, other=EXPERTS)
        counts += tl.histogram(ids, BINS)
    start = tl.sum(tl.where(bin < expert, counts, 0), 0)
    own = tl.sum(tl.where(bin == expert, counts, 0), 0)
    before = tl.sum(tl.where(bin < expert, (counts + TILE - 1) // TILE, 0), 0)
    own_tiles = (own + TILE - 1) // TILE
    for tile in tl.range(0, own_tiles):
        entry = tiles + (before + tile) * FIELDS
        tl.store(entry, expert)
        tl.store(entry + 1, start + tile * TILE)
        tl.store(entry + 2, start + tl.minimum((tile + 1) * TILE, own))
    if expert == EXPERTS - 1:
        tl.store(count, before + own_tiles)
    if own > 0:
        for first in tl.range(0, pairs, BLOCK):
            at = first + tl.arange(0, BLOCK)
            ids = tl.load(chosen + at, mask=at < pairs, other=EXPERTS)
            mine = (ids == expert).to(tl.int32)
            tl.store(order + start + tl.cumsum(mine, 0) - 1, at, mask=mine > 0)
            start += tl.sum(mine, 0)


def route(
    logits: Tensor, per_token: int, renormalise: bool, tile: int, kv_slots: Tensor | None = None
) -> Routing:
    """Of logits [T, E], whose last dimension is contiguous; tiles of up to `tile` pairs. Where
    `kv_slots` [T] is given, rows with a negative one take no expert."""
    rows, experts = logits.shape
    pairs, device, overlap = rows * per_token, logits.device, overlaps(logits.device)
    found = Routing(
        chosen=torch.empty((rows, per_token), dtype=torch.int32, device=device),
        weights=torch.empty((rows, per_token), dtype=torch.float32, device=device),
        order=torch.empty(pairs, dtype=torch.int32, device=device),
        tiles=torch.empty(
            (most_tiles(pairs, experts, tile), _FIELDS), dtype=torch.int32, device=device
        ),
        count=torch.empty(1, dtype=torch.int32, device=device),
    )
    _choose_kernel[(rows,)](
        *found, logits, logits if kv_slots is None else kv_slots, logits.stride(0),
        EXPERTS=experts, PER_TOKEN=per_token, RENORMALISE=renormalise,
        HAS_SLOTS=kv_slots is not None, ALONE=rows == 1, FIELDS=_FIELDS,
        COLUMNS=triton.next_power_of_2(experts), SLOTS=triton.next_power_of_2(per_token),
        OVERLAP=overlap, launch_pdl=overlap, num_warps=1,
    )  # fmt: skip
    if rows == 1:
        return found
    _sort_kernel[(experts,)](
        found.order, found.tiles, found.count, found.chosen, pairs, EXPERTS=experts,
        BINS=triton.next_power_of_2(experts + 1),  # one more for pairs of no expert
        BLOCK=min(_BLOCK, max(256, triton.next_power_of_2(pairs))), TILE=tile,
        FIELDS=_FIELDS, OVERLAP=overlap, launch_pdl=overlap, num_warps=4,
    )  # fmt: skip
    return found
