"""What adapters add to a product, against the reference, at odd shapes and in any company."""

import pytest
import torch
from forebay_worker.kernels import reference
from forebay_worker.kernels.low_rank import adapt
from forebay_worker.kernels.reference import LowRank

ON_CARD = torch.cuda.is_available()
# The interpreter multiplies the bits of bfloat16 tiles as integers.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_CARD else [])]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SHAPES = {
    "qkv": ((96, 32, 32), 48),
    "gate and up": ((72, 72), 130),
    "output": ((70,), 96),
    "down, in slices": ((48,), 1100),
}


def make_low(
    sizes: tuple[int, ...], depth: int, rank: int, number: int, dtype: torch.dtype
) -> LowRank:
    a = torch.randn(number, len(sizes), rank, depth) / depth**0.5
    b = torch.randn(number, rank, sum(sizes)) / rank**0.5
    return LowRank(a.to(dtype), b.to(dtype), sizes)


def on(device: torch.device, low: LowRank) -> LowRank:
    return LowRank(low.a.to(device), low.b.to(device), low.sizes)


def check(
    device: torch.device, low: LowRank, adapters: list[int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Our sum and what it was before, held against the reference's, computed in float64."""
    rows = len(adapters)
    x = torch.randn(rows, low.a.shape[-1]).to(dtype)
    before = torch.randn(rows, sum(low.sizes)).to(dtype)
    which = torch.tensor(adapters)
    wide = LowRank(low.a.double(), low.b.double(), low.sizes)
    expected = reference.adapt(before.double(), x.double(), wide, which)
    out = before.clone().to(device)
    adapt(out, x.to(device), on(device, low), which.int().to(device))
    error = (out.cpu().double() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE[dtype]
    return out.cpu(), before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", [16, 64, *[512] * ON_CARD])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_row_gets_what_its_own_adapter_adds(
    device: torch.device, shape: str, rank: int, dtype: torch.dtype
) -> None:
    low = make_low(*SHAPES[shape], rank, 3, dtype)
    check(device, low, [0, 2, -1, 1, 1, 0, -1, 2, 2, 0, 0, 0, 1, -1, 1, 2, 0, 2, 1], dtype)


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 40])
def test_of_any_number_of_rows(device: torch.device, rows: int) -> None:
    low = make_low((40, 24, 24), 80, 16, 2, torch.float32)
    check(device, low, [at % 3 - 1 for at in range(rows)], torch.float32)


def test_rows_without_an_adapter_stay_as_they_are_to_the_bit(device: torch.device) -> None:
    low = make_low((40, 24, 24), 80, 16, 2, torch.float32)
    adapters = [-1, 1, -1, 0] * 5 + [-1] * 20
    out, before = check(device, low, adapters, torch.float32)
    kept = torch.tensor(adapters) < 0
    assert torch.equal(out[kept], before[kept])
    assert not torch.equal(out[~kept], before[~kept])


def test_a_row_is_the_same_alone_and_in_company_even_of_nan(device: torch.device) -> None:
    low = on(device, make_low((64,), 1100, 16, 3, torch.float32))
    x, out = torch.randn(24, 1100).to(device), torch.randn(24, 64).to(device)
    which = torch.tensor([at % 4 - 1 for at in range(24)], dtype=torch.int32, device=device)
    alone = [
        adapt(out[at : at + 1].clone(), x[at : at + 1], low, which[at : at + 1]) for at in range(24)
    ]
    x[5] = torch.nan
    together = adapt(out.clone(), x, low, which)
    for at in (0, 1, 2, 3, 4, 6, 7, 23):
        assert torch.equal(together[at], alone[at][0]), at
    assert together[5].isnan().all() == (which[5] >= 0)


def test_ranks_that_are_filled_up_with_zeros_add_nothing(device: torch.device) -> None:
    low = make_low((40, 24, 24), 80, 16, 2, torch.float32)
    low.a[0, :, 8:], low.b[0, 8:] = 0, 0
    check(device, low, [0, 1, 0, -1, 0], torch.float32)
