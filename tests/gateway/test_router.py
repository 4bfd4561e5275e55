"""The router's choice, which is a pure function of what it sees."""

from dataclasses import dataclass

from forebay_gateway.router import pick
from hypothesis import given
from hypothesis import strategies as st


@dataclass(frozen=True)
class Seen:
    name: str
    queued_tokens: int = 0
    busy: int = 0


def test_no_candidate_is_no_choice() -> None:
    assert pick([]) is None


def test_fewest_queued_tokens_win_then_fewest_sequences() -> None:
    crowd = [Seen("a", 10, 0), Seen("b", 5, 9), Seen("c", 5, 3)]
    assert pick(crowd) == crowd[2]


def test_an_avoided_worker_is_taken_only_when_there_is_no_other() -> None:
    crowd = [Seen("a", 0), Seen("b", 1000)]
    assert pick(crowd, avoid={"a"}) == crowd[1]
    assert pick(crowd, avoid={"a", "b"}) == crowd[0]


@given(st.integers(1, 8), st.integers(0, 2**16))
def test_ties_spread_over_equals(workers: int, tie: int) -> None:
    crowd = [Seen(str(number)) for number in range(workers)]
    chosen = {pick(crowd, tie=tie + step) for step in range(workers)}
    assert chosen == set(crowd)
