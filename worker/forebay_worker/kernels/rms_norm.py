"""RMSNorm, with the residual added first.

    residual = residual + x
    out      = residual / sqrt(mean(residual^2) + eps) * weight

The sum is rounded to the storage type before the norm reads it, as the models' own code does. One
program per row keeps the row in registers: x and residual are read once, residual and out written
once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay_worker.kernels.overlap import overlaps, wait_for_inputs


@triton.jit
def _rms_norm_kernel(
    out, x, residual, weight, eps, stride_x, stride_residual, stride_out, hidden,
    ADD: tl.constexpr, HIDDEN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, HIDDEN)
    inside = column < hidden
    gain = tl.load(weight + column, mask=inside, other=0.0)
    wait_for_inputs(OVERLAP)
    value = tl.load(x + row * stride_x + column, mask=inside, other=0.0)
    if ADD:
        at = residual + row * stride_residual + column
        before = tl.load(at, mask=inside, other=0.0)
        value = (value.to(tl.float32) + before.to(tl.float32)).to(before.dtype)
        tl.store(at, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / hidden + eps)
    normed = (wide * scale).to(value.dtype).to(tl.float32) * gain.to(tl.float32)
    tl.store(out + row * stride_out + column, normed.to(out.dtype.element_ty), mask=inside)


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor | None
) -> Tensor:
    out = torch.empty_like(x) if out is None else out
    rows, hidden = x.shape
    size = triton.next_power_of_2(hidden)
    _rms_norm_kernel[(rows,)](
        out, x, x if residual is None else residual, weight, eps,
        x.stride(0), 0 if residual is None else residual.stride(0), out.stride(0), hidden,
        ADD=residual is not None, HIDDEN=size,
        OVERLAP=overlaps(x.device), launch_pdl=overlaps(x.device),
        # 8 elements (16 bytes of bf16) per thread and load.
        num_warps=max(1, min(16, size // 256)),
    )  # fmt: skip
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """RMSNorm of x [T, H] with weight [H]; the last dimension of each is contiguous."""
    return _launch(x, None, weight, eps, out)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
) -> Tensor:
    """Adds x [T, H] to residual [T, H] in place; returns the RMSNorm of the sum. `out` may be x."""
    return _launch(x, residual, weight, eps, out)
