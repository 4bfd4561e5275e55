"""The sampler: each option equals its definition, rows do not touch each other, draws are fair."""

import math
from collections import Counter

import numpy as np
import torch
from engine_fakes import make_submit
from forebay_shared.sampling import SamplingParams
from forebay_worker.engine import noise
from forebay_worker.engine.intake import Limits, sequences_of
from forebay_worker.engine.sampler import sample
from forebay_worker.engine.sequence import Sequence
from forebay_worker.kernels import noise as kernel_noise
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import make_sequence

VOCAB = 24

tokens = st.integers(0, VOCAB - 1)
logit_rows = st.lists(
    st.integers(-40, 40).map(lambda value: value / 8), min_size=VOCAB, max_size=VOCAB
)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 3, 100]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.4, 0.01]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.7, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5, -1.0]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, -1.5, 2.0, 1e300]), max_size=3),
    allowed_token_ids=st.none() | st.lists(tokens, min_size=1, max_size=6).map(tuple),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=2).map(tuple), max_size=3).map(tuple),
    logprobs=st.sampled_from([None, None, 0, 3, 20]),
)


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    prompt = draw(st.lists(tokens, min_size=1, max_size=8))
    sequence = make_sequence(prompt, [], draw(params), seed=draw(st.integers(0, 2**64 - 1)))
    sequence.token_ids += draw(st.lists(tokens, max_size=8))
    return sequence


def expected_token(logits: list[float], sequence: Sequence) -> int | None:
    """The definition, one id at a time; None when nothing may be sampled."""
    asked = sequence.sampling
    output = Counter(sequence.token_ids[sequence.num_prompt :])
    values = [_changed(token, logits[token], sequence, output) for token in range(VOCAB)]
    top = max(values)
    if math.isinf(top):
        return None
    if asked.greedy:
        return values.index(top)
    scores = [np.float32(value) / np.float32(asked.temperature) for value in values]
    kept = [token for token in range(VOCAB) if _is_kept(scores, scores[token], asked)]
    draws = noise.gumbel(
        sequence.seed, len(sequence.token_ids), np.arange(VOCAB, dtype=np.uint32)
    ).tolist()
    return max(kept, key=lambda token: np.float32(scores[token]) + np.float32(draws[token]))


def _changed(token: int, value: float, sequence: Sequence, output: Counter[int]) -> float:
    asked = sequence.sampling
    if token in sequence.banned_ids():
        return -math.inf
    if asked.allowed_token_ids is not None and token not in asked.allowed_token_ids:
        return -math.inf
    value += min(asked.logit_bias.get(token, 0.0), 1e30)
    if token in sequence.token_ids:
        penalty = asked.repetition_penalty
        value = value / penalty if value > 0 else value * penalty
    if token in output:
        value -= asked.presence_penalty + asked.frequency_penalty * output[token]
    return float(np.float32(value))


def _is_kept(scores: list[np.float32], score: np.float32, asked: SamplingParams) -> bool:
    if math.isinf(score):
        return False
    top = max(scores)
    ranked = sorted(scores, reverse=True)
    in_k = ranked[: asked.top_k] if 0 < asked.top_k < VOCAB else ranked
    if score < in_k[-1]:
        return False
    if asked.min_p > 0 and score < top + np.float32(math.log(asked.min_p)):
        return False
    weights = [math.exp(each - top) for each in scores if each >= in_k[-1]]
    above = [math.exp(each - top) for each in scores if each > score]
    return not above or asked.top_p >= 1 or sum(above) < asked.top_p * sum(weights)


@given(logits=logit_rows, sequence=sequences())
def test_every_option_does_what_its_definition_says(
    logits: list[float], sequence: Sequence
) -> None:
    [sampled] = sample(torch.tensor([logits]), [sequence])
    token = expected_token(logits, sequence)
    assert sampled.corrupt == (token is None)
    if token is not None:
        assert sampled.token_id == token


@given(rows=st.lists(st.tuples(logit_rows, sequences()), min_size=1, max_size=6))
def test_a_row_of_a_batch_is_sampled_as_it_is_alone(
    rows: list[tuple[list[float], Sequence]],
) -> None:
    batch = sample(torch.tensor([logits for logits, _ in rows]), [each for _, each in rows])
    alone = [sample(torch.tensor([logits]), [sequence])[0] for logits, sequence in rows]
    assert batch == alone


