"""What a key may do: its record and all above it, resolved once per state of the directory.

Pure: the time and the client's address are given. It knows no Redis and no HTTP.
"""

import ipaddress
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from forebay_shared.errors import (
    AuthenticationError,
    ForebayError,
    PermissionDeniedError,
)

from forebay_gateway.teams.directory import Directory
from forebay_gateway.teams.records import (
    ROLES,
    Key,
    Limits,
    Organisation,
    Record,
    Role,
    StoredSecret,
    Team,
    User,
    share_of,
)
from forebay_gateway.teams.secrets import Token, digest, same

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Scope(NamedTuple):
    """One record whose limits hold for a request: what it is, and the record."""

    kind: str
    record: Record

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.kind} {self.record.id}"

    @property
    def label(self) -> str:
        """In Redis."""
        return f"{self.kind}:{self.record.id}"


Figures = tuple[int, int, float]
"""A limit, what remains of it, and seconds until it is full again."""


class Standing(NamedTuple):
    """What is left of the tightest limits at the moment `at`, in monotonic seconds; None where
    nothing is limited."""

    requests: Figures | None
    tokens: Figures | None
    at: float = 0.0

    def later(self, now: float) -> "Standing":
        """As it is since, if nobody has asked: the buckets fill."""
        since = now - self.at
        return Standing(_filled(self.requests, since), _filled(self.tokens, since), now)


class Access:
    """The rights of one key. `scopes` are the key, its user, its team and its organisation.

    `standing` is how it was with the limits when it last asked, `unused` how it is before it asks.
    `lacks` is what should stand above it and is not there, or cannot be read: it opens nothing
    then, as nobody knows its limits.
    """

    __slots__ = (
        "cache_salt", "engine_team", "key", "lacks", "models", "networks", "noun", "organisation",
        "role", "routes", "scopes", "standing", "team", "unused", "user", "weight",
    )  # fmt: skip

    def __init__(self, key: Key, directory: Directory, noun: str = "API key") -> None:
        """`noun`: what its holder sent, in words."""
        self.key = key
        self.noun = noun
        self.user: User | None = directory.user(key.user) if key.user else None
        self.team: Team | None = directory.team(key.team) if key.team else None
        above = self.team.organisation if self.team is not None else key.organisation
        self.organisation: Organisation | None = directory.organisation(above)
        named = {"user": key.user, "team": key.team, "organisation": above}
        lacking = [kind for kind, name in named.items() if name and getattr(self, kind) is None]
        self.lacks = next(iter(lacking), "")
        self.role: Role = _least(key.role, self.user.role if self.user else key.role)
        lists = [frozenset(names) for names in (key.models, self.team_models) if names]
        self.models = frozenset.intersection(*lists) if lists else None
        self.routes = frozenset(key.routes) if key.routes else None
        self.networks: list[_Network] = [ipaddress.ip_network(text) for text in key.networks]
        team = self.team
        self.engine_team = _opaque("team", team.id) if team else ""
        self.cache_salt = _opaque("salt", team.id) if team and not team.share_cache else ""
        self.weight = share_of(team) if team else 1.0
        self.standing: Standing | None = None
        records = (key, self.user, self.team, self.organisation)
        kinds = ("key", "user", "team", "organisation")
        self.scopes = [Scope(kind, each) for kind, each in zip(kinds, records, strict=True) if each]
        self.unused = _unused(self.limits)

    @property
    def limits(self) -> list[Limits]:
        return [scope.record.limits for scope in self.scopes]

    @property
    def team_models(self) -> tuple[str, ...]:
        return self.team.models if self.team else ()

    @property
    def team_id(self) -> str:
        return self.team.id if self.team else ""

    @property
    def organisation_id(self) -> str:
        return self.organisation.id if self.organisation else ""

    def follow(self, before: "Access | None") -> None:
        """Stands as it did before the directory changed, unless its limits did."""
        if before is not None and before.limits == self.limits:
            self.standing = before.standing

    def refusal(self, now: float, client: str) -> ForebayError | None:
        """Why the key may not call at all; None when it may."""
        if self.key.expires and now >= self.key.expires:
            return AuthenticationError(f"The {self.noun} has expired.")
        if self.lacks:
            return PermissionDeniedError(f"The {self.lacks} of this {self.noun} does not exist.")
        for scope in self.scopes:
            if scope.record.disabled:
                return PermissionDeniedError(f"The {scope.kind} of this {self.noun} is disabled.")
        if self.networks and not self._from_allowed(client):
            return PermissionDeniedError("This API key may not be used from this address.")
        return None

    def may_use(self, model: str) -> bool:
        """Whether it may ask for a model by this public name."""
        return self.models is None or model in self.models

    def check_route(self, route: str) -> None:
        """Raises PermissionDeniedError where the key is for other routes."""
        if self.routes is not None and route not in self.routes:
            raise PermissionDeniedError("This API key may not be used for this route.")

    def _from_allowed(self, client: str) -> bool:
        try:
            address = ipaddress.ip_address(client)
        except ValueError:
            return False
        mapped = getattr(address, "ipv4_mapped", None)
        return any((mapped or address) in network for network in self.networks)


