"""Sampling, noise and token feedback on the device."""

import math

import pytest
import torch
import triton
import triton.language as tl
from forebay_worker.kernels import noise, sampling
from forebay_worker.kernels.feedback import take_tokens
from forebay_worker.kernels.sampling import SamplingRows, make_scratch, sample


@triton.jit
def _noise_kernel(bits, floats, seeds, positions, vocab, size: tl.constexpr):
    row = tl.program_id(0)
    key0, key1 = sampling._noise_keys(tl.load(seeds + row), tl.load(positions + row))
    ids = tl.arange(0, size)
    drawn = sampling._noise_bits(ids, key0, key1)
    tl.store(bits + row * vocab + ids, drawn.to(tl.int64), mask=ids < vocab)
    tl.store(floats + row * vocab + ids, sampling._gumbel(drawn), mask=ids < vocab)


def kept_ids(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """The definition in `sampling.py`, by sorting one row in float64."""
    x = logits.double()
    above = torch.tensor([int((x > value).sum()) for value in x])
    kept = above < top_k if 0 < top_k < len(x) else torch.ones_like(x, dtype=torch.bool)
    mass = ((x - x.max()) / temperature).exp()
    share = mass * kept / (mass * kept).sum()
    before = torch.stack([share[x > value].sum() for value in x])
    if top_p < 1:
        kept &= before < top_p
    if min_p > 0:
        kept &= mass >= min_p * (1 - 1e-9)
    return kept & x.isfinite()


def rows_of(
    params: list[tuple[float, int, float, float]], seeds: list[int], device: torch.device
) -> SamplingRows:
    heat, top_k, top_p, min_p = zip(*params, strict=True)
    positions = [7 * (at + 1) for at in range(len(seeds))]
    return SamplingRows(
        torch.tensor(heat, dtype=torch.float32, device=device),
        torch.tensor(top_k, dtype=torch.int32, device=device),
        torch.tensor(top_p, dtype=torch.float32, device=device),
        torch.tensor(min_p, dtype=torch.float32, device=device),
        torch.tensor(seeds, dtype=torch.int64, device=device),
        torch.tensor(positions, dtype=torch.int64, device=device),
    )


def run(logits: torch.Tensor, rows: SamplingRows) -> tuple[list[int], list[int]]:
    tokens = torch.full(logits.shape[:1], -7, dtype=torch.int64, device=logits.device)
    corrupt = torch.full(logits.shape[:1], -7, dtype=torch.int32, device=logits.device)
    # The interpreter pays for programs and for passes, not for ids.
    programs, block = (264, 4096) if logits.is_cuda else (2 * len(logits), 1024)
    scratch = make_scratch(len(logits), logits.device, programs)
    for _ in range(2):  # the second launch finds the counters as the first left them
        sample(logits, rows, scratch, tokens, corrupt, block)
    assert not scratch.arrivals.any()
    return tokens.tolist(), corrupt.tolist()


def test_noise_on_the_device_has_the_bits_of_the_twin(device: torch.device) -> None:
    seeds = torch.tensor([0, 1, -5, 2**62 + 12345], device=device)
    positions = torch.tensor([0, 1, 2**31, 999], device=device)
    vocab = 1000
    bits = torch.empty(4, vocab, dtype=torch.int64, device=device)
    floats = torch.empty(4, vocab, dtype=torch.float32, device=device)
    _noise_kernel[(4,)](bits, floats, seeds, positions, vocab, size=1024)
    assert torch.equal(bits, noise.noise_bits(seeds, positions, vocab))
    torch.testing.assert_close(floats, noise.gumbel(bits), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [4.0, 0.5])
def test_samples_are_the_noisy_argmax_of_the_kept_ids(
    dtype: torch.dtype, spread: float, device: torch.device
) -> None:
    params = [
        (1.0, 0, 1.0, 0.0),
        (0.0, 5, 0.5, 0.5),
        (0.6, 20, 0.95, 0.0),
        (0.7, 3, 1.0, 0.0),
        (1.5, 0, 0.3, 0.0),
        (1.0, 0, 1.0, 0.3),
        (1.2, 50, 0.5, 0.05),
        (2.0, 1, 1.0, 0.0),
        (1.0, 10**6, 1e-6, 0.0),
    ]
    vocab = 777
    logits = (torch.randn(len(params), vocab) * spread).to(dtype).to(device)
    logits[3, 100:] = -math.inf  # masked ids
    rows = rows_of(params, [2**40 * at + 3 for at in range(len(params))], device)
    tokens, corrupt = run(logits, rows)
    drawn = noise.gumbel(noise.noise_bits(rows.seeds, rows.positions, vocab)).cpu()
    for row, (heat, top_k, top_p, min_p) in enumerate(params):
        x = logits[row].float().cpu()
        score = x.clone()
        if heat > 0:
            kept = kept_ids(x, heat, top_k, top_p, min_p)
            score = (x / heat + drawn[row]).masked_fill(~kept, -math.inf)
        assert tokens[row] == int(score.argmax()), f"row {row}"
    assert corrupt == [0] * len(params)


def test_a_corrupt_row_is_flagged_alone(device: torch.device) -> None:
    logits = torch.randn(4, 300, device=device)
    logits[0, 299] = math.nan
    logits[1, 5] = math.inf
    logits[2] = -math.inf
    tokens, corrupt = run(logits, rows_of([(1.0, 0, 0.9, 0.0)] * 4, [1, 2, 3, 4], device))
    assert corrupt == [1, 1, 1, 0]
    assert tokens[:3] == [0, 0, 0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="4,096 rows take the interpreter minutes")
def test_frequencies_follow_the_softmax(device: torch.device) -> None:
    draws = 4096
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0], device=device).repeat(draws, 1)
    rows = rows_of([(1.0, 0, 1.0, 0.0)] * draws, list(range(draws)), device)
    tokens, _ = run(logits, rows)
    share = torch.bincount(torch.tensor(tokens), minlength=4) / draws
    spread = 4 * 0.5 / math.sqrt(draws)  # four standard deviations at most
    assert float((share - logits[0].softmax(-1).cpu()).abs().max()) < spread


def test_only_unknown_tokens_come_from_the_last_step(device: torch.device) -> None:
    token_ids = torch.tensor([7, -1, -1, 0, -1], device=device)
    tokens = torch.tensor([70, 71, 72, 73], device=device)
    sources = torch.tensor([0, 3, 0, 1], dtype=torch.int32, device=device)
    take_tokens(token_ids, tokens, sources)
    assert token_ids.tolist() == [7, 73, 70, 0, -1]
