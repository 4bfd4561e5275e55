"""Rows that ask for more than the sampling kernel knows get what the CPU's sampler gives them."""

import math

import numpy as np
import pytest
import torch
from forebay_shared.sampling import Grammar, SamplingParams
from forebay_worker.engine import sampler
from forebay_worker.engine.batch import Sampled, ScheduledRow
from forebay_worker.engine.card_inputs import StepInputs, StepShape
from forebay_worker.engine.card_sampling import CardSampler, CardStep
from forebay_worker.engine.sequence import Sequence
from kernel_house import make_sequence

pytestmark = pytest.mark.usefixtures("few_programs")

VOCAB, BLOCK = 300, 64
ASKED = [
    SamplingParams(temperature=0, repetition_penalty=1.4),
    SamplingParams(temperature=0, repetition_penalty=0.6, logprobs=0),
    SamplingParams(temperature=0.8, presence_penalty=1.5, frequency_penalty=0.5, logprobs=4),
    SamplingParams(temperature=1.1, frequency_penalty=-1.0, top_k=9, top_p=0.7),
    SamplingParams(temperature=0, logit_bias={3: 100.0, 7: -1e300, 299: 1.5}),
    SamplingParams(temperature=0.5, allowed_token_ids=(5, 11, 250), logprobs=20),
    SamplingParams(temperature=0, bad_words=((4, 9), (6,)), logprobs=2),
    SamplingParams(temperature=0.9, min_tokens=50, min_p=0.02),
    SamplingParams(temperature=0, allowed_token_ids=(8,), bad_words=((8,),)),
    SamplingParams(temperature=1.0, logprobs=3),
]


class Rules:
    """A grammar that allows some ids."""

    error = None
    stopped = False

    def __init__(self, *allowed: int) -> None:
        bits = np.zeros(-(-VOCAB // 8) * 8, np.uint8)
        bits[list(allowed)] = 1
        self._mask = np.packbits(bits, bitorder="little").tobytes()

    def mask(self) -> bytes:
        return self._mask


def sequences(*rules: tuple[int, ...] | None) -> list[Sequence]:
    """One for each of ASKED, and one greedy for each of `rules`, all ten tokens on their way."""
    torch.manual_seed(5)
    made: list[Sequence] = []
    ruled = SamplingParams(temperature=0, logprobs=2, grammar=Grammar("regex"))
    for at, asked in enumerate([*ASKED, *(ruled,) * len(rules)]):
        tokens = torch.randint(0, 12, (16,)).tolist()
        sequence = make_sequence(tokens[:6], [0], asked)
        sequence.token_ids += [*tokens[6:], 4]
        sequence.num_computed = 16
        sequence.seed, sequence.stop_ids = 2**63 + at, frozenset([2, 7])
        made.append(sequence)
    for sequence, allowed in zip(made[len(ASKED) :], rules, strict=True):
        sequence.matcher = None if allowed is None else Rules(*allowed)  # type: ignore[assignment]
    return made


def choose(logits: torch.Tensor, rows: list[Sequence]) -> list[Sampled | None]:
    """By a step of one decode row each, which these are the logits of."""
    count, device = len(rows), logits.device
    sampler = CardSampler(count, VOCAB, logits.dtype, device)
    sampler.logits.copy_(logits)
    inputs = StepInputs(count, count, 1, BLOCK)
    plan = [ScheduledRow(row, 1, True) for row in rows]
    filled = inputs.fill(plan, count, StepShape(count))
    arrays = {name: torch.from_numpy(each).to(device) for name, each in inputs.arrays.items()}
    sampler.launch(count, arrays)
    return CardStep(plan, filled, sampler, arrays["token_ids"]).results()


def assert_same(found: list[Sampled | None], wanted: list[Sampled] | list[Sampled | None]) -> None:
    for at, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one is not None
        assert other is not None
        assert (one.corrupt, one.starved) == (other.corrupt, other.starved), at
        if one.corrupt:
            continue
        assert one.token_id == other.token_id, at
        assert (one.logprobs is None) == (other.logprobs is None), at
        if one.logprobs is not None and other.logprobs is not None:
            assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-4)
            assert [token for token, _ in one.logprobs.top] == [
                token for token, _ in other.logprobs.top
            ]
            assert [value for _, value in one.logprobs.top] == pytest.approx(
                [value for _, value in other.logprobs.top], abs=1e-4
            )


def test_tokens_and_logprobs_are_those_of_the_cpus_sampler(device: torch.device) -> None:
    rows = sequences((1, 17, 256, 299), (2,), None)
    for _ in range(8):
        logits = torch.randn(len(rows), VOCAB) * 4
        for row in rows:
            row.token_ids[-2] = int(torch.randint(0, 12, ()))
        wanted = sampler.sample(logits.clone(), rows)
        assert_same(choose(logits.to(device), rows), wanted)


def test_a_row_is_chosen_alone_as_it_is_among_others(device: torch.device) -> None:
    rows = sequences((1, 17))
    logits = (torch.randn(len(rows), VOCAB) * 4).to(device)
    together = choose(logits.clone(), rows)
    for at, row in enumerate(rows):
        assert_same(choose(logits[at : at + 1].clone(), [row]), together[at : at + 1])


def test_rows_without_a_number_or_a_choice_are_told_apart(device: torch.device) -> None:
    rows = sequences((2,), (), (5,))
    logits = torch.randn(len(rows), VOCAB)
    logits[2, 40] = math.nan
    logits[4, 9] = math.inf
    logits[-1, 6] = math.nan  # which its grammar does not allow
    rows[-1].sampling = SamplingParams(temperature=0, grammar=Grammar("regex"))
    wanted = sampler.sample(logits.clone(), rows)
    found = choose(logits.to(device), rows)
    assert_same(found, wanted)
    facts = [(one.corrupt, one.starved) for one in found if one is not None]
    assert [at for at, each in enumerate(facts) if each == (True, False)] == [2, 4]
    assert [at for at, each in enumerate(facts) if each == (True, True)] == [8, len(rows) - 2]


def test_getting_ready_for_such_rows_leaves_the_logits_as_they_are(device: torch.device) -> None:
    sampler = CardSampler(2, VOCAB, torch.bfloat16, device)
    sampler.logits.normal_()
    before = sampler.logits.clone()
    sampler.prepare()
    assert torch.equal(sampler.logits, before)
