"""Paged prefill attention: chunks of query tokens against their rows' KV blocks, causal.

    out[t, h] = softmax(scale * q[t, h] . K[r, h // G][: p + 1]^T) V[r, h // G][: p + 1]
    r: the row that owns token t; p: its position; G = query heads per KV head

A row's chunk ends at its last KV position, so its tokens sit at kv_len - tokens .. kv_len - 1 and
the prefix before them comes from the cache, whoever computed it. A tile holds TILE_M // G tokens
with all G query heads of a KV head, so that a short chunk of a wide group still fills it. A program
walks the KV tiles below its first token without masks, then the few on the diagonal with them.

An e4m3 cache is widened as in `decode_attention`.

Bound: 4 * D * heads * (pairs of a token and a position at or before it) floating-point operations
over the matrix units' rate. It knows nothing of who owns the blocks.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from forebay_worker.kernels.paging import LOG2_E, cache_rows
from forebay_worker.kernels.widen import widen


class PrefillConfig(NamedTuple):
    """Shape of the launch: query rows and KV positions per tile, warps and pipeline depth.

    `tma`: let the bulk copy engine load K and V where the cache allows it. The defaults are the
    best of ten on an H200 at 32/8 heads of 128, causal 8,192: 479 TFLOP/s, since two programs of
    64 rows on a multiprocessor hide each other's softmax; 128 rows and 8 warps gave 455.
    """

    tile_m: int = 64
    tile_n: int = 64
    num_warps: int = 4
    num_stages: int = 5
    tma: bool = True


DEFAULT = PrefillConfig()
DEFAULT_E4M3 = PrefillConfig(tile_m=128)
"""Best of ten over an e4m3 cache: at 32/8 heads 8 x 2,048 259 -> 298 TFLOP/s, 1 x 8,192 294 -> 334,
since twice as many rows use what has been widened."""


@triton.jit
def _find_row(starts, slot, rows, TOKENS: tl.constexpr):
    """The row whose tiles take `slot`: row r's begin at slot starts[r] // TOKENS + r."""
    low = 0
    high = rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) // TOKENS + middle <= slot:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _attend(
    acc, top, total, query, q_position,
    k_cache, v_cache, table, head, first, last, kv_len, scale_log2,
    stride_k_block, stride_k_token, stride_k_head,
    stride_v_block, stride_v_token, stride_v_head,
    MASKED: tl.constexpr, TMA: tl.constexpr, FP8: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """One online-softmax pass over the KV tiles from `first` (a multiple of TILE_N) to `last`."""
    dim = tl.arange(0, D)
    for start in tl.range(first, last, TILE_N):
        position = start + tl.arange(0, TILE_N)
        valid = position < kv_len
        if TMA:
            line = tl.load(table + start // BLOCK).to(tl.int32) * BLOCK + start % BLOCK
            k = tl.trans(k_cache.load([line, head * D]))
        else:
            k_rows = cache_rows(
                table, position, start, kv_len, stride_k_block, stride_k_token, TILE_N, BLOCK
            )
            k_at = k_cache + head * stride_k_head + k_rows[None, :] + dim[:, None]
            k = tl.load(k_at, mask=valid[None, :], other=0.0) if MASKED else tl.load(k_at)
        if FP8:
            k = widen(k, query.dtype)
        score = tl.dot(query, k, input_precision="ieee")
        if MASKED:
            seen = (position[None, :] <= q_position[:, None]) & valid[None, :]
            score = tl.where(seen, score, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, 1) * scale_log2)
        weight = tl.exp2(score * scale_log2 - new_top[:, None])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weight, 1)
        acc = acc * decay[:, None]
        if TMA:
            v = v_cache.load([line, head * D])
        else:
            v_rows = cache_rows(
                table, position, start, kv_len, stride_v_block, stride_v_token, TILE_N, BLOCK
            )
            v = tl.load(v_cache + head * stride_v_head + v_rows[:, None] + dim[None, :])
        if FP8:
            v = widen(v, query.dtype)
        if MASKED:
            # Zeros, because what nobody wrote may be NaN, and 0 * NaN is NaN.
            v = tl.where(valid[:, None], v, 0.0)
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
        top = new_top
    return acc, top, total


