"""The linear layer for few rows against torch."""

import pytest
import torch
from forebay_worker.kernels import fp8, reference
from forebay_worker.kernels.fp8 import Fp8
from forebay_worker.kernels.row_linear import RowConfig, row_linear
from forebay_worker.kernels.small_linear import (
    LinearConfig,
    Norm,
    make_scratch,
    make_squares,
    small_linear,
)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "splits"), [(1, 1), (19, 3)])
def test_norm_gate_and_residual_are_those_of_the_layers(
    dtype: torch.dtype, rows: int, splits: int, device: torch.device
) -> None:
    x = torch.randn(rows, 120, device=device).to(dtype)
    residual = (torch.randn(rows, 200, device=device) * 3).to(dtype)
    down = (torch.randn(200, 120, device=device) / 11).to(dtype)
    gate_up = (torch.randn(144, 200, device=device) / 14).to(dtype)
    config = LinearConfig(tile_n=32, tile_k=64, splits=splits)
    scratch, gate_scratch = (make_scratch(each, config, device) for each in (200, 144))
    squares = make_squares(200, config.tile_n, device)
    total = residual.double() + functional.linear(x.double(), down.double())
    ones = torch.ones(200, device=device, dtype=torch.float64)
    ref = reference.norm_gate_up(total, ones, 1e-6, gate_up.double())
    for _ in range(2):
        added = residual.clone()
        small_linear(x, down, added, scratch, config, add=True, squares=squares)
        assert float((added.double() - total).norm() / total.norm()) < TOLERANCE[dtype]
        gated = torch.full((rows, 72), torch.nan, dtype=dtype, device=device)
        norm = Norm(squares, len(squares), 1e-6)
        small_linear(added, gate_up, gated, gate_scratch, config, norm=norm, gate=True)
        assert float((gated.double() - ref).norm() / ref.norm()) < 2 * TOLERANCE[dtype]
    assert not scratch.arrivals.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tile_n", "tile_k"), [(8, 128), (16, 64), (16, 256)])
def test_a_row_alone_gets_the_same_without_matrix_units(
    dtype: torch.dtype, tile_n: int, tile_k: int, device: torch.device
) -> None:
    x = torch.randn(1, 120, device=device).to(dtype)
    residual = (torch.randn(1, 200, device=device) * 3).to(dtype)
    down = (torch.randn(200, 120, device=device) / 11).to(dtype)
    gate_up = (torch.randn(144, 200, device=device) / 14).to(dtype)
    config = RowConfig(tile_n, tile_k)
    squares = make_squares(200, tile_n, device)
    plain = torch.full((1, 200), torch.nan, dtype=dtype, device=device)
    row_linear(x, down, plain, config)
    ref = functional.linear(x.double(), down.double())
    assert float((plain.double() - ref).norm() / ref.norm()) < TOLERANCE[dtype]
    total = residual.double() + ref
    added = row_linear(x, down, residual, config, add=True, squares=squares)
    assert float((added.double() - total).norm() / total.norm()) < TOLERANCE[dtype]
    ones = torch.ones(200, device=device, dtype=torch.float64)
    wanted = reference.norm_gate_up(total, ones, 1e-6, gate_up.double())
    gated = torch.full((1, 72), torch.nan, dtype=dtype, device=device)
    row_linear(added, gate_up, gated, config, norm=Norm(squares, len(squares), 1e-6), gate=True)
    assert float((gated.double() - wanted).norm() / wanted.norm()) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_alone_times_an_e4m3_weight(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(1, 120, device=device).to(dtype)
    weight = Fp8(*fp8.quantize(torch.randn(144, 120, device=device)))
    wide = weight.values.float().double() * weight.scale[0][:, None].double()
    plain, gated = (torch.full((1, each), torch.nan, device=device).to(dtype) for each in (144, 72))
    config = RowConfig(16, 64)
    row_linear(x, weight, plain, config)
    row_linear(x, weight, gated, config, gate=True)
    ref = functional.linear(x.double(), wide)
    assert float((plain.double() - ref).norm() / ref.norm()) < TOLERANCE[dtype]
    halves = reference.silu_mul(ref)
    assert float((gated.double() - halves).norm() / halves.norm()) < 2 * TOLERANCE[dtype]
