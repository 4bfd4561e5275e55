"""The router's choice, which is a pure function of what it sees."""

from dataclasses import dataclass

import pytest
from forebay_gateway.router import TAU_S, Choice, pick
from hypothesis import given
from hypothesis import strategies as st


@dataclass(frozen=True)
class Seen:
    name: str
    queued_tokens: int = 0
    busy: int = 0
    prefill_rate: float = 10_000.0
    decode_rate: float = 0.0


def _picked(choice: Choice[Seen] | None) -> tuple[str, int, str]:
    assert choice is not None
    return choice.worker.name, choice.cached_tokens, choice.reason


def test_no_candidate_is_no_choice() -> None:
    assert pick(list[Seen]()) is None


def test_one_candidate_is_the_only_choice() -> None:
    assert _picked(pick([Seen("a", 10**9)])) == ("a", 0, "only")


def test_the_least_wait_wins_then_the_fewest_sequences() -> None:
    crowd = [Seen("a", 10_000, 0), Seen("b", 5, 900), Seen("c", 5, 3)]
    assert _picked(pick(crowd)) == ("c", 0, "load")


def test_an_avoided_worker_is_taken_only_when_there_is_no_other() -> None:
    crowd = [Seen("a", 0), Seen("b", 1000)]
    holds = [(crowd[0], 64)]
    assert _picked(pick(crowd, holds, prompt_tokens=100, avoid={"a"}))[0] == "b"
    assert _picked(pick(crowd, avoid={"a", "b"}))[0] == "a"


@given(st.integers(1, 8), st.integers(0, 2**16))
def test_ties_spread_over_equals(workers: int, tie: int) -> None:
    crowd = [Seen(str(number)) for number in range(workers)]
    chosen = {_picked(pick(crowd, tie=tie + step))[0] for step in range(workers)}
    assert len(chosen) == workers


def test_a_long_prefix_is_worth_a_wait_a_short_one_is_not() -> None:
    free, busy = Seen("free"), Seen("busy", 5_000)
    crowd = [free, busy]
    long = pick(crowd, [(busy, 9_000)], prompt_tokens=10_000)
    assert _picked(long) == ("busy", 9_000, "prefix")
    short = pick(crowd, [(busy, 100)], prompt_tokens=10_000)
    assert _picked(short) == ("free", 0, "spread")


def test_of_two_holders_the_one_with_more_or_with_less_to_do() -> None:
    most, some = Seen("most", 20_000), Seen("some")
    crowd = [Seen("none"), most, some]
    held = [(most, 6_000), (some, 5_000)]
    assert _picked(pick(crowd, held, prompt_tokens=8_000)) == ("some", 5_000, "spread")
    light = [(Seen("most"), 6_000), (some, 5_000)]
    assert _picked(pick(crowd, light, prompt_tokens=8_000)) == ("most", 6_000, "prefix")


def test_nobody_waits_longer_than_tau_for_a_prefix() -> None:
    rate = 10_000.0
    for extra, stays in ((TAU_S * rate - 1, True), (TAU_S * rate + 1, False)):
        holder = Seen("holder", int(extra))
        choice = pick([Seen("free"), holder], [(holder, 900_000)], prompt_tokens=1_000_000)
        assert (_picked(choice)[0] == "holder") is stays


def test_a_faster_worker_takes_more() -> None:
    fast, slow = Seen("fast", 8_000, prefill_rate=40_000), Seen("slow", 4_000, prefill_rate=10_000)
    assert _picked(pick([slow, fast], prompt_tokens=1_000))[0] == "fast"
    assert _picked(pick([slow, Seen("fast", 30_000, prefill_rate=40_000)]))[0] == "slow"


def test_a_worker_of_unknown_speed_is_taken_for_a_typical_one() -> None:
    known = Seen("known", 1_000, prefill_rate=50_000)
    assert _picked(pick([known, Seen("new", 500, prefill_rate=0.0)]))[0] == "new"
    assert _picked(pick([known, Seen("new", 2_000, prefill_rate=0.0)]))[0] == "known"


@given(
    st.lists(
        st.tuples(st.integers(0, 100_000), st.integers(0, 300), st.sampled_from([0.0, 8e3, 4e4])),
        min_size=1,
        max_size=12,
    ),
    st.data(),
)
def test_the_choice_is_a_candidate_and_never_waits_tau_longer_than_the_lightest(
    loads: list[tuple[int, int, float]], data: st.DataObject
) -> None:
    crowd = [
        Seen(str(at), tokens, busy, rate, 5_000) for at, (tokens, busy, rate) in enumerate(loads)
    ]
    prompt = data.draw(st.integers(1, 100_000))
    held = [(one, data.draw(st.integers(1, prompt))) for one in crowd if data.draw(st.booleans())]
    choice = pick(crowd, held, prompt_tokens=prompt, tie=data.draw(st.integers(0, 99)))
    assert choice is not None
    assert choice.worker in crowd
    assert choice.cached_tokens in (0, {w.name: c for w, c in held}.get(choice.worker.name))
    known = [one.prefill_rate for one in crowd if one.prefill_rate] or [16_000.0]
    typical = sum(known) / len(known)
    waits = [one.queued_tokens / (one.prefill_rate or typical) + one.busy / 5_000 for one in crowd]
    waited = waits[crowd.index(choice.worker)]
    # Holders count twice in the typical rate, so allow for its shift.
    if all(one.prefill_rate for one in crowd):
        assert waited <= min(waits) + TAU_S + 1e-9


@pytest.mark.parametrize("workers", [2, 8])
def test_many_equal_prompts_at_once_spread_when_the_holder_has_too_much_to_do(workers: int) -> None:
    """Placed tokens count at once: nothing is reported meanwhile."""
    queued = [0] * workers
    holders: dict[int, int] = {}
    picks = [0] * workers
    for number in range(400):
        crowd = [Seen(str(at), tokens) for at, tokens in enumerate(queued)]
        held = [(crowd[at], cached) for at, cached in holders.items()]
        choice = pick(crowd, held, prompt_tokens=6_000, tie=number)
        assert choice is not None
        at = int(choice.worker.name)
        picks[at] += 1
        queued[at] += 6_000 - choice.cached_tokens
        holders[at] = 5_000
    assert min(picks) > 0.5 * 400 / workers
    assert max(queued) - min(queued) <= TAU_S * 10_000 + 6_000
