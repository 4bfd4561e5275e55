"""Paged decode attention: one query token per row against the row's KV blocks.

    out[r, h] = softmax(scale * q[r, h] . K[r, h // G]^T) V[r, h // G]
    G = query heads per KV head

The step's work is cut on the device: `plan_decode` reads the lengths and writes a list of items
(row, split) of at most `chunk` KV tiles each, so that one launch of a fixed grid fits any lengths
and a captured graph stays valid. An item takes one program per KV head, whose G query heads share
one tile of 16 rows, so that each K and V byte is read once. Rows of several items are merged by
the program that arrives last, without a second launch (about 1.3 us per layer in a graph).

Keys and values of all positions but a row's newest were there before the step, so the first tiles
are on their way before the kernel that makes the query and the newest position has ended: the loop
waits for it in its first round, behind the loads that the compiler moves ahead of the loop. The
newest position is no part of a tile; it is what the row's last item begins with. So nobody may
write any other position of a decode row in its own step (decision 0018).

An e4m3 cache is half the bytes. Its numbers are widened, so that products and sums are as precise
as with any other cache; its scales, one per KV head, multiply the scores and the output. A bfloat16
query meets them as float16, which widens best, has more bits, and room for it up to 65,504. Its
kernel waits first: with the above it fills the registers, and a step of 256 rows of Qwen3-8B takes
12.1 ms instead of 11.2.

Bound: bytes of K and V over memory bandwidth. It knows nothing of who owns the blocks.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay_worker.kernels.overlap import overlaps, wait_for_inputs
from forebay_worker.kernels.paging import LOG2_E, cache_rows
from forebay_worker.kernels.widen import widen

_LOWEST = tl.constexpr(-1e30)
"""Below every score, and a number: an item may have no position but masked ones in a tile."""
_MERGED = 4096  # numbers of a merging program's tile: items at once times rows times head size
_PLAN_ITEMS = 64  # items that one program of the plan kernel writes


class DecodeConfig(NamedTuple):
    """Shape of the launch: KV positions per tile, warps and pipeline depth of a program.

    `programs`: how many programs over all KV heads the work is cut into, if it is enough.
    """

    tile: int = 64
    num_warps: int = 2
    num_stages: int = 5
    programs: int = 264


DEFAULT = DecodeConfig()
_BY_ROWS = {
    4: DecodeConfig(32, 2, 5, 528),
    8: DecodeConfig(32, 2, 5, 528),
    16: DecodeConfig(64, 2, 7, 264),
    32: DecodeConfig(64, 2, 7, 264),
    64: DecodeConfig(32, 2, 5, 264),
    128: DecodeConfig(64, 2, 3, 264),
    256: DecodeConfig(64, 2, 3, 264),
}
"""Where another shape than the default is the best of seventeen within a step of Qwen3 0.6B and 8B
at 1,024 positions on an H200. How the programs share a card with the kernels around them counts as
much as their own speed: at 64 rows a step of the 0.6B takes 2.69 ms, by the default 3.09."""

_BY_ROWS_E4M3 = {32: DecodeConfig(128, 4, 5, 264)}
"""The same of fourteen over an e4m3 cache: 32 rows 43 -> 31 us, at 4,096 positions 160 -> 101."""


def config_for(rows: int, *, e4m3: bool = False) -> DecodeConfig:
    """The shape for a plan of `rows` rows, a power of two."""
    return (_BY_ROWS_E4M3 if e4m3 else _BY_ROWS).get(rows, DEFAULT)


class DecodePlan(NamedTuple):
    """Work list and scratch of one batch size; made once, filled on the device in each step.

    Attributes (I items, R rows, H KV heads):
        items: [I, 4] int32: row (or -1), split, splits of the row, tiles per split.
        partial: [I, H, G rounded up, D] float32, normalised output of each item.
        partial_lse: [I, H, G rounded up] float32, base-2 log of each item's softmax sum.
        arrivals: [R, H] int32, zero between launches.
        target: items that the plan aims at: enough programs to fill the card.
        config: the shape of the launch that the items are cut for.
    """

    items: Tensor
    partial: Tensor
    partial_lse: Tensor
    arrivals: Tensor
    target: int
    config: DecodeConfig


def make_plan(
    rows: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    device: torch.device,
    config: DecodeConfig = DEFAULT,
) -> DecodePlan:
    """A plan for `rows` rows of `kv_heads` KV heads with `group` query heads of `head_dim` each."""
    target = max(1, config.programs // kv_heads)
    items = rows + target  # every row may end with one item that is not full
    padded = triton.next_power_of_2(group)
    return DecodePlan(
        torch.full((items, 4), -1, dtype=torch.int32, device=device),
        torch.empty((items, kv_heads, padded, head_dim), dtype=torch.float32, device=device),
        torch.empty((items, kv_heads, padded), dtype=torch.float32, device=device),
        torch.zeros((rows, kv_heads), dtype=torch.int32, device=device),
        target,
        config,
    )


@triton.jit(do_not_specialize=["rows", "num_items", "target"])
def _plan_decode_kernel(
    items, kv_lens, rows, num_items, target,
    TILE: tl.constexpr, ROWS: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    lens = tl.load(kv_lens + row, mask=row < rows, other=0).to(tl.int32)
    tiles = (lens + TILE - 1) // TILE
    chunk = tl.maximum((tl.sum(tiles) + target - 1) // target, 1)
    splits = (tiles + chunk - 1) // chunk
    end = tl.cumsum(splits, 0)

    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    # The row of an item is the number of rows that end at or before it.
    owner = tl.sum((end[None, :] <= item[:, None]).to(tl.int32), 1)
    mine = row[None, :] == owner[:, None]
    first = tl.sum(tl.where(mine, (end - splits)[None, :], 0), 1)
    count = tl.sum(tl.where(mine, splits[None, :], 0), 1)
    out = items + item * 4
    inside = item < num_items
    tl.store(out, tl.where(owner < rows, owner, -1), mask=inside)
    tl.store(out + 1, item - first, mask=inside)
    tl.store(out + 2, count, mask=inside)
    tl.store(out + 3, tl.zeros_like(item) + chunk, mask=inside)


def plan_decode(plan: DecodePlan, kv_lens: Tensor) -> None:
    """Fills `plan` for `kv_lens` [R] (0 for a padding row), once per step for all layers."""
    num_items = plan.items.shape[0]
    _plan_decode_kernel[(triton.cdiv(num_items, _PLAN_ITEMS),)](
        plan.items,
        kv_lens,
        kv_lens.shape[0],
        num_items,
        plan.target,
        TILE=plan.config.tile,
        ROWS=triton.next_power_of_2(kv_lens.shape[0]),
        ITEMS=_PLAN_ITEMS,
    )


@triton.jit
def _merge_splits(
    partial, partial_lse, first_item, splits, head, kv_heads,
    PADDED: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Output [PADDED, D] of a row and KV head from its items' partial outputs."""
    group = tl.arange(0, PADDED)
    dim = tl.arange(0, D)
    top = tl.full((PADDED,), -float("inf"), tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    acc = tl.zeros((PADDED, D), tl.float32)
    for start in range(0, splits, SPLITS):
        split = start + tl.arange(0, SPLITS)
        inside = split < splits
        item = (first_item + split).to(tl.int64)
        base = (item * kv_heads + head)[:, None] * PADDED + group[None, :]
        # .cg: other multiprocessors wrote these, so the L1 cache must not answer.
        lse = tl.load(
            partial_lse + base, mask=inside[:, None], other=-float("inf"), cache_modifier=".cg"
        )
        part = tl.load(
            partial + base[:, :, None] * D + dim[None, None, :],
            mask=inside[:, None, None],
            other=0.0,
            cache_modifier=".cg",
        )
        new_top = tl.maximum(top, tl.max(lse, 0))
        weight = tl.exp2(lse - new_top[None, :])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weight, 0)
        acc = acc * decay[:, None] + tl.sum(part * weight[:, :, None], 0)
        top = new_top
    return acc / total[:, None]


