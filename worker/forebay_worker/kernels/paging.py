"""What the attention kernels share: where a row's KV positions lie in the cache."""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634  # softmax runs on exp2, so scores are scaled by this


@triton.jit
def cache_rows(
    table, positions, start, limit, stride_block, stride_token,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Offsets in the cache of a tile's `positions` [TILE] from `start`; past `limit`, any valid.

    A tile that lies in one block takes one scalar look-up, else one per position.
    """
    if BLOCK % TILE == 0:
        block = tl.load(table + start // BLOCK).to(tl.int64)
    else:
        block = tl.load(table + positions // BLOCK, mask=positions < limit, other=0).to(tl.int64)
    return block * stride_block + (positions % BLOCK) * stride_token