# The rows' arrays start behind the decode rows', so their alignment differs from step to step.
@triton.jit(
    do_not_specialize=["rows", "stride_table"],
    do_not_specialize_on_alignment=["block_tables", "kv_lens", "starts"],
)
def _paged_prefill_kernel(
    out, q, k_cache, v_cache, kv_scales, block_tables, kv_lens, starts, scale_log2, rows,
    stride_q, stride_out, stride_table,
    stride_k_block, stride_k_token, stride_k_head,
    stride_v_block, stride_v_token, stride_v_head,
    TMA: tl.constexpr, FP8: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    # Later tiles see more positions: they start first, so that the short ones fill the end.
    slot = tl.num_programs(1) - 1 - tl.program_id(1)
    row = _find_row(starts, slot, rows, TOKENS)
    start = tl.load(starts + row).to(tl.int32)
    tokens = tl.load(starts + row + 1).to(tl.int32) - start
    token = (slot - start // TOKENS - row) * TOKENS
    if (token < 0) | (token >= tokens):
        return
    kv_len = tl.load(kv_lens + row).to(tl.int32)
    table = block_tables + row.to(tl.int64) * stride_table

    line = tl.arange(0, TILE_M)
    dim = tl.arange(0, D)
    own = token + line // GROUP
    inside = (own < tokens) & (line < TOKENS * GROUP)
    q_head = head * GROUP + line % GROUP
    q_at = (start + own).to(tl.int64) * stride_q + q_head * D
    query = tl.load(q + q_at[:, None] + dim[None, :], mask=inside[:, None], other=0.0)
    q_position = kv_len - tokens + own

    if FP8:
        scale_log2 *= tl.load(kv_scales + head)
        query = query.to(tl.float16) if query.dtype == tl.bfloat16 else query
    acc = tl.zeros((TILE_M, D), tl.float32)
    top = tl.full((TILE_M,), -float("inf"), tl.float32)
    total = tl.zeros((TILE_M,), tl.float32)
    full = (kv_len - tokens + token + 1) // TILE_N * TILE_N
    last = tl.minimum(kv_len, kv_len - tokens + token + TOKENS)
    acc, top, total = _attend(
        acc, top, total, query, q_position,
        k_cache, v_cache, table, head, 0, full, kv_len, scale_log2,
        stride_k_block, stride_k_token, stride_k_head,
        stride_v_block, stride_v_token, stride_v_head,
        False, TMA, FP8, D, BLOCK, TILE_N,
    )  # fmt: skip
    acc, top, total = _attend(
        acc, top, total, query, q_position,
        k_cache, v_cache, table, head, full, last, kv_len, scale_log2,
        stride_k_block, stride_k_token, stride_k_head,
        stride_v_block, stride_v_token, stride_v_head,
        True, TMA, FP8, D, BLOCK, TILE_N,
    )  # fmt: skip
    acc = acc / total[:, None]
    if FP8:
        acc *= tl.load(kv_scales + tl.num_programs(0) + head)
    out_at = (start + own).to(tl.int64) * stride_out + q_head * D
    tl.store(
        out + out_at[:, None] + dim[None, :], acc.to(out.dtype.element_ty), mask=inside[:, None]
    )


def _descriptor(cache: Tensor, tile: int) -> TensorDescriptor:
    """The bulk copy engine's view of a cache: [blocks * block size, KV heads * D] in head tiles."""
    blocks, block_size, kv_heads, head_dim = cache.shape
    flat = cache.view(blocks * block_size, kv_heads * head_dim)
    return TensorDescriptor.from_tensor(flat, [tile, head_dim])


def paged_prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    kv_lens: Tensor,
    starts: Tensor,
    scale: float,
    out: Tensor,
    config: PrefillConfig | None = None,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Attention output of T tokens in R rows, written to `out`; their KV is already in the cache.

    Args:
        q: [T, query heads, D], contiguous in its last two dimensions; D a power of two from 16.
        k_cache, v_cache: [blocks, block size, KV heads, D], any strides with D contiguous.
        block_tables: [R, most blocks], int32 or int64.
        kv_lens: [R] integers, positions of the row with this chunk's.
        starts: [R + 1] integers, row r owns tokens starts[r] to starts[r + 1]; tokens before
            starts[0] belong to nobody and their output is not written.
        out: [T, query heads, D], contiguous in its last two dimensions.
        kv_scales: [2, KV heads] float32, contiguous, of an e4m3 cache's keys and values.
    """
    config = config or (DEFAULT if kv_scales is None else DEFAULT_E4M3)
    tokens, heads, head_dim = q.shape
    kv_heads = k_cache.shape[2]
    rows = kv_lens.shape[0]
    group = heads // kv_heads
    per_tile = config.tile_m // group
    tma = config.tma and k_cache.is_contiguous() and k_cache.shape[1] % config.tile_n == 0
    k_source, v_source = (
        (_descriptor(k_cache, config.tile_n), _descriptor(v_cache, config.tile_n))
        if tma
        else (k_cache, v_cache)
    )
    _paged_prefill_kernel[(kv_heads, tokens // per_tile + rows)](
        out, q, k_source, v_source, q if kv_scales is None else kv_scales,
        block_tables, kv_lens, starts, scale * LOG2_E, rows,
        q.stride(0), out.stride(0), block_tables.stride(0),
        *k_cache.stride()[:3], *v_cache.stride()[:3],
        TMA=tma, FP8=kv_scales is not None, GROUP=group, D=head_dim, BLOCK=k_cache.shape[1],
        TOKENS=per_tile, TILE_M=config.tile_m, TILE_N=config.tile_n,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out