@triton.jit(do_not_specialize=["stride_table"])
def _paged_decode_kernel(
    out, q, k_cache, v_cache, kv_scales, block_tables, kv_lens, table_rows,
    items, partial, partial_lse, arrivals, scale_log2,
    stride_q, stride_out, stride_table,
    stride_k_block, stride_k_token, stride_k_head,
    stride_v_block, stride_v_token, stride_v_head,
    HAS_TABLE_ROWS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, M: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    FP8: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    kv_heads = tl.num_programs(0)
    item = tl.program_id(1)
    row = tl.load(items + item * 4)
    if row < 0:
        return
    split = tl.load(items + item * 4 + 1)
    splits = tl.load(items + item * 4 + 2)
    chunk = tl.load(items + item * 4 + 3)
    kv_len = tl.load(kv_lens + row).to(tl.int32)
    table_row = tl.load(table_rows + row) if HAS_TABLE_ROWS else row
    table = block_tables + table_row.to(tl.int64) * stride_table

    group = tl.arange(0, M)
    dim = tl.arange(0, D)
    q_at = row.to(tl.int64) * stride_q + (head * GROUP + group)[:, None] * D + dim[None, :]
    newest = kv_len - 1
    block = tl.load(table + newest // BLOCK).to(tl.int64)
    newest_k = block * stride_k_block + newest % BLOCK * stride_k_token + dim
    newest_v = block * stride_v_block + newest % BLOCK * stride_v_token + dim

    AHEAD: tl.constexpr = not FP8
    WIDENED: tl.constexpr = FP8 and q.dtype.element_ty == tl.bfloat16
    QUERY: tl.constexpr = tl.float16 if WIDENED else q.dtype.element_ty
    query = tl.zeros((M, D), QUERY)
    top = tl.full((M,), _LOWEST, tl.float32)
    total = tl.zeros((M,), tl.float32)
    acc = tl.zeros((M, D), tl.float32)
    if not AHEAD:
        wait_for_inputs(OVERLAP)
        query = tl.load(q + q_at, mask=(group < GROUP)[:, None], other=0.0).to(QUERY)
    if FP8:
        scale_log2 *= tl.load(kv_scales + head)
    k_head = k_cache + head * stride_k_head
    v_head = v_cache + head * stride_v_head
    first = split * chunk * TILE
    last = tl.minimum(first + chunk * TILE, newest if AHEAD else kv_len)
    # One round at least, for that may be where the wait is.
    for start in tl.range(first, tl.maximum(last, first + 1), TILE):
        position = start + tl.arange(0, TILE)
        valid = position < last
        k_rows = cache_rows(
            table, position, start, last, stride_k_block, stride_k_token, TILE, BLOCK
        )
        k = tl.load(k_head + k_rows[None, :] + dim[:, None], mask=valid[None, :], other=0.0)
        if AHEAD:  # noqa: SIM102  known when compiled, the next line's condition is not
            if start == first:
                # The next kernel is not let in: it would take room from this one.
                wait_for_inputs(OVERLAP)
                query = tl.load(q + q_at, mask=(group < GROUP)[:, None], other=0.0)
                if split == splits - 1:
                    own_k = tl.load(k_head + newest_k).to(tl.float32)
                    top = tl.sum(query.to(tl.float32) * own_k[None, :], 1) * scale_log2
                    total = tl.full((M,), 1.0, tl.float32)
                    acc += tl.load(v_head + newest_v).to(tl.float32)[None, :]
        if FP8:
            k = widen(k, query.dtype)
        score = tl.dot(query, k, input_precision="ieee") * scale_log2
        score = tl.where(valid[None, :], score, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - new_top[:, None])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weight, 1)
        v_rows = cache_rows(
            table, position, start, last, stride_v_block, stride_v_token, TILE, BLOCK
        )
        v = tl.load(v_head + v_rows[:, None] + dim[None, :], mask=valid[:, None], other=0.0)
        if FP8:
            v = widen(v, query.dtype)
        acc = tl.dot(weight.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        top = new_top
    acc = acc / total[:, None]
    if FP8:
        acc *= tl.load(kv_scales + kv_heads + head)

    if splits == 1:
        out_at = row.to(tl.int64) * stride_out + (head * GROUP + group)[:, None] * D + dim[None, :]
        tl.store(out + out_at, acc.to(out.dtype.element_ty), mask=(group < GROUP)[:, None])
    else:
        base = (item.to(tl.int64) * kv_heads + head) * PADDED + group
        tl.store(partial_lse + base, top + tl.log2(total), mask=group < PADDED)
        tl.store(partial + base[:, None] * D + dim[None, :], acc, mask=(group < PADDED)[:, None])
        # All threads' stores come before the count, which releases them to whoever reads it later.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + row * kv_heads + head, 1, sem="acq_rel", scope="gpu")
        if arrived == splits - 1:
            merged = _merge_splits(
                partial, partial_lse, item - split, splits, head, kv_heads, PADDED, D, SPLITS
            )
            small = tl.arange(0, PADDED)
            to = row.to(tl.int64) * stride_out + (head * GROUP + small)[:, None] * D + dim[None, :]
            tl.store(out + to, merged.to(out.dtype.element_ty), mask=(small < GROUP)[:, None])
            tl.store(arrivals + row * kv_heads + head, 0)


def paged_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    kv_lens: Tensor,
    plan: DecodePlan,
    scale: float,
    out: Tensor,
    table_rows: Tensor | None = None,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Attention output of R decode rows, written to `out`.

    Args:
        q: [R, query heads, D], contiguous in its last two dimensions; D a power of two from 16.
        k_cache, v_cache: [blocks, block size, KV heads, D], any strides with D contiguous.
        block_tables: [table rows, most blocks], int32 or int64.
        kv_lens: [R] integers, positions to attend to, the row's own included; 0: the row is padding
            and its output is not written.
        plan: filled by `plan_decode` for these `kv_lens`.
        out: [R, query heads, D], contiguous in its last two dimensions.
        table_rows: [R] integers, row r's row of `block_tables`; without it row r itself.
        kv_scales: [2, KV heads] float32, contiguous, of an e4m3 cache's keys and values.
    """
    heads, head_dim = q.shape[1:]
    kv_heads = k_cache.shape[2]
    group = heads // kv_heads
    padded = triton.next_power_of_2(group)
    _paged_decode_kernel[(kv_heads, plan.items.shape[0])](
        out, q, k_cache, v_cache, q if kv_scales is None else kv_scales, block_tables, kv_lens,
        kv_lens if table_rows is None else table_rows,
        plan.items, plan.partial, plan.partial_lse, plan.arrivals, scale * LOG2_E,
        q.stride(0), out.stride(0), block_tables.stride(0),
        *k_cache.stride()[:3], *v_cache.stride()[:3],
        HAS_TABLE_ROWS=table_rows is not None, GROUP=group, PADDED=padded, M=max(16, padded),
        D=head_dim, BLOCK=k_cache.shape[1], TILE=plan.config.tile,
        SPLITS=max(1, min(16, _MERGED // (padded * head_dim))),
        FP8=kv_scales is not None,
        OVERLAP=overlaps(q.device), launch_pdl=overlaps(q.device),
        num_warps=plan.config.num_warps, num_stages=plan.config.num_stages,
    )  # fmt: skip
    return out
