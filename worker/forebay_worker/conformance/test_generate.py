"""Generation: order, limits, determinism, and going on where another worker left off."""

import pytest
from forebay_shared.models import CAP_LOGPROBS, CAP_RESUME, CAP_RESUME_SAMPLED
from forebay_shared.sampling import SamplingParams
from forebay_shared.wire import SequenceStart, pack_ids

from forebay_worker.conformance.driver import Driven, Outcome

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, seed=11, max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("count", [1, 2, 24])
def test_it_makes_exactly_as_many_tokens_as_asked_for(
    driven: Driven, prompt: list[int], count: int
) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    (outcome,) = driven.run(prompt, sampling)
    assert len(outcome.token_ids) == count
    assert outcome.reason == "length"
    assert outcome.done[0].stop_token is None


def test_usage_is_what_happened(driven: Driven, prompt: list[int]) -> None:
    (outcome,) = driven.run(prompt, GREEDY)
    usage = outcome.done[0].usage
    assert usage.prompt_tokens == len(prompt)
    assert usage.completion_tokens == len(outcome.token_ids)
    assert 0 <= usage.cached_tokens < len(prompt)
    assert min(usage.queued_ms, usage.prefill_ms, usage.decode_ms) >= 0


def test_tokens_are_of_the_vocabulary(driven: Driven, prompts: list[list[int]]) -> None:
    for prompt in prompts:
        (outcome,) = driven.run(prompt, SEEDED)
        assert all(0 <= token < driven.card.vocab_size for token in outcome.token_ids)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_batch_gives_what_each_request_gives_alone(
    driven: Driven, prompts: list[list[int]], sampling: SamplingParams
) -> None:
    alone = [driven.run(prompt, sampling)[0].token_ids for prompt in prompts]
    together = [driven.submit(prompt, sampling) for prompt in prompts * 3]
    answers = [driven.outcomes(request_id)[0].token_ids for request_id in together]
    assert answers == alone * 3


def test_sequences_of_one_request_each_have_noise_of_their_own(
    driven: Driven, prompt: list[int]
) -> None:
    starts = tuple(SequenceStart(index) for index in range(4))
    first = driven.run(prompt, SEEDED, *starts)
    again = driven.run(prompt, SEEDED, *reversed(starts))
    assert [each.token_ids for each in first] == [each.token_ids for each in reversed(again)]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("emitted", [1, 7, 23])
def test_it_goes_on_exactly_where_another_worker_left_off(
    driven: Driven, prompt: list[int], sampling: SamplingParams, emitted: int
) -> None:
    needed = CAP_RESUME if sampling.greedy else CAP_RESUME_SAMPLED
    if needed not in driven.card.capabilities:
        pytest.skip(f"the card does not declare {needed}")
    (whole,) = driven.run(prompt, sampling)
    start = SequenceStart(0, pack_ids(whole.token_ids[:emitted]))
    (rest,) = driven.run(prompt, sampling, start)
    assert rest.token_ids == whole.token_ids[emitted:]
    assert rest.reason == whole.reason


def test_a_stop_token_ends_the_sequence_and_is_in_no_delta(
    driven: Driven, prompt: list[int]
) -> None:
    (whole,) = driven.run(prompt, GREEDY)
    stop = whole.token_ids[10]
    before = whole.token_ids.index(stop)
    stopping = SamplingParams(
        temperature=0.0, max_tokens=24, ignore_eos=True, stop_token_ids=(stop,)
    )
    (outcome,) = driven.run(prompt, stopping)
    assert outcome.token_ids == whole.token_ids[:before]
    assert (outcome.reason, outcome.done[0].stop_token) == ("stop", stop)


def test_min_tokens_come_before_any_end(driven: Driven, prompt: list[int]) -> None:
    (whole,) = driven.run(prompt, GREEDY)
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=24,
        min_tokens=12,
        ignore_eos=True,
        stop_token_ids=tuple(set(whole.token_ids)),
    )
    (outcome,) = driven.run(prompt, sampling)
    assert len(outcome.token_ids) >= 12


def test_logprobs_come_with_each_token_best_first(driven: Driven, prompt: list[int]) -> None:
    if CAP_LOGPROBS not in driven.card.capabilities:
        pytest.skip("the card does not declare logprobs")
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3)
    (outcome,) = driven.run(prompt, sampling)
    entries = [entry for delta in outcome.deltas for entry in delta.logprobs or ()]
    assert len(entries) == len(outcome.token_ids)
    for token, entry in zip(outcome.token_ids, entries, strict=True):
        values = [value for _, value in entry.top]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert entry.logprob <= 1e-6
        assert entry.top[0][0] == token, "greedy takes the likeliest"
    assert all(delta.logprobs is None for delta in _plain(driven, prompt).deltas)


def _plain(driven: Driven, prompt: list[int]) -> Outcome:
    return driven.run(prompt, GREEDY)[0]


def test_a_salt_changes_nothing_but_what_is_shared(driven: Driven, prompt: list[int]) -> None:
    (plain,) = driven.run(prompt, GREEDY)
    salted = driven.submit(prompt, GREEDY, cache_salt="another team")
    (outcome,) = driven.outcomes(salted)
    assert outcome.token_ids == plain.token_ids
