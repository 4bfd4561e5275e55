"""Sampling: one token per row of logits, without softmax and without a sort.

    token = argmax over the kept ids of  logit / temperature + gumbel(seed, position, id)

is a draw from softmax(logit / temperature) over the kept ids (Gumbel-max); `noise.py` defines the
noise. An id with logit x is kept when all of these hold, ties included:

    top_k:  fewer than top_k logits are above x
    top_p:  the probability of the ids above x, among those that top_k keeps, is below top_p
    min_p:  exp((x - max) / temperature) >= min_p

Kept ids are those from some logit on, so no threshold is needed to test one: if the argmax over
*all* ids is kept, it is also the argmax over the kept ones, and if it is not, nothing at or below
its logit is, and the search goes on above it. With top_p = 0.95 the first try
holds 95 times in 100, and each further try halves the remaining probability or better.

Only top_p after top_k needs the k-th largest logit itself. The first pass leaves the maxima of
4,096 segments of the row; the k-th largest of those, found in registers, is a lower bound of it and
for small k nearly always equal, which one counting pass proves; else bisection goes on from there.

Several programs share a row's first pass; the one that arrives last merges and filters. It
knows nothing of penalties, bias and masks, which have changed the logits before.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # ids per pass step: 8 per thread
_SEGMENTS = 4096
_PROGRAMS = 264  # programs that the first pass aims at: two per multiprocessor of an H200


class SamplingRows(NamedTuple):
    """Parameters of R rows on the device, one [R] tensor each.

    Attributes:
        temperature: float32; 0: greedy, and nothing else matters.
        top_k: int32; 0: off.
        top_p, min_p: float32; 1 and 0: off.
        seeds, positions: int64; the seed's 64 bits, and the position that the token will have.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor


