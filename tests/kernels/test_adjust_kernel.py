"""Logits adjusted by what sequences ask, on the device."""

import math

import pytest
import torch
from forebay_worker.kernels import adjust, reference
from forebay_worker.kernels.reference import Adjustments

ONCE = 1 << 32


def bias_word(token: int, bias: float) -> int:
    return token + (int(torch.tensor(bias).view(torch.int32)) << 32)


def bits(ids: list[int], vocab: int) -> list[int]:
    words = [0] * -(-vocab // 64)
    for each in ids:
        words[each // 64] |= 1 << each % 64
    return [word - (word >> 63 << 64) for word in words]


def adjustments(
    rows: list[tuple[list[int], list[int], list[int], list[int]]],
    newest: list[int],
    device: torch.device,
) -> Adjustments:
    """Rows in the reverse of their order among the logits, each with penalties of its own."""
    words, edges = [5, 5, 5], []
    for row in rows:
        ends = [len(words)]
        for part in row:
            words += part
            ends.append(len(words))
        edges.append(ends)
    count = len(rows)
    floats = torch.rand(3, count, device=device)
    return Adjustments(
        places=torch.arange(count - 1, -1, -1, dtype=torch.int32, device=device),
        newest=torch.tensor(newest, dtype=torch.int32, device=device),
        edges=torch.tensor(edges, dtype=torch.int32, device=device),
        repetition=floats[0] + 0.5,
        presence=floats[1] * 4 - 2,
        frequency=floats[2] * 4 - 2,
        words=torch.tensor(words, dtype=torch.int64, device=device),
    )


def assert_as_the_twin(
    logits: torch.Tensor, token_ids: torch.Tensor, rows: Adjustments
) -> torch.Tensor:
    shape = len(rows.places), logits.shape[1]
    out, wanted = (torch.full(shape, 7.0, device=logits.device) for _ in range(2))
    before = logits.clone()
    adjust.adjust(logits, token_ids, rows, out)
    reference.adjust(logits, token_ids, rows, wanted)
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [70, 1001, 8193])
def test_all_that_rows_ask_is_what_the_twin_does(
    dtype: torch.dtype, vocab: int, device: torch.device
) -> None:
    logits = (torch.randn(6, vocab + 5) * 4).to(dtype).to(device)[:, :vocab]
    ids = [int(each) for each in torch.randperm(vocab)]
    said = [each + ONCE * (at % 3) for at, each in enumerate(ids[: vocab // 2])]
    biased = [bias_word(each, at - 9.5) for at, each in enumerate(ids[10:30])]
    rows = [
        ([], [], [], []),
        (ids[:3], [], [], []),
        ([], biased, [], bits(ids[5:25], vocab)),
        ([], [], said, []),
        ([vocab - 1, 0], biased, said, bits(ids[::2], vocab)),
        ([], [], [], bits([], vocab)),
    ]
    out = assert_as_the_twin(
        logits,
        torch.zeros(1, dtype=torch.int64, device=device),
        adjustments(rows, [-1] * 6, device),
    )
    assert torch.equal(out[0], logits[5].float())
    assert bool((out[5] == -math.inf).all())


def test_the_newest_token_counts_once_more(device: torch.device) -> None:
    logits = torch.randn(4, 9000).to(device)
    token_ids = torch.tensor([9, 5, 8999, 0, 17], device=device)
    said = [5, 8999 + ONCE, 17 + 2 * ONCE]
    rows = [([], [], said, []), ([], [], said, []), ([], [], [], []), ([3], [], said, [])]
    asked = adjustments(rows, [1, 2, 4, 3], device)
    out = assert_as_the_twin(logits, token_ids, asked)
    raw = float(logits[1, 17])  # of row 2, which has said nothing else
    repetition, presence, frequency = (float(each[2]) for each in asked[3:6])
    repelled = raw / repetition if raw > 0 else raw * repetition
    assert float(out[2, 17]) == pytest.approx(repelled - presence - frequency, abs=1e-5)


def test_a_row_may_have_more_words_than_are_read_at_once(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adjust, "_LIST", 64)
    monkeypatch.setattr(adjust, "_CHUNK", 256)
    said = [each + ONCE * (each % 4) for each in torch.randperm(900)[:700].tolist()]
    biased = [bias_word(each, 0.5) for each in range(300)]
    rows = [(list(range(100, 250)), biased, said, []), ([], [], said[:64], [])]
    token_ids = torch.tensor([said[3] & 0xFFFFFFFF, 899], device=device)
    logits = torch.randn(2, 900).to(device)
    logits[0, 7], logits[1, 8], logits[1, 899] = math.nan, -math.inf, math.inf
    assert_as_the_twin(logits, token_ids, adjustments(rows, [0, 1], device))