@given(logits=logit_rows, sequence=sequences())
def test_logprobs_are_of_the_raw_logits_and_best_first(
    logits: list[float], sequence: Sequence
) -> None:
    [sampled] = sample(torch.tensor([logits]), [sequence])
    count = sequence.sampling.logprobs
    if count is None or sampled.corrupt:
        assert sampled.logprobs is None
        return
    raw = torch.tensor(logits, dtype=torch.float64).log_softmax(0)
    assert sampled.logprobs is not None
    assert math.isclose(sampled.logprobs.logprob, raw[sampled.token_id].item(), abs_tol=1e-5)
    values = [value for _, value in sampled.logprobs.top]
    assert values == sorted(values, reverse=True)
    best = raw.sort(descending=True).values[:count].tolist()
    assert np.allclose(values, best, atol=1e-5)
    assert all(abs(raw[token].item() - value) < 1e-5 for token, value in sampled.logprobs.top)


def test_a_row_without_numbers_is_corrupt_and_its_neighbours_are_not() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[0, 3] = math.nan
    logits[1, 5] = math.inf
    logits[2] = -math.inf
    logits[3, 7] = 1.0
    for asked in (SamplingParams(temperature=0), SamplingParams(temperature=1, top_p=0.1)):
        each = [make_sequence([1], [], asked) for _ in range(4)]
        sampled = sample(logits.clone(), each)
        assert [one.corrupt for one in sampled] == [True, True, True, False]
        assert sampled[3].token_id == 7


@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**31),
    ids=st.lists(st.integers(0, 999), min_size=1, max_size=9),
)
def test_noise_is_the_kernels_and_depends_on_seed_position_and_id_alone(
    seed: int, position: int, ids: list[int]
) -> None:
    signed = seed - 2**64 if seed >= 2**63 else seed
    defined = kernel_noise.noise_bits(torch.tensor([signed]), torch.tensor([position]), 1000)[0]
    found = noise.bits(seed, position, np.array(ids, np.uint32))
    assert found.tolist() == defined[ids].tolist()


def test_draws_follow_the_softmax() -> None:
    """Chi-square of 7 degrees of freedom: above 24.3 in one fair run of a thousand; fixed seeds."""
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 1.5, -2.0, 0.2])
    asked = SamplingParams(temperature=0.8)
    draws = 4000
    each = [make_sequence([0] * (1 + n % 7), [], asked, seed=n * 2**33 + 5) for n in range(draws)]
    found = Counter(one.token_id for one in sample(logits.repeat(draws, 1), each))
    expected = ((logits / 0.8).softmax(0) * draws).tolist()
    assert sum((found[at] - count) ** 2 / count for at, count in enumerate(expected)) < 24.3


def test_a_wide_nucleus_is_searched_to_its_end() -> None:
    """top_p 0.9 keeps all of 5,000 equal ids, as equal scores stay or go together; a slope is cut
    where its mass says."""
    asked = SamplingParams(temperature=1, top_p=0.9)
    slope = torch.linspace(0, -1, 5000)
    kept = int((slope.softmax(0).cumsum(0) < 0.9).sum()) + 1
    each = [make_sequence([0], [], asked, seed=n) for n in range(300)]
    flat = {one.token_id for one in sample(torch.zeros(300, 5000), each)}
    cut = {one.token_id for one in sample(slope.repeat(300, 1), each)}
    assert max(flat) > 4900
    assert 0.95 * kept < max(cut) < kept


def test_allowed_ids_are_made_an_array_once_for_all_of_a_requests_sequences() -> None:
    limits = Limits(vocab_size=VOCAB, max_model_len=64)
    asked = SamplingParams(allowed_token_ids=(3, 5), temperature=0)
    submit = make_submit("r", [1, 2], sampling=asked, n=3)
    first, *others = sequences_of(submit, limits, 0.0)
    assert all(each.allowed_ids() is first.allowed_ids() for each in others)
    logits = torch.arange(VOCAB, dtype=torch.float32).repeat(2, 1)
    for _ in range(2):
        assert [one.token_id for one in sample(logits.clone(), [first, others[0]])] == [5, 5]
    assert all(each.allowed_ids() is first.allowed_ids() for each in others)
