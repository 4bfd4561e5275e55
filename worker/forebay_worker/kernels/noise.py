"""The sampler's noise: 32 bits per (seed, position, token id), and Gumbel noise of them.

A pure function, so a sequence that is batched otherwise, preempted or moved to another worker draws
the same noise. `sampling.py` holds the same arithmetic for the card: the bits are equal there, the
floats within rounding. It knows nothing of logits.

    mix(x):  x ^= x >> 16;  x *= 0x7feb352d;  x ^= x >> 15;  x *= 0x846ca68b;  x ^= x >> 16
    key0 = mix(lo + mix(hi + mix(position + 0x9e3779b9)))
    key1 = mix(hi ^ mix(lo + mix(position ^ 0x85ebca6b)))        lo, hi: the halves of the seed
    bits = mix(mix(id + key0) ^ key1)                            all modulo 2^32
    u = (bits + 0.5) / 2^32;   E = -log(1 - u);   gumbel = -log(E)

`mix` (C. Wellons' hash prospector) is a bijection, so no two ids of a row share their bits. The
winner among 150,000 ids has an E of about 1 / 150,000; it comes from a *small* u, where float32
is exact to 24 bits, and not from a u near 1, where it is not.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """Scrambles 32 bits held in int64; the products wrap in 64 bits and keep the low 32 right."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def noise_bits(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Bits [R, vocab_size] (int64, below 2^32) of rows with `seeds` [R] and `positions` [R], int64.

    A seed is the 64 bits of an unsigned seed read as int64.
    """
    low, high = seeds & _MASK, (seeds >> 32) & _MASK
    key0 = _mix((low + _mix((high + _mix((positions + 0x9E3779B9) & _MASK)) & _MASK)) & _MASK)
    key1 = _mix(high ^ _mix((low + _mix((positions & _MASK) ^ 0x85EBCA6B)) & _MASK))
    ids = torch.arange(vocab_size, dtype=torch.int64, device=seeds.device)
    return _mix(_mix((ids[None, :] + key0[:, None]) & _MASK) ^ key1[:, None])


def gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, of `noise_bits`."""
    u = (bits.to(torch.float32) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-u.clamp(max=1 - 2.0**-24)))
