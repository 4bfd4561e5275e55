"""Log-probabilities of chosen tokens and of the likeliest, on the device."""

import math

import pytest
import torch
from forebay_worker.kernels import logprobs, reference
from forebay_worker.kernels.logprobs import MOST, make_logprobs_scratch, read_logprobs

Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def read(logits: torch.Tensor, tokens: torch.Tensor, places: list[int], most: int) -> Found:
    rows, device = len(places), logits.device
    scratch = make_logprobs_scratch(rows + 1, logits.shape[1], device)
    own = torch.full((rows + 1,), 7.0, device=device)
    values = torch.full((rows + 1, MOST), 7.0, device=device)
    ids = torch.full((rows + 1, MOST), 7, dtype=torch.int32, device=device)
    at = torch.tensor(places, dtype=torch.int32, device=device)
    for _ in range(2):  # the second launch finds the counters as the first left them
        read_logprobs(logits, tokens, at, most, scratch, own, values, ids, rows=rows)
    assert not scratch.arrivals.any()
    untouched = own[rows:], values[rows:], values[:, most:], ids[rows:], ids[:, most:]
    assert all(bool((each == 7).all()) for each in untouched)
    return own[:rows], values[:rows, :most], ids[:rows, :most]


def assert_as_the_twin(logits: torch.Tensor, places: list[int], most: int) -> None:
    tokens = torch.randint(logits.shape[1], logits.shape[:1], device=logits.device)
    own, values, ids = read(logits, tokens, places, most)
    at = torch.tensor(places, device=logits.device)
    wanted = reference.read_logprobs(logits, tokens, at, most)
    torch.testing.assert_close(own, wanted[0], rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(values, wanted[1], rtol=1e-5, atol=1e-5, equal_nan=True)
    assert ids.tolist() == wanted[2].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 33, 4096, 4097, 9001])
def test_they_are_those_of_the_twin(dtype: torch.dtype, vocab: int, device: torch.device) -> None:
    wide = (torch.randn(5, vocab + 3) * 4).to(dtype).to(device)
    for most in (0, 1, 20, MOST):
        assert_as_the_twin(wide[:, :vocab], [3, 0, 4, 3], min(most, vocab))


def test_of_equal_logits_the_lowest_id_comes_first(device: torch.device) -> None:
    logits = torch.zeros(2, 5000, device=device)
    logits[1] = (torch.arange(5000) % 7).float().to(device)
    logits[1, ::2] *= -1  # zeros of either sign are equal
    assert_as_the_twin(logits, [0, 1], MOST)
    _, _, ids = read(logits, torch.zeros(2, dtype=torch.int64, device=device), [0], 3)
    assert ids.tolist() == [[0, 1, 2]]


def test_rows_of_masked_and_infinite_logits_and_of_none_at_all(device: torch.device) -> None:
    logits = torch.randn(6, 5000).to(device)
    logits[0, 3:4999] = -math.inf  # fewer are left than are asked for
    logits[1] = -math.inf
    logits[2, 4100] = math.inf
    logits[3, 4990] = math.nan
    logits[4] = math.nan
    logits[5] = -3e38
    assert_as_the_twin(logits, [5, 4, 3, 2, 1, 0], 8)


def test_large_logits_lose_nothing(device: torch.device) -> None:
    logits = torch.randn(2, 4500).to(device) * 1e4 - 3e4
    assert_as_the_twin(logits, [0, 1], 5)


@pytest.mark.parametrize("chunk", [256, 1024])
def test_any_number_of_programs_gives_the_same(
    chunk: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "_CHUNK", chunk)
    assert_as_the_twin((torch.randn(2, 2900) * 3).round().to(device), [1, 0], MOST)
