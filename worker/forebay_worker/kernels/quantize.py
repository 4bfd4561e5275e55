"""Rows to e4m3 with a scale each, on the way out of what came before a product of e4m3 weights.

    y = x  |  x / sqrt(mean(x^2) + eps) * weight  |  silu(gate) * up
    scale = max |y| / 448,  values = y / scale

One program per row keeps it in registers: x is read once, and a byte per number written. y is
rounded to x's type first, wherever the layers' own code does.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay_worker.kernels.fp8 import E4M3, LARGEST, LEAST, Fp8
from forebay_worker.kernels.overlap import let_next_in, overlaps, wait_for_inputs

_PLAIN, _NORM, _GATE = 0, 1, 2


@triton.jit
def _quantize_kernel(
    values, scales, x, weight, eps, stride_x, columns,
    KIND: tl.constexpr, COLUMNS: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < columns
    source = x + row * stride_x + column
    wait_for_inputs(OVERLAP)
    let_next_in(OVERLAP)
    raw = tl.load(source, mask=inside, other=0.0)
    y = raw.to(tl.float32)
    if KIND == 1:
        scale = tl.rsqrt(tl.sum(y * y, 0) / columns + eps)
        gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        y = ((y * scale).to(raw.dtype).to(tl.float32) * gain).to(raw.dtype).to(tl.float32)
    if KIND == 2:
        up = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
        silu = (y * tl.sigmoid(y)).to(raw.dtype).to(tl.float32)
        y = (silu * up).to(raw.dtype).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(y), 0), LEAST) / LARGEST
    tl.store(scales + row, scale)
    tl.store(values + row * columns + column, (y / scale).to(values.dtype.element_ty), mask=inside)


def quantize(x: Tensor) -> Fp8:
    """x [T, K] as it is; its last dimension is contiguous, here and below."""
    return _launch(x, x.shape[1], _PLAIN)


def rms_norm_quantize(x: Tensor, weight: Tensor, eps: float) -> Fp8:
    """rms_norm of x [T, K] with weight [K]."""
    return _launch(x, x.shape[1], _NORM, weight, eps)


def silu_mul_quantize(gate_up: Tensor) -> Fp8:
    """silu_mul of gate_up [T, 2 K]."""
    return _launch(gate_up, gate_up.shape[1] // 2, _GATE)


def _launch(
    x: Tensor, columns: int, kind: int, weight: Tensor | None = None, eps: float = 0.0
) -> Fp8:
    rows, size = len(x), triton.next_power_of_2(columns)
    values = torch.empty((rows, columns), dtype=E4M3, device=x.device)
    scale = torch.empty((1, rows), dtype=torch.float32, device=x.device)
    _quantize_kernel[(rows,)](
        values, scale, x, x if weight is None else weight, eps, x.stride(0), columns,
        KIND=kind, COLUMNS=size, LARGEST=LARGEST, LEAST=LEAST,
        OVERLAP=overlaps(x.device), launch_pdl=overlaps(x.device),
        num_warps=max(1, min(16, size // 256)),
    )  # fmt: skip
    return Fp8(values, scale)
