"""Adjusted logits: what grammars, clients and the engine allow, favour and punish, in one pass.

For each id with raw logit x, in this order, with what the row's words say of the id:

    x = -inf                              where the row has bits and the id's is 0
    x = -inf                              where the id is banned
    x = x + bias
    x = x / repetition if x > 0 else x * repetition              where it was asked or said
    x = x - (presence + frequency * times)                       where it was said so many times

An id is at most once among the row's biases and at most once among what was said, so nothing is
summed in an order of chance. The newest token of a row may be known to the card alone: it counts
once more than the words say.

Each program writes 8,192 ids and then looks through all words of its row for those that are its
own: nobody waits for another program. It knows nothing of tokens that are chosen from this.
"""

import triton
import triton.language as tl
from torch import Tensor

from forebay_worker.kernels.reference import Adjustments

_CHUNK = 8192  # ids of a program: 32 for each of 256 threads
_LIST = 1024  # words looked through at a time


@triton.jit
def _ids_of(words, start, end, first, last, LIST: tl.constexpr):
    """A block of words, the ids in them, and which of these are in first..last."""
    at = start + tl.arange(0, LIST)
    word = tl.load(words + at, mask=at < end, other=-1)
    ids = (word & 0xFFFFFFFF).to(tl.int32)  # of no word: -1
    return word, ids, (ids >= first) & (ids < last)


@triton.jit
def _punish(x, times, repetition, presence, frequency):
    x = tl.where(x > 0, tl.div_rn(x, repetition + tl.zeros_like(x)), x * repetition)
    return tl.where(times > 0, x - (presence + frequency * times.to(tl.float32)), x)


@triton.jit
def _adjust_kernel(
    out, logits, token_ids, places, newest, edges, repetition, presence, frequency, words,
    stride_out, stride, vocab, CHUNK: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    first = tl.program_id(1) * CHUNK
    last = tl.minimum(first + CHUNK, vocab)
    raw = logits + tl.load(places + row).to(tl.int64) * stride
    own = out + row.to(tl.int64) * stride_out
    banned_at = tl.load(edges + row * 5)
    biased_at = tl.load(edges + row * 5 + 1)
    said_at = tl.load(edges + row * 5 + 2)
    bits_at = tl.load(edges + row * 5 + 3)
    end = tl.load(edges + row * 5 + 4)

    ids = first + tl.arange(0, CHUNK)
    inside = ids < last
    x = tl.load(raw + ids, mask=inside, other=0.0).to(tl.float32)
    if end > bits_at:
        bits = tl.load(words + bits_at + ids // 64, mask=inside, other=0)
        x = tl.where(((bits >> (ids % 64).to(tl.int64)) & 1) == 1, x, -float("inf"))
    tl.store(own + ids, x, mask=inside)
    tl.debug_barrier()

    for start in range(banned_at, biased_at, LIST):
        _, cells, mine = _ids_of(words, start, biased_at, first, last, LIST)
        tl.store(own + cells, tl.full((LIST,), -float("inf"), tl.float32), mask=mine)
    tl.debug_barrier()

    for start in range(biased_at, said_at, LIST):
        word, cells, mine = _ids_of(words, start, said_at, first, last, LIST)
        bias = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        plain = tl.load(own + cells, mask=mine, other=0.0)
        tl.store(own + cells, plain + bias, mask=mine)
    tl.debug_barrier()

    penalty = tl.load(repetition + row)
    once = tl.load(presence + row)
    often = tl.load(frequency + row)
    new = tl.load(newest + row)
    token = tl.full((), -2, tl.int64)
    if new >= 0:
        token = tl.load(token_ids + new)
    known = tl.zeros((LIST,), tl.int32)
    for start in range(said_at, bits_at, LIST):
        word, cells, mine = _ids_of(words, start, bits_at, first, last, LIST)
        again = (cells == token).to(tl.int32)
        known += again
        biased = tl.load(own + cells, mask=mine, other=0.0)
        times = (word >> 32).to(tl.int32) + again
        tl.store(own + cells, _punish(biased, times, penalty, once, often), mask=mine)
    alone = (tl.sum(known, 0) == 0) & (token >= first) & (token < last)
    if alone:
        unsaid = tl.load(own + token)
        tl.store(own + token, _punish(unsaid, tl.full((), 1, tl.int32), penalty, once, often))


def adjust(logits: Tensor, token_ids: Tensor, rows: Adjustments, out: Tensor) -> None:
    """Writes adjusted logits to each row of `out` [R, V] float32.

    Args:
        logits: [any, V] of any float type, the last dimension contiguous. They may be `out`, where
            the places are counted from 0 on.
        token_ids: [any] int64, where the newest tokens are.
        rows: of R rows or more.
    """
    count, vocab = out.shape
    _adjust_kernel[(count, triton.cdiv(vocab, _CHUNK))](
        out, logits, token_ids, *rows, out.stride(0), logits.stride(0), vocab,
        CHUNK=_CHUNK, LIST=_LIST, num_warps=8,
    )  # fmt: skip
