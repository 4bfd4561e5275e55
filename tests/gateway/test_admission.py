"""Places in a gateway: how many there are, and how many of them a team may hold."""

from contextlib import ExitStack
from itertools import count

import pytest
from forebay_gateway.admission import Admission
from forebay_shared.errors import OverloadedError, RateLimitError


def fill(admission: Admission, stack: ExitStack, team: str) -> int:
    """Places that a team gets until it is refused one."""
    for held in count():
        try:
            stack.enter_context(admission.admit(team))
        except RateLimitError:
            return held
    raise AssertionError


def test_however_many_teams_flood_there_is_a_place_for_another_one() -> None:
    admission = Admission(1000)
    with ExitStack() as stack:
        assert [fill(admission, stack, team) for team in "abc"] == [900, 90, 9]
        with admission.admit("d"):
            assert admission.open == 1000
    assert admission.open == 0
    with ExitStack() as stack:
        assert fill(admission, stack, "b") == 900, "nothing is left of those that are gone"


def test_nobodys_requests_may_have_all_places() -> None:
    admission = Admission(3)
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(admission.admit())
        with pytest.raises(OverloadedError):
            stack.enter_context(admission.admit("red"))
    with admission.admit("red"):
        assert admission.open == 1
