"""RMSNorm.

    out = x / sqrt(mean(x^2) + eps) * weight

One program per row keeps the row in registers: x is read once, out written once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay_worker.kernels.overlap import let_next_in, overlaps, wait_for_inputs


@triton.jit
def _rms_norm_kernel(
    out, x, weight, eps, stride_x, stride_out, hidden, HIDDEN: tl.constexpr, OVERLAP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, HIDDEN)
    inside = column < hidden
    gain = tl.load(weight + column, mask=inside, other=0.0)
    wait_for_inputs(OVERLAP)
    let_next_in(OVERLAP)
    value = tl.load(x + row * stride_x + column, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / hidden + eps)
    # Rounded to the storage type before the weight, as the models' own code does.
    normed = (wide * scale).to(value.dtype).to(tl.float32) * gain.to(tl.float32)
    tl.store(out + row * stride_out + column, normed.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """RMSNorm of x [T, H] with weight [H]; the last dimension of each is contiguous."""
    out = torch.empty_like(x) if out is None else out
    rows, hidden = x.shape
    size = triton.next_power_of_2(hidden)
    _rms_norm_kernel[(rows,)](
        out, x, weight, eps, x.stride(0), out.stride(0), hidden, HIDDEN=size,
        OVERLAP=overlaps(x.device), launch_pdl=overlaps(x.device),
        # 8 elements (16 bytes of bf16) per thread and load.
        num_warps=max(1, min(16, size // 256)),
    )  # fmt: skip
    return out