class Gatekeeper:
    """From a presented key to its rights. Cost: one MAC and a few look-ups."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._resolved: dict[str, Access] = {}
        self._before: dict[str, Access] = {}
        """Those of the last state of the directory that anybody asked for."""
        self._generation = -1

    def open(self, token: Token, pepper: bytes, now: float, client: str) -> Access:
        """The rights of a key. An unknown key costs as long as a wrong secret.

        Raises:
            AuthenticationError: it is unknown, wrong or expired.
            PermissionDeniedError: it, or what is above it, is disabled, or the address is wrong.
        """
        access = self.access(token.id)
        secrets = access.key.secrets if access else ()
        given = digest(pepper, token.id, token.secret)
        found = False
        for secret in secrets or _NO_SECRETS:
            live = not secret.expires or now < secret.expires
            found = (same(given, secret.digest) and live) or found
        if access is None or not found:
            raise AuthenticationError("The API key is not valid.")
        error = access.refusal(now, client)
        if error is not None:
            raise error
        return access

    def access(self, key_id: str) -> Access | None:
        """The rights of the key with this public id; None when there is none."""
        if self._generation != self._directory.generation:
            self._generation = self._directory.generation
            self._before, self._resolved = self._resolved, {}
        access = self._resolved.get(key_id)
        if access is None:
            key = self._directory.key(key_id)
            if key is None:
                return None
            access = self._resolved[key_id] = Access(key, self._directory)
            access.follow(self._before.get(key_id))
        return access


_TOKENS = (
    "input_tokens_per_minute",
    "output_tokens_per_minute",
    "tokens_per_minute",
    "tokens_per_day",
)
_NO_SECRETS = (StoredSecret("0" * 64),)


def _filled(figures: Figures | None, since_s: float) -> Figures | None:
    if figures is None or figures[2] <= 0:
        return figures
    limit, left, reset_s = figures
    # What is overdrawn says nothing of its rate: its window does, and a day's is far the longer.
    window_s = 86_400 if reset_s > 43_200 else 60
    used_per_s = (limit - left) / reset_s if left > 0 else limit / window_s
    reset_s = max(0.0, reset_s - since_s)
    return limit, max(left, int(limit - reset_s * used_per_s)), reset_s


def _unused(limits: Sequence[Limits]) -> Standing:
    """The tightest limits, full."""
    requests = [each.requests_per_minute for each in limits]
    tokens = [getattr(each, name) for each in limits for name in _TOKENS]
    return Standing(_full(requests), _full(tokens))


def _full(caps: Sequence[int | None]) -> Figures | None:
    tightest = min((cap for cap in caps if cap is not None), default=None)
    return None if tightest is None else (tightest, tightest, 0.0)


def _least(one: Role, other: Role) -> Role:
    return ROLES[min(ROLES.index(one), ROLES.index(other))]


def _opaque(purpose: str, team: str) -> str:
    """A team's id for engines, which see no names."""
    return blake2b(team.encode(), digest_size=12, person=purpose.encode()).hexdigest()
