"""SiLU-mul: the middle of a gated MLP, from the packed product of the gate and up projections.

    out = gate * sigmoid(gate) * up          gate, up: the halves of a row

SiLU is computed in float32 and rounded to the storage type before the product, as the models' own
code does.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from forebay_worker.kernels.overlap import let_next_in, overlaps, wait_for_inputs

_COLUMNS = 1024  # per program: 128 threads with one 16-byte load of gate and one of up each


@triton.jit
def _silu_mul_kernel(
    out, gate_up, stride_in, stride_out, columns, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    source = gate_up + row * stride_in + column
    wait_for_inputs(OVERLAP)
    let_next_in(OVERLAP)
    gate = tl.load(source, mask=inside, other=0.0)
    up = tl.load(source + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide * tl.sigmoid(wide)).to(gate.dtype).to(tl.float32)
    product = silu * up.to(tl.float32)
    tl.store(out + row * stride_out + column, product.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """[T, I] from gate_up [T, 2 I], whose last dimension is contiguous."""
    rows, both = gate_up.shape
    columns = both // 2
    if out is None:
        out = torch.empty((rows, columns), dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul_kernel[(rows, triton.cdiv(columns, _COLUMNS))](
        out,
        gate_up,
        gate_up.stride(0),
        out.stride(0),
        columns,
        COLUMNS=_COLUMNS,
        num_warps=4,
        OVERLAP=overlaps(out.device),
        launch_pdl=overlaps(out.device),
    )
    return out
