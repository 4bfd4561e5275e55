"""The device's record of running sequences: a decode step reads its inputs there and writes back.

A slot is a sequence's row in the table; slot 0 is nobody's and pads a batch to its graph's size.
The host writes a slot when a sequence enters or gets a block. From step to step the device keeps
the last token and the length itself, so that a step can be launched before the host saw the last.

    prepare:  token = last_token[slot];  position = length[slot];  kv_len = position + 1
              kv_slot = block_tables[slot, position // B] * B + position % B      (-1 for slot 0)
    feedback: last_token[slot] = token;  length[slot] += 1;  ring[step % depth, row] = token
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class SlotTable(NamedTuple):
    """State by slot, S slots.

    Attributes:
        last_token: [S] int64, the token whose KV the next step computes.
        length: [S] int64, positions whose KV is in the cache: that token's position.
        block_tables: [S, most blocks] int32.
    """

    last_token: Tensor
    length: Tensor
    block_tables: Tensor


class DecodeInputs(NamedTuple):
    """Inputs of R decode rows: token_ids, positions, kv_slots [R] int64, kv_lens [R] int32."""

    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    kv_lens: Tensor


@triton.jit(do_not_specialize=["stride_table", "rows"])
def _prepare_decode_kernel(
    token_ids, positions, kv_slots, kv_lens, slots, last_token, length, block_tables,
    stride_table, rows, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    slot = tl.load(slots + row, mask=inside, other=0).to(tl.int64)
    real = slot > 0
    token = tl.load(last_token + slot, mask=real, other=0)
    position = tl.load(length + slot, mask=real, other=0)
    block = tl.load(block_tables + slot * stride_table + position // BLOCK, mask=real, other=0)
    kv_slot = block.to(tl.int64) * BLOCK + position % BLOCK
    tl.store(token_ids + row, token, mask=inside)
    tl.store(positions + row, position, mask=inside)
    tl.store(kv_slots + row, tl.where(real, kv_slot, -1), mask=inside)
    tl.store(kv_lens + row, tl.where(real, position + 1, 0).to(tl.int32), mask=inside)


def prepare_decode(table: SlotTable, slots: Tensor, inputs: DecodeInputs, block_size: int) -> None:
    """Fills `inputs` for the rows' `slots` [R] int32; slot 0 gets length 0 and no KV slot."""
    rows = slots.shape[0]
    size = min(128, triton.next_power_of_2(rows))
    _prepare_decode_kernel[(triton.cdiv(rows, size),)](
        *inputs, slots, *table, table.block_tables.stride(0), rows,
        BLOCK=block_size, ROWS=size, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "depth"])
def _feed_back_kernel(
    last_token, length, ring, step, tokens, slots, stride_ring, rows, depth, ROWS: tl.constexpr
):
    row = tl.arange(0, ROWS)
    inside = row < rows
    slot = tl.load(slots + row, mask=inside, other=0).to(tl.int64)
    real = slot > 0
    token = tl.load(tokens + row, mask=inside, other=0)
    tl.store(last_token + slot, token, mask=real)
    tl.store(length + slot, tl.load(length + slot, mask=real, other=0) + 1, mask=real)
    now = tl.load(step)
    tl.store(ring + now % depth * stride_ring + row, token, mask=inside)
    tl.debug_barrier()  # no thread may read the step after it has moved on
    tl.store(step, now + 1)


def feed_back(table: SlotTable, slots: Tensor, tokens: Tensor, ring: Tensor, step: Tensor) -> None:
    """Hands the sampled `tokens` [R] int64 to the slots' next step and to the host.

    `ring` [depth, most rows] int64 takes the tokens at row `step` % depth, and `step` [1] int64
    goes up by one, both on the device, so that a captured graph moves on by itself. Slots of one
    step differ, but for slot 0.
    """
    rows = slots.shape[0]
    _feed_back_kernel[(1,)](
        table.last_token, table.length, ring, step, tokens, slots, ring.stride(0), rows,
        ring.shape[0], ROWS=triton.next_power_of_2(rows), num_warps=4,
    )  # fmt: skip
