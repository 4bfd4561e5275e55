"""Which requests may start while Redis does not answer: by what its last answer had left.

A team's policy says whether any may; a budget or what was never asked for lets none. It is the last
known rest that is spent, per gateway: so an outage admits too much by at most that rest times the
gateways, and never without a bound. Pure: it knows no Redis and no clock.
"""

from collections.abc import Mapping, Sequence

from forebay_shared import keys

from forebay_gateway.teams.access import Access, Scope
from forebay_gateway.teams.records import Limits

MOST = 64
"""Requests of one key in one outage where nothing else bounds them."""


class Allowance:
    """What each key may still start in this outage. `end` it when Redis answers again."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, float]] = {}

    def admits(
        self,
        access: Access,
        scopes: Sequence[Scope],
        tokens: int,
        slots: Mapping[str, int],
    ) -> bool:
        """Whether a request of this key that may take so many tokens starts; counts it then.

        `slots` are those that this gateway's open requests have, by the slots' key.
        """
        if access.team is None or access.team.on_outage != "continue":
            return False
        if any(scope.record.budgets for scope in scopes):
            return False
        for scope in scopes:
            most = scope.record.limits.concurrent_requests
            if most is not None and slots.get(keys.slots(scope.label), 0) >= most:
                return False
        left = self._left.get(access.key.id) or _rest(access, scopes)
        if left is None or min(left) < 1:
            return False
        self._left[access.key.id] = (left[0] - 1, left[1] - tokens)
        return True

    def end(self) -> None:
        self._left.clear()


def _rest(access: Access, scopes: Sequence[Scope]) -> tuple[float, float] | None:
    """Requests and tokens that were left when the key last asked; None when that is unknown."""
    standing = access.standing
    if standing is None:
        limited = any(scope.record.limits != Limits() for scope in scopes)
        return None if limited else (MOST, float("inf"))
    requests = standing.requests[1] if standing.requests is not None else MOST
    tokens = standing.tokens[1] if standing.tokens is not None else float("inf")
    return min(requests, MOST), tokens
