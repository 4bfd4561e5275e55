"""Log-probabilities: of a row's chosen token, and its K likeliest, from raw logits where they lie.

    total[r] = log sum over id of exp(x[id])                     x: the logits of row places[r]
    own[r] = x[tokens[places[r]]] - total[r]
    values[r, n] = x[ids[r, n]] - total[r]                       n below K: the K largest x

The likeliest come first, and of equal ones the lowest id. A NaN counts as the largest of all, and
makes the row's results NaN; a row without a finite largest logit has no sensible ones either.

Logit and id make one whole number of 64 bits, the logit's place in the order of the floats above
and the id, mirrored, below: they are all different, so each of the K is the largest number below
the one before. Each program keeps 4,096 ids in registers; the last to arrive merges their best in
the same way. K costs time but no other kernel: it is compiled once.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 32
"""The largest K."""
_CHUNK = 4096  # ids of a program: 16 numbers of 64 bits for each of 256 threads


@triton.jit
def _key(x, ids):
    """Larger for a larger float32, and among equal ones for a lower id."""
    bits = tl.where(x == 0, 0.0, x).to(tl.uint32, bitcast=True).to(tl.int64)
    place = tl.where(bits >= 0x80000000, 0x7FFFFFFF - bits, bits)
    place = tl.where(x != x, 0x7FFFFFFF, place)
    return (place << 32) + (0x7FFFFFFF - ids)


@triton.jit
def _logit(key):
    place = key >> 32
    bits = tl.where(place < 0, 0x7FFFFFFF - place, place)
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _largest(keys, most, MOST: tl.constexpr):
    """The `most` largest of different keys [N], the largest first: [MOST]."""
    slot = tl.arange(0, MOST)
    least = tl.full((), -0x7FFFFFFFFFFFFFFF, tl.int64)
    found = tl.full((MOST,), -0x7FFFFFFFFFFFFFFF, tl.int64)
    last = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    for at in range(most):
        last = tl.max(tl.where(keys < last, keys, least), 0)
        found = tl.where(slot == at, last, found)
    return found


@triton.jit
def _anchor(top):
    """What is taken off before exp: the largest logit, unless it is infinite."""
    return tl.where(tl.abs(top) == float("inf"), 0.0, top)


@triton.jit(do_not_specialize=["most"])
def _logprobs_kernel(
    own, values, best, logits, tokens, places, keys, tops, sums, arrivals, stride, vocab, most,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    chunks = tl.num_programs(1)
    place = tl.load(places + row).to(tl.int64)
    raw = logits + place * stride
    slot = tl.arange(0, MOST)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(raw + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
    top = tl.max(x, 0)
    key = tl.where(ids < vocab, _key(x, ids), -0x7FFFFFFFFFFFFFFF)
    mine = (row * chunks + chunk).to(tl.int64)
    tl.store(tops + mine, top)
    tl.store(sums + mine, tl.sum(tl.exp(x - _anchor(top)), 0))
    tl.store(keys + mine * MOST + slot, _largest(key, most, MOST), mask=slot < most)
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals + row, 1, sem="acq_rel", scope="gpu")
    if arrived != chunks - 1:
        return
    tl.store(arrivals + row, 0)
    first = (row * chunks).to(tl.int64)
    part = tl.arange(0, CHUNKS)
    here = part < chunks
    each = tl.load(tops + first + part, mask=here, other=-float("inf"), cache_modifier=".cg")
    amount = tl.load(sums + first + part, mask=here, other=0.0, cache_modifier=".cg")
    anchor = _anchor(tl.max(each, 0))
    total = tl.log(tl.sum(amount * tl.exp(_anchor(each) - anchor), 0)) + anchor
    cell = tl.arange(0, CHUNKS * MOST)
    there = (cell // MOST < chunks) & (cell % MOST < most)
    merged = tl.load(
        keys + first * MOST + cell, mask=there, other=-0x7FFFFFFFFFFFFFFF, cache_modifier=".cg"
    )
    found = _largest(merged, most, MOST)
    chosen = tl.load(raw + tl.load(tokens + place)).to(tl.float32)
    tl.store(own + row, chosen - total)
    tl.store(values + row * MOST + slot, _logit(found) - total, mask=slot < most)
    low = (found & 0x7FFFFFFF).to(tl.int32)
    tl.store(best + row * MOST + slot, 0x7FFFFFFF - low, mask=slot < most)


class LogprobsScratch(NamedTuple):
    """Scratch of R rows of C chunks.

    Attributes:
        keys: [R, C, MOST] int64, tops, sums: [R, C] float32, of the chunks.
        arrivals: [R] int32, zero between launches.
    """

    keys: Tensor
    tops: Tensor
    sums: Tensor
    arrivals: Tensor


def make_logprobs_scratch(rows: int, vocab: int, device: torch.device) -> LogprobsScratch:
    """For up to `rows` rows; 10 KB a row of 151,936 ids."""
    chunks = triton.cdiv(vocab, _CHUNK)
    return LogprobsScratch(
        torch.empty((rows, chunks, MOST), dtype=torch.int64, device=device),
        torch.empty((rows, chunks), dtype=torch.float32, device=device),
        torch.empty((rows, chunks), dtype=torch.float32, device=device),
        torch.zeros((rows,), dtype=torch.int32, device=device),
    )


def read_logprobs(
    logits: Tensor,
    tokens: Tensor,
    places: Tensor,
    most: int,
    scratch: LogprobsScratch,
    own: Tensor,
    values: Tensor,
    ids: Tensor,
    *,
    rows: int,
) -> None:
    """Writes R = `rows` rows of `own` [R], `values` [R, MOST], float32, and `ids` [R, MOST], int32.

    Args:
        logits: [any, V] of any float type, the last dimension contiguous.
        tokens: [any] int64, the chosen token of each row of the logits.
        places: [R] int32, the rows of the logits.
        most: K, at most MOST and at most V; the columns from there on are left as they are.
        scratch: of R rows or more.
    """
    vocab = logits.shape[1]
    assert most <= min(MOST, vocab)
    chunks = triton.cdiv(vocab, _CHUNK)
    _logprobs_kernel[(rows, chunks)](
        own, values, ids, logits, tokens, places, *scratch, logits.stride(0), vocab, most,
        CHUNKS=triton.next_power_of_2(chunks), CHUNK=_CHUNK, MOST=MOST, num_warps=8,
    )  # fmt: skip
