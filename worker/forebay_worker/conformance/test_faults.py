"""Cancels, bad requests and the end: nothing that is asked of an engine may take it down."""

import pytest
from forebay_shared.sampling import SamplingParams
from forebay_shared.wire import Done, Failed, SequenceStart

from forebay_worker.conformance.driver import Driven

LONG = SamplingParams(temperature=0.0, max_tokens=4096, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def long_enough(driven: Driven, prompt: list[int]) -> SamplingParams:
    """So many tokens that a cancel comes long before the end."""
    room = driven.card.max_model_len - len(prompt)
    return SamplingParams(temperature=0.0, max_tokens=min(4096, room), ignore_eos=True)


def test_a_cancel_ends_all_sequences_with_abort(driven: Driven, prompt: list[int]) -> None:
    starts = (SequenceStart(0), SequenceStart(1))
    request_id = driven.submit(prompt, long_enough(driven, prompt), *starts)
    driven.wait_tokens(request_id)
    driven.engine.cancel(request_id, 1)
    replies = driven.ended(request_id, 2)
    assert [r.finish_reason for r in replies if isinstance(r, Done)] == ["abort", "abort"]


def test_a_cancel_of_one_sequence_leaves_the_others(driven: Driven, prompt: list[int]) -> None:
    starts = (SequenceStart(0), SequenceStart(1))
    request_id = driven.submit(prompt, long_enough(driven, prompt), *starts)
    driven.wait_tokens(request_id)
    driven.engine.cancel(request_id, 1, 1)
    driven.wait(lambda: _reasons(driven, request_id) == {1: "abort"})
    driven.engine.cancel(request_id, 1)
    driven.ended(request_id, 2)


def test_cancels_of_what_is_unknown_or_over_are_ignored(driven: Driven, prompt: list[int]) -> None:
    request_id = driven.submit(prompt, SHORT)
    driven.ended(request_id)
    for cancelled in (request_id, "nobody"):
        driven.engine.cancel(cancelled, 1)
        driven.engine.cancel(cancelled, 7, 3)
    assert driven.run(prompt, SHORT)[0].reason == "length"
    assert len([r for r in driven.replies(request_id) if isinstance(r, Done)]) == 1


def test_a_lost_gateways_requests_end_and_others_go_on(driven: Driven, prompt: list[int]) -> None:
    lost = driven.submit(prompt, long_enough(driven, prompt), gateway="lost")
    kept = driven.submit(prompt, long_enough(driven, prompt))
    driven.wait_tokens(lost)
    driven.engine.cancel_gateway("lost")
    driven.ended(lost)
    driven.wait_tokens(kept, 8)
    driven.engine.cancel(kept, 1)
    driven.ended(kept)


@pytest.mark.parametrize("kind", ["empty", "foreign ids", "too long", "bad sampling"])
def test_what_is_wrong_with_a_request_is_answered_and_harms_nobody(
    driven: Driven, prompt: list[int], kind: str
) -> None:
    before = driven.run(prompt, SHORT)[0].token_ids
    cases: dict[str, tuple[list[int], SamplingParams]] = {
        "empty": ([], SHORT),
        "foreign ids": ([driven.card.vocab_size + 5] * 3, SHORT),
        "too long": ((prompt * (driven.card.max_model_len // len(prompt) + 2)), SHORT),
        "bad sampling": (prompt, SamplingParams(temperature=-3.0, max_tokens=4)),
    }
    neighbour = driven.submit(prompt, SHORT)
    replies = driven.ended(driven.submit(*cases[kind]))
    assert [type(reply) for reply in replies] == [Failed]
    failed = replies[0]
    assert isinstance(failed, Failed)
    assert failed.message
    assert not failed.retryable, "another worker could not do it either"
    assert driven.outcomes(neighbour)[0].token_ids == before
    assert driven.engine.healthy


def test_many_joins_and_leaves_leave_nothing_behind(
    driven: Driven, prompts: list[list[int]]
) -> None:
    expected = [driven.run(prompt, SHORT)[0].token_ids for prompt in prompts]
    for _ in range(3):
        kept = [driven.submit(prompt, SHORT) for prompt in prompts]
        left = [driven.submit(prompt, long_enough(driven, prompt)) for prompt in prompts]
        for request_id in left:
            driven.engine.cancel(request_id, 1)
        assert [driven.outcomes(request_id)[0].token_ids for request_id in kept] == expected
        for request_id in left:
            driven.ended(request_id)
    driven.run(prompts[0], SHORT)
    load = driven.load()
    assert (load.running, load.waiting, load.waiting_tokens) == (0, 0, 0)


def _reasons(driven: Driven, request_id: str) -> dict[int, str]:
    return {r.index: r.finish_reason for r in driven.replies(request_id) if isinstance(r, Done)}
