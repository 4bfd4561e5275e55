"""Text in and out: order, limits, cancels. Skipped where the card has no CAP_TEXT."""

import pytest
from forebay_shared.asked import Asked, AskedMessage, Chat, Prompt
from forebay_shared.models import CAP_GENERATE
from forebay_shared.sampling import SamplingParams
from forebay_shared.wire import Done, Failed, Reply, Started, TextDelta

from forebay_worker.conformance.conftest import TEXTS
from forebay_worker.conformance.driver import Driven

SHORT = SamplingParams(temperature=0.0, max_tokens=4)
LONG = SamplingParams(temperature=0.0, max_tokens=400)
GIVEN = ("max_tokens", "temperature")


@pytest.fixture(params=["chat", "prompt"])
def asked(driven: Driven, request: pytest.FixtureRequest) -> Asked:
    if not driven.card.speaks_text or CAP_GENERATE not in driven.card.capabilities:
        pytest.skip("the card does not declare text")
    if request.param == "prompt":
        return Prompt(TEXTS[1])
    return Chat(messages=(AskedMessage("user", f"Say this again: {TEXTS[1]}"),))


def test_events_come_in_order_and_usage_with_the_end(driven: Driven, asked: Asked) -> None:
    replies = driven.ended(driven.submit_text(asked, SHORT, *GIVEN))
    kinds = [type(reply) for reply in replies]
    assert kinds == [Started, *[TextDelta] * (len(kinds) - 2), Done], replies
    assert [d.offset for d in _deltas(replies)] == list(range(len(kinds) - 2))
    assert any(d.content or d.reasoning for d in _deltas(replies))
    usage = _done(replies)[0].usage
    assert usage.prompt_tokens > 0
    assert 0 < usage.completion_tokens <= 4
    assert _done(replies)[0].finish_reason == "length"


def test_several_answers_each_end_once(driven: Driven, asked: Asked) -> None:
    replies = driven.ended(driven.submit_text(asked, SHORT, *GIVEN, indexes=(0, 2)), 2)
    assert sorted(done.index for done in _done(replies)) == [0, 2]


def test_a_cancel_ends_with_abort(driven: Driven, asked: Asked) -> None:
    request_id = driven.submit_text(asked, LONG, *GIVEN)
    driven.wait_tokens(request_id)
    driven.engine.cancel(request_id, 1)
    assert [done.finish_reason for done in _done(driven.ended(request_id))] == ["abort"]


def test_bad_sampling_is_answered_and_harms_nobody(driven: Driven, asked: Asked) -> None:
    bad = SamplingParams(temperature=-3.0, max_tokens=4)
    (failed,) = driven.ended(driven.submit_text(asked, bad, *GIVEN))
    assert isinstance(failed, Failed)
    assert not failed.retryable
    assert _done(driven.ended(driven.submit_text(asked, SHORT, *GIVEN)))
    assert driven.engine.healthy


def _deltas(replies: list[Reply]) -> list[TextDelta]:
    return [reply for reply in replies if isinstance(reply, TextDelta)]


def _done(replies: list[Reply]) -> list[Done]:
    return [reply for reply in replies if isinstance(reply, Done)]
