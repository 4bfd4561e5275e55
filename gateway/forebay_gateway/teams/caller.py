"""Whose request this is: what the edge found out, for whoever prepares and places the work."""

import random
import time
from typing import Protocol

from forebay_shared.errors import ForebayError, ModelNotFoundError, PermissionDeniedError

from forebay_gateway.meter import Toll
from forebay_gateway.teams.access import Access, Standing
from forebay_gateway.teams.aliases import Route

Headers = list[tuple[bytes, bytes]]

_OF_ROOT = frozenset({"admin", "models", "version", "metrics"})
MAX_SHOWN_NAME = 100


class Gate(Protocol):
    """teams.Teams: who pays for what a caller asks."""

    def toll(self, caller: "Caller", access: Access, alias: str, model: str) -> Toll: ...


class Caller:
    """One request's caller. A configured key, or nobody in particular, has no `access`: for it
    everything is allowed but the admin API, and nothing is counted.

    `team` is the engine's fairness key, opaque and stable; `headers` go out with the answer, beside
    those of its `standing`. `name` is who it is for the audit log, where that is more than its key.
    `route` is the way to the model that it asked for; `lot`, in [0, 1), draws among several.
    """

    __slots__ = (
        "_gate", "access", "headers", "lot", "name", "root", "route", "standing", "team",
    )  # fmt: skip

    def __init__(
        self,
        team: str = "",
        access: Access | None = None,
        gate: Gate | None = None,
        *,
        root: bool = False,
        name: str = "",
    ) -> None:
        self.team = team
        self._gate = gate
        self.access = access
        self.root = root
        """It is the admin key: it may do everything in the admin API, and nothing else."""
        self.headers: Headers = []
        self.standing = access.standing if access is not None else None
        self.name = name
        self.lot = random.random()
        self.route: Route | None = None

    @property
    def team_id(self) -> str:
        """The team's id; empty for a caller without one."""
        return self.access.team_id if self.access else ""

    def goes_on(self, error: ForebayError) -> bool:
        """Takes the next model that may answer; False when there is none."""
        return self.route is not None and self.route.go_on(error)

    @property
    def cache_salt(self) -> str:
        """What keeps the team's cached prefixes apart; empty where they are shared."""
        return self.access.cache_salt if self.access else ""

    @property
    def weight(self) -> float:
        return self.access.weight if self.access else 1.0

    def priority(self, asked: int) -> int:
        """The engine's priority, lower first: a team's request may only stand back, not jump."""
        return asked if self.access is None else max(0, asked)

    def check_route(self, route: str) -> None:
        """Raises PermissionDeniedError where it may not go. `route` is the metrics' name of it."""
        if self.access is not None:
            self.access.check_route(route)
        elif self.root and route not in _OF_ROOT:
            raise PermissionDeniedError(
                "The admin key opens /admin/v1 alone: make a key for a team with it."
            )
        elif route == "admin" and not self.root:
            raise PermissionDeniedError("This API key has no role in the admin API.")

    def answer_headers(self) -> Headers:
        """What every answer to this caller carries."""
        if self.access is None:
            return self.headers
        standing = self.standing or self.access.unused
        return headers_of(standing.later(time.monotonic())) + self.headers

    def toll(self, alias: str, model: str) -> Toll | None:
        """Who admits and pays for a job of this caller; None: nobody counts. `alias` is the name
        that was asked for, `model` the served one's main name.
        """
        if self.access is None or self._gate is None:
            return None
        return self._gate.toll(self, self.access, alias, model)

    def sees(self, model: str) -> bool:
        """Whether the caller may know and use a model by this public name."""
        return self.access is None or self.access.may_use(model)

    def check_model(self, model: str) -> None:
        """Raises ModelNotFoundError for a model that the caller may not know of."""
        if not self.sees(model):
            raise unknown_model(model)


def headers_of(standing: Standing) -> Headers:
    """The `x-ratelimit-*` headers of OpenAI's; none where nothing is limited."""
    headers: Headers = []
    for name, numbers in ((b"requests", standing.requests), (b"tokens", standing.tokens)):
        if numbers is not None:
            limit, remaining, reset_s = numbers
            headers += [
                (b"x-ratelimit-limit-" + name, b"%d" % limit),
                (b"x-ratelimit-remaining-" + name, b"%d" % max(0, remaining)),
                (b"x-ratelimit-reset-" + name, b"%.3gs" % reset_s),
            ]
    return headers


def unknown_model(name: str) -> ModelNotFoundError:
    """The error that names a model; the same whether it does not exist or is another team's."""
    return ModelNotFoundError(
        f"The model '{name[:MAX_SHOWN_NAME]}' does not exist or is not served here.", param="model"
    )
