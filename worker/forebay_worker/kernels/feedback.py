"""Token feedback: what the last step sampled becomes this step's input without the host.

    token_ids[r] = tokens[sources[r]]        where token_ids[r] is negative

So a step can be launched before the host has seen the tokens of the one before it.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["rows"])
def _take_tokens_kernel(token_ids, tokens, sources, rows, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    unknown = tl.load(token_ids + row, mask=inside, other=0) < 0
    source = tl.load(sources + row, mask=unknown, other=0)
    tl.store(token_ids + row, tl.load(tokens + source, mask=unknown, other=0), mask=unknown)


def take_tokens(token_ids: Tensor, tokens: Tensor, sources: Tensor) -> None:
    """Replaces the negative ones among the first R of `token_ids` [T] int64.

    `sources` [R] int32 are places in `tokens` [any] int64.
    """
    rows = sources.shape[0]
    size = min(128, triton.next_power_of_2(rows))
    _take_tokens_kernel[(triton.cdiv(rows, size),)](
        token_ids, tokens, sources, rows, ROWS=size, num_warps=4
    )
