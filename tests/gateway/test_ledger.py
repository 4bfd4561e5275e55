"""The ledger passes each token once and in order, whatever is repeated, cut again or missing."""

from forebay_gateway.ledger import Ledger
from forebay_shared.wire import (
    Delta,
    Done,
    Failed,
    PromptLogprobs,
    Reply,
    SequenceStart,
    Started,
    TokenLogprobs,
    Usage,
    pack_ids,
)
from hypothesis import given
from hypothesis import strategies as st


def _done(index: int = 0, reason: str = "length") -> Done:
    return Done("r", 1, index, reason, None, Usage())


@given(st.data(), st.integers(1, 30))
def test_repeated_and_recut_deltas_give_each_token_once(data: st.DataObject, length: int) -> None:
    tokens = list(range(100, 100 + length))
    replies: list[Reply] = [Started("r", 1, 0, 0, 0.0)]
    known = 0
    while known < length:
        begin = data.draw(st.integers(0, known))
        known = length - data.draw(st.integers(0, length - known - 1))
        replies.append(Delta("r", 1, 0, begin, tokens[begin:known]))
        if data.draw(st.booleans()):
            replies.append(data.draw(st.sampled_from(replies)))
    replies.extend([_done(), _done()])
    ledger = Ledger(1)
    got: list[int] = []
    kinds: list[type] = []
    for cut in range(0, len(replies), 3):
        for event in ledger.fold(replies[cut : cut + 3]):
            kinds.append(type(event))
            if isinstance(event, Delta):
                assert event.offset == len(got)
                got.extend(event.token_ids)
    assert got == tokens
    assert (kinds.count(Started), kinds.count(Done)) == (1, 1)
    assert not ledger.open
    assert ledger.lost is None


def test_a_gap_loses_the_attempt_and_lets_nothing_more_through() -> None:
    ledger = Ledger(1)
    events = ledger.fold([Delta("r", 1, 0, 0, [1]), Delta("r", 1, 0, 2, [3]), _done()])
    assert events == [Delta("r", 1, 0, 0, [1])]
    assert ledger.lost == "gap"
    assert ledger.open
    ledger.begin()
    assert ledger.fold([Delta("r", 2, 0, 1, [2])]) == [Delta("r", 2, 0, 1, [2])]


def test_only_unfinished_sequences_start_again_with_what_they_emitted() -> None:
    ledger = Ledger(3)
    ledger.fold([Delta("r", 1, 0, 0, [7, 8]), Delta("r", 1, 1, 0, [9]), _done(1)])
    assert ledger.drop(2)
    assert not ledger.drop(2)
    assert ledger.starts() == (SequenceStart(0, pack_ids([7, 8])),)


def test_an_abort_that_nobody_asked_for_is_a_lost_attempt() -> None:
    ledger = Ledger(1)
    assert ledger.fold([_done(reason="abort")]) == []
    assert ledger.lost == "failed"


def test_a_failure_is_kept_and_ends_nothing_by_itself() -> None:
    ledger = Ledger(1)
    failed = Failed("r", 1, "engine_error", "It broke.")
    assert ledger.fold([failed]) == []
    assert ledger.failed == failed
    assert ledger.open


def test_log_probabilities_of_a_prompt_pass_once_over_all_attempts() -> None:
    def scores(attempt: int, offset: int, *values: float) -> PromptLogprobs:
        return PromptLogprobs("r", attempt, offset, [TokenLogprobs(value) for value in values])

    ledger = Ledger(2)
    assert ledger.fold([scores(1, 1, -1, -2)]) == [scores(1, 1, -1, -2)]
    assert ledger.fold([scores(1, 1, -1, -2), scores(1, 4, -4)]) == []
    assert ledger.lost == "gap"
    ledger.begin()
    again = ledger.fold([scores(2, 1, -1), scores(2, 2, -2, -3), scores(2, 4, -4)])
    assert again == [scores(2, 3, -3), scores(2, 4, -4)]
    assert ledger.scored == 4
