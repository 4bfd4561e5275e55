"""The linear layer for few rows against torch."""

import pytest
import torch
from forebay_worker.kernels.small_linear import LinearConfig, make_scratch, small_linear
from torch.nn import functional

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# The interpreter multiplies the bits of bfloat16 tiles as integers: those run on the card alone.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "splits"), [(1, 1), (5, 3), (33, 2)])
def test_small_linear_agrees_with_torch(
    dtype: torch.dtype, rows: int, splits: int, device: torch.device
) -> None:
    x = torch.randn(rows, 200, device=device).to(dtype)
    weight = torch.randn(72, 200, device=device).to(dtype)
    config = LinearConfig(tile_n=32, tile_k=64, splits=splits)
    scratch = make_scratch(72, config, device)
    ref = functional.linear(x.double(), weight.double())
    for _ in range(2):  # the second launch finds the counters as the first left them
        out = torch.full((rows, 72), torch.nan, dtype=dtype, device=device)
        small_linear(x, weight, out, scratch, config)
        assert float((out.double() - ref).norm() / ref.norm()) < TOLERANCE[dtype]
    assert not scratch.arrivals.any()
