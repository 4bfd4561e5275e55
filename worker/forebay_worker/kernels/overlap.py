"""Programmatic dependent launch: kernels start before the ones that they follow have ended.

A kernel lets the next one be placed, and waits for its own inputs, with two calls. Between them and
before both it may read what was there before the last kernel: weights, tables, keys and values. A
wait ends when the kernel before has ended, which itself has waited for the one before it.

Most let the next one in at once, so that several kernels stand on the card, each with its first
bytes on their way, and a step of Qwen3-0.6B at 8 rows takes 1.06 ms on an H200 instead of 1.15, at
32 rows 1.77 instead of 2.06. Where the next one in the chain is wide and would take the room that
the kernel's own programs still need, it is let in after the wait (`silu_mul`) or not before the end
(attention: 8 rows went from 1.05 to 1.25 ms). It needs compute capability 9.0; elsewhere the
launches are ordinary.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_in(OVERLAP: tl.constexpr):
    """The next kernel may be placed on the card once all programs have come here or ended."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(OVERLAP: tl.constexpr):
    """Comes before the first read of what the kernel before wrote, and before any write."""
    if OVERLAP:
        gdc_wait()


@cache
def overlaps(device: torch.device) -> bool:
    """Whether kernels on `device` may overlap."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
