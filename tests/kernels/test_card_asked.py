"""Tokens chosen step by step on a card, by what is kept of each sequence between the steps."""

from typing import Any

import pytest
import torch
from forebay_shared.sampling import SamplingParams
from forebay_worker.engine import card_choice, sampler
from forebay_worker.engine.card_choice import CardChoice, Choosing
from forebay_worker.engine.card_logprobs import LogprobsReader
from forebay_worker.engine.sequence import Sequence
from kernel_house import make_sequence

VOCAB = 300
ASKED = [
    SamplingParams(temperature=0, repetition_penalty=1.4),
    SamplingParams(temperature=0.8, presence_penalty=1.5, frequency_penalty=0.5),
    SamplingParams(temperature=0, logit_bias={3: 9.0, 299: 1.5}, frequency_penalty=-0.7),
    SamplingParams(temperature=0.9, min_tokens=3, top_k=40),
    SamplingParams(temperature=0, allowed_token_ids=tuple(range(0, 300, 7)), presence_penalty=2.0),
]


def sequences() -> list[Sequence]:
    made = [make_sequence(torch.randint(0, 9, (12,)).tolist(), [], asked) for asked in ASKED]
    for each in made:
        each.stop_ids = frozenset(range(250))
    return made


def start(choice: CardChoice, logits: torch.Tensor, rows: list[Choosing], **more: Any) -> list[int]:
    """Chooses; the tokens by their places, -7 where nothing was chosen."""
    tokens = torch.full((len(logits),), -7, dtype=torch.int64, device=logits.device)
    corrupt = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
    choice.choose(rows, logits, more.get("token_ids", tokens), tokens, corrupt)
    assert not corrupt.any()
    return tokens.tolist()


def test_tokens_are_the_cpu_samplers_whoever_leaves_and_returns(device: torch.device) -> None:
    rows, choice = sequences(), CardChoice(8, VOCAB, device)
    for step in range(6):
        logits = (torch.randn(8, VOCAB) * 4).to(device)
        here = [at for at in range(len(rows)) if at != step - 2]
        places = {at: (3 * at + step) % 8 for at in here}
        asked = [Choosing(rows[at], places[at], -1, len(rows[at].token_ids)) for at in here]
        found = start(choice, logits, asked)
        own = logits[[places[at] for at in here]].cpu()
        wanted = sampler.sample(own, [rows[at] for at in here])
        for at, one in zip(here, wanted, strict=True):
            assert found[places[at]] == one.token_id, (step, at)
            rows[at].token_ids.append(one.token_id)
        assert found.count(-7) == 8 - len(here)


def test_a_token_that_only_the_card_knows_counts_as_any_other(device: torch.device) -> None:
    known, late = sequences(), sequences()
    for one, other in zip(known, late, strict=True):
        other.token_ids = list(one.token_ids)
    choice, count = CardChoice(8, VOCAB, device), len(known)
    token_ids = torch.randint(0, VOCAB, (count,)).to(device)
    for _ in range(4):
        logits = (torch.randn(count, VOCAB) * 4).to(device)
        for row, token in zip(known, token_ids.tolist(), strict=True):
            row.token_ids.append(token)
        wanted = sampler.sample(logits.clone().cpu(), known)
        asked = [
            Choosing(row, at, at, len(row.token_ids) + 1) for at, row in enumerate(late)
        ]  # fmt: skip
        found = start(choice, logits, asked, token_ids=token_ids)
        assert found == [each.token_id for each in wanted]
        for row, token in zip(late, token_ids.tolist(), strict=True):
            row.token_ids.append(token)
        token_ids = torch.tensor(found, device=device)


@pytest.mark.parametrize(("rows", "words"), [(2, 2000), (64, 920)])
def test_more_than_a_packet_takes_is_chosen_piece_by_piece(
    rows: int, words: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card_choice, "PIECE", rows)
    monkeypatch.setattr(card_choice, "_WORDS", words)
    monkeypatch.setattr(card_choice, "_FEWEST_WORDS", 64)
    each = SamplingParams(temperature=0, repetition_penalty=1.3)
    many = [
        make_sequence(torch.randint(0, VOCAB, (size,)).tolist(), [], each)
        for size in (900, 1, 800, 700, 30, 900, 5)
    ]
    logits = torch.randn(7, VOCAB).to(device)
    asked = [Choosing(row, at, -1, len(row.token_ids)) for at, row in enumerate(many)]
    found = start(CardChoice(7, VOCAB, device), logits, asked)
    assert found == [one.token_id for one in sampler.sample(logits.cpu(), many)]


def test_two_readings_on_their_way_do_not_disturb_each_other(device: torch.device) -> None:
    reader = LogprobsReader(6, VOCAB, device)
    logits = torch.randn(2, 6, VOCAB).to(device)
    tokens = torch.randint(0, VOCAB, (6,)).to(device)
    asked = [SamplingParams(logprobs=count) for count in (3, 0, 20)]
    places = torch.tensor([5, 0, 2]).numpy()
    readings = [reader.read(each, tokens, places, asked) for each in logits]
    for each, reading in zip(logits, readings, strict=True):
        whole = each.log_softmax(-1)
        for place, params, found in zip(places, asked, reading.results(), strict=True):
            assert len(found.top) == params.logprobs
            assert found.logprob == pytest.approx(float(whole[place, tokens[place]]), abs=1e-5)
            best = whole[place].topk(20).indices.tolist()
            assert [token for token, _ in found.top] == best[: params.logprobs]


def test_no_more_of_the_likeliest_are_read_than_there_are(device: torch.device) -> None:
    logits = torch.randn(2, 5).to(device)
    places, asked = torch.tensor([1]).numpy(), [SamplingParams(logprobs=20)]
    tokens = torch.tensor([4, 2], device=device)
    [found] = LogprobsReader(2, 5, device).read(logits, tokens, places, asked).results()
    best = logits[1].argsort(descending=True).tolist()
    assert [token for token, _ in found.top] == best