@triton.jit
def _mix(x):
    x = x ^ (x >> 16)
    x = x * tl.full((), 0x7FEB352D, tl.uint32)
    x = x ^ (x >> 15)
    x = x * tl.full((), 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _noise_keys(seed, position):
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    at = position.to(tl.uint32)
    key0 = _mix(low + _mix(high + _mix(at + tl.full((), 0x9E3779B9, tl.uint32))))
    key1 = _mix(high ^ _mix(low + _mix(at ^ tl.full((), 0x85EBCA6B, tl.uint32))))
    return key0, key1


@triton.jit
def _noise_bits(ids, key0, key1):
    return _mix(_mix(ids.to(tl.uint32) + key0) ^ key1)


@triton.jit
def _gumbel(bits):
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    # log(1 - u) loses all of a small u, which is where the winners are: a series below 1/16.
    series = u * (1 + u * (0.5 + u * (0.33333334 + u * (0.25 + u * (0.2 + u * 0.16666667)))))
    exact = -tl.log(1 - tl.minimum(u, 0.99999994))
    return -tl.log(tl.where(u < 0.0625, series, exact))


@triton.jit
def _best(row, first, last, above, least, inverse, key0, key1, BLOCK: tl.constexpr):
    """Best id in first..last, its logit above `above` and from `least` on: value, id, logit.

    Also each lane's largest logit [BLOCK] and the number of NaNs. `inverse` is 1 / temperature, or
    0 for greedy: then the value is the logit itself.
    """
    lane = tl.arange(0, BLOCK)
    value = tl.full((BLOCK,), -float("inf"), tl.float32)
    best_id = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
    best_logit = tl.full((BLOCK,), -float("inf"), tl.float32)
    tops = tl.full((BLOCK,), -float("inf"), tl.float32)
    bad = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(first, last, BLOCK, num_stages=3):
        ids = start + lane
        logit = tl.load(row + ids, mask=ids < last, other=-float("inf")).to(tl.float32)
        bad += (logit != logit).to(tl.int32)
        tops = tl.maximum(tops, logit)
        score = logit
        if inverse > 0:
            score = logit * inverse + _gumbel(_noise_bits(ids, key0, key1))
        better = (score > value) & (logit > above) & (logit >= least)
        value = tl.where(better, score, value)
        best_id = tl.where(better, ids, best_id)
        best_logit = tl.where(better, logit, best_logit)
    best = tl.max(value, 0)
    # The lowest id among equals, as a plain argmax gives.
    winner = tl.min(tl.where(value == best, best_id, 0x7FFFFFFF), 0)
    logit = tl.max(tl.where(best_id == winner, best_logit, -float("inf")), 0)
    return best, winner, logit, tops, tl.sum(bad, 0)


@triton.jit
def _above(row, vocab, logit, least, top, inverse, BLOCK: tl.constexpr):
    """How many logits lie above `logit`, and the masses above `logit` and from `least` on.

    A mass is the sum of exp((x - top) * inverse).
    """
    lane = tl.arange(0, BLOCK)
    count = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float32)
    whole = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, vocab, BLOCK, num_stages=3):
        ids = start + lane
        x = tl.load(row + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
        weight = tl.exp((x - top) * inverse)
        count += (x > logit).to(tl.int32)
        mass += tl.where(x > logit, weight, 0.0)
        whole += tl.where(x >= least, weight, 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0), tl.sum(whole, 0)


@triton.jit
def _place(x, SHIFT: tl.constexpr):
    """Place of a float32 in the order of the floats, in steps of 2^SHIFT: 16 for bfloat16."""
    bits = x.to(tl.uint32, bitcast=True).to(tl.int64)
    return tl.where(bits >= 0x80000000, 0xFFFFFFFF - bits, bits + 0x80000000) >> SHIFT


@triton.jit
def _border(place, SHIFT: tl.constexpr):
    """The least float32 at a place; -inf at the lowest, below which the NaNs are."""
    whole = tl.maximum(place << SHIFT, 0x007FFFFF)
    bits = tl.where(whole >= 0x80000000, whole - 0x80000000, 0xFFFFFFFF - whole)
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _kth_of(values, k, top, SHIFT: tl.constexpr):
    """A place that at least k of `values` [N] reach, the highest or one that exactly k reach.

    0, which all logits reach, when N is below k.
    """
    places = _place(values, SHIFT)
    low = tl.zeros((), tl.int64)
    high = _place(top, SHIFT) + 1  # nothing reaches this
    reached = k + 1
    while (high - low > 1) & (reached != k):
        middle = (low + high) // 2
        count = tl.sum((places >= middle).to(tl.int32), 0)
        if count >= k:
            low = middle
            reached = count
        else:
            high = middle
    return low


@triton.jit
def _kth_largest(row, vocab, k, low, top, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """The k-th largest logit, or a border that exactly k reach, from a place `low` that k reach."""
    lane = tl.arange(0, BLOCK)
    high = _place(top, SHIFT) + 1
    reached = k + 1
    probe = low + 1  # mostly fewer reach this: then low is the answer
    while (high - low > 1) & (reached != k):
        count = tl.zeros((BLOCK,), tl.int32)
        border = _border(probe, SHIFT)
        for start in tl.range(0, vocab, BLOCK, num_stages=3):
            ids = start + lane
            x = tl.load(row + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
            count += (x >= border).to(tl.int32)
        found = tl.sum(count, 0)
        if found >= k:
            low = probe
            reached = found
        else:
            high = probe
        probe = (low + high) // 2
    return _border(low, SHIFT)


@triton.jit
def _sample_kernel(
    tokens, corrupt, places, logits, temperature, top_k, top_p, min_p, seeds, positions,
    partial, partial_ids, maxima, arrivals, stride, vocab, span,
    SPLITS: tl.constexpr, SEGMENTS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
    PLACED: tl.constexpr,
):  # fmt: skip
    row_id = tl.program_id(0)
    split = tl.program_id(1)
    row = logits + row_id.to(tl.int64) * stride
    heat = tl.load(temperature + row_id)
    k = tl.load(top_k + row_id)
    p = tl.load(top_p + row_id)
    least_p = tl.load(min_p + row_id)
    k_on = (k > 0) & (k < vocab)
    inverse = tl.where(heat > 0, 1 / tl.where(heat > 0, heat, 1.0), 0.0)
    key0, key1 = _noise_keys(tl.load(seeds + row_id), tl.load(positions + row_id))
    first = split * span
    last = tl.minimum(first + span, vocab)
    value, winner, logit, tops, bad = _best(
        row, first, last, -float("inf"), -float("inf"), inverse, key0, key1, BLOCK
    )
    top = tl.max(tops, 0)
    segment = tl.arange(0, SPLITS * SEGMENTS)
    if k_on & (p < 1):
        mine = tl.max(tl.reshape(tops, (SEGMENTS, BLOCK // SEGMENTS)), 1)
        own = (row_id * SPLITS + split) * SEGMENTS + tl.arange(0, SEGMENTS)
        tl.store(maxima + own, mine)
    tl.debug_barrier()
    if SPLITS > 1:
        at = row_id * SPLITS + split
        tl.store(partial + at * 4, value)
        tl.store(partial + at * 4 + 1, logit)
        tl.store(partial + at * 4 + 2, top)
        tl.store(partial + at * 4 + 3, bad.to(tl.float32))
        tl.store(partial_ids + at, winner)
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + row_id, 1, sem="acq_rel", scope="gpu")
        if arrived != SPLITS - 1:
            return
        tl.store(arrivals + row_id, 0)
        base = row_id * SPLITS + tl.arange(0, SPLITS)
        values = tl.load(partial + base * 4, cache_modifier=".cg")
        value = tl.max(values, 0)
        ids = tl.load(partial_ids + base, cache_modifier=".cg")
        winner = tl.min(tl.where(values == value, ids, 0x7FFFFFFF), 0)
        each = tl.load(partial + base * 4 + 1, cache_modifier=".cg")
        logit = tl.max(tl.where(ids == winner, each, -float("inf")), 0)
        top = tl.max(tl.load(partial + base * 4 + 2, cache_modifier=".cg"), 0)
        bad = tl.sum(tl.load(partial + base * 4 + 3, cache_modifier=".cg"), 0).to(tl.int32)

    broken = (bad > 0) | (top == float("inf")) | (top == -float("inf"))
    filtered = (k_on | (p < 1) | (least_p > 0)) & (heat > 0) & (broken == 0)
    if filtered:
        floor = -float("inf")
        if least_p > 0:
            floor = top + tl.log(least_p) * heat
        least = -float("inf")
        if k_on & (p < 1):
            all_of_row = maxima + row_id * SPLITS * SEGMENTS + segment
            low = _kth_of(tl.load(all_of_row, cache_modifier=".cg"), k, top, SHIFT)
            least = _kth_largest(row, vocab, k, low, top, SHIFT, BLOCK)
        kept = False
        while kept == 0:
            count, mass, whole = _above(row, vocab, logit, least, top, inverse, BLOCK)
            kept = (
                ((count < k) | (k_on == 0)) & ((mass < p * whole) | (p >= 1)) & (logit >= floor)
            ) | (logit >= top)
            if kept == 0:
                _, winner, logit, _, _ = _best(
                    row, 0, vocab, logit, tl.maximum(least, floor), inverse, key0, key1, BLOCK
                )
    place = row_id
    if PLACED:
        place = tl.load(places + row_id)
    tl.store(tokens + place, tl.where(broken, 0, winner).to(tl.int64))
    tl.store(corrupt + place, broken.to(tl.int32))


class SamplingScratch(NamedTuple):
    """Scratch of one batch size of R rows with S programs each.

    Attributes:
        partial: [R, S, 4] float32; partial_ids: [R, S] int32, results of the first pass.
        maxima: [R, 4096] float32, of segments.
        arrivals: [R] int32, zero between launches.
    """

    partial: Tensor
    partial_ids: Tensor
    maxima: Tensor
    arrivals: Tensor


def make_scratch(rows: int, device: torch.device, programs: int = _PROGRAMS) -> SamplingScratch:
    """Scratch for `rows` rows whose first pass takes about `programs` programs.

    A row gets a power of two of them, at most 32: 5,000 ids each of a vocabulary of 151,936.
    """
    splits = min(32, triton.next_power_of_2(max(1, programs // rows) + 1) // 2)
    return SamplingScratch(
        torch.empty((rows, splits, 4), dtype=torch.float32, device=device),
        torch.empty((rows, splits), dtype=torch.int32, device=device),
        torch.empty((rows, _SEGMENTS), dtype=torch.float32, device=device),
        torch.zeros((rows,), dtype=torch.int32, device=device),
    )


def sample(
    logits: Tensor,
    rows: SamplingRows,
    scratch: SamplingScratch,
    tokens: Tensor,
    corrupt: Tensor,
    block: int = _BLOCK,
    num_warps: int = 16,
    places: Tensor | None = None,
) -> None:
    """Writes a token per row of logits [R, V] to `tokens` [R] int64, or to the row's place in them,
    of `places` [R] int32.

    `corrupt` [R] int32 becomes 1 for a row with a NaN or without a finite largest logit, whose
    token is then 0. The last dimension of `logits` is contiguous; -inf masks an id. `scratch` and
    `rows` are of R rows or more.
    """
    count, vocab = logits.shape
    splits = scratch.partial_ids.shape[1]
    _sample_kernel[(count, splits)](
        tokens, corrupt, tokens if places is None else places,
        logits, *rows, *scratch, logits.stride(0), vocab,
        triton.cdiv(triton.cdiv(vocab, splits), 16) * 16,
        SPLITS=splits, SEGMENTS=min(block, _SEGMENTS // splits),
        SHIFT=16 if logits.dtype == torch.bfloat16 else 0, BLOCK=block, num_warps=num_warps,
        PLACED=places is not None,
    )  # fmt: skip
