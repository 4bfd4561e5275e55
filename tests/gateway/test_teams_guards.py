"""What a member may do with a narrow key: nothing that makes it a wider one."""

from typing import Any

import pytest
from forebay_gateway.teams.guards import Actor, Guard
from forebay_gateway.teams.records import Budget, Limits, User
from forebay_shared.errors import PermissionDeniedError
from msgspec.structs import replace
from teams_house import filled, key_of

NARROW: dict[str, Any] = {
    "user": "bob",
    "models": ("small", "large"),
    "routes": ("/v1/chat/completions",),
    "networks": ("10.0.0.0/8",),
    "expires": 2e9,
    "limits": Limits(requests_per_minute=5),
    "budgets": (Budget(amount=3),),
}


@pytest.fixture
def guard() -> Guard:
    return guard_of(**NARROW)


def guard_of(**fields: Any) -> Guard:
    """Of the member bob, who acts by such a key."""
    actor = Actor("bob", "member", "acme", "red", "bob", key_of(**fields)[0])
    return Guard(actor, filled(User(id="bob", team="red")))


def test_a_key_as_narrow_or_narrower_is_a_members_own_affair(guard: Guard) -> None:
    key, _ = key_of(**NARROW)
    guard.must_change(key)
    guard.must_change(replace(key, models=("small",), expires=1.9e9, name="laptop"))
    limits = Limits(requests_per_minute=4, concurrent_requests=1)
    guard.must_change(replace(key, limits=limits, budgets=(Budget(amount=3), Budget(amount=1))))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("models", ()),
        ("models", ("small", "other")),
        ("routes", ()),
        ("networks", ("0.0.0.0/0",)),
        ("expires", 0.0),
        ("expires", 2.1e9),
        ("limits", Limits()),
        ("limits", Limits(requests_per_minute=6)),
        ("budgets", ()),
        ("budgets", (Budget(amount=4),)),
    ],
)
def test_a_wider_one_is_not(guard: Guard, field: str, value: object) -> None:
    key, _ = key_of(**{**NARROW, field: value})
    with pytest.raises(PermissionDeniedError, match=field):
        guard.must_change(key)


def test_a_key_without_bounds_of_its_own_makes_any() -> None:
    free = guard_of(user="bob")
    free.must_change(key_of(user="bob")[0])
    free.must_change(key_of(**NARROW)[0])
