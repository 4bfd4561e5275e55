"""What the directory holds, from organisations to issuers of tokens, as frozen records.

A record is JSON in Redis, under `kind/id`. Fields are only ever added, with defaults, and a reader
ignores what it does not know, so gateways of two versions share one directory. It knows no Redis
and no HTTP.
"""

from collections.abc import Mapping
from typing import Annotated, Literal, get_args

import msgspec
from forebay_shared.sampling import RepetitionPenalty
from msgspec import Meta

Kind = Literal["organisation", "team", "user", "key", "model", "alias", "issuer"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Parents come before children."""
PLURALS: Mapping[Kind, str] = {
    "organisation": "organisations",
    "team": "teams",
    "user": "users",
    "key": "keys",
    "model": "models",
    "alias": "aliases",
    "issuer": "issuers",
}
"""What lists of them are called: in paths, in documents and on the command line."""
SINGULARS: Mapping[str, Kind] = {plural: kind for kind, plural in PLURALS.items()}

Role = Literal["owner", "admin", "member", "viewer"]
ROLES: tuple[Role, ...] = ("viewer", "member", "admin", "owner")
"""The least powerful first."""

Priority = Literal["high", "normal", "low"]
PRIORITIES: Mapping[Priority, float] = {"high": 8.0, "normal": 1.0, "low": 0.125}
"""Factors of a team's weight. A strict order would let the low ones starve."""

Unit = Literal["money", "tokens"]
Window = Literal["hour", "day", "week", "month", "total"]

Condition = Literal["missing", "overloaded", "context"]
"""Why a model cannot answer: no worker serves it, they have too much to do, the prompt is too long.
"""
CONDITIONS: tuple[Condition, ...] = get_args(Condition)

MAX_LIST = 256
_MAX_INT32 = 2**31 - 1
_ID = r"^[a-z0-9][a-z0-9._@-]{0,62}$"
_NAME = r"^[^\x00/][^\x00]{0,127}$"

Id = Annotated[str, Meta(pattern=_ID)]
Parent = Annotated[str, Meta(pattern=r"^([a-z0-9][a-z0-9._@-]{0,62})?$")]
"""An id, or empty."""
Count = Annotated[int, Meta(ge=0, le=10**12)]
Text = Annotated[str, Meta(max_length=200)]
Names = Annotated[tuple[Annotated[str, Meta(max_length=200)], ...], Meta(max_length=MAX_LIST)]
Word = Annotated[str, Meta(min_length=1, max_length=200)]
Tokens = Annotated[int, Meta(ge=1, le=_MAX_INT32)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
Share = Annotated[float, Meta(gt=0, le=1)]
Day = Annotated[str, Meta(pattern=r"^(\d{4}-\d{2}-\d{2})?$")]
"""A date in UTC, or empty."""


class Limits(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Rates as token buckets that hold one minute's (one day's) worth. None: no limit."""

    requests_per_minute: Count | None = None
    input_tokens_per_minute: Count | None = None
    output_tokens_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    tokens_per_day: Count | None = None
    concurrent_requests: Count | None = None


class Budget(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """At most `amount` (of the currency, or tokens) in each window, which begins in `time_zone`."""

    amount: Annotated[float, Meta(ge=0, le=1e12)]
    unit: Unit = "money"
    window: Window = "month"
    time_zone: Annotated[str, Meta(max_length=64)] = "UTC"


class Price(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Money per million tokens. `cached_input` None: as `input`."""

    input: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    cached_input: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    output: Annotated[float, Meta(ge=0, le=1e6)] = 0.0


Budgets = Annotated[tuple[Budget, ...], Meta(max_length=10)]


class Record(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What every record has. `limits` and `budgets` hold for all that is below it, together."""

    id: Id
    name: Text = ""
    limits: Limits = Limits()
    budgets: Budgets = ()
    disabled: bool = False


class Organisation(Record, frozen=True, omit_defaults=True, kw_only=True):
    """Holds teams."""


class Team(Record, frozen=True, omit_defaults=True, kw_only=True):
    """Holds users and keys. `models` are the public names that it may use; empty: all.

    `weight` times the factor of `priority` is its share of the engines. With `share_cache` it
    reuses the cached prefixes of other teams that share, and they its own. `on_outage` says
    whether its requests start while Redis does not answer, within what was left of its limits.
    """

    organisation: Id
    models: Names = ()
    priority: Priority = "normal"
    weight: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    share_cache: bool = False
    on_outage: Literal["refuse", "continue"] = "refuse"


def share_of(team: Team) -> float:
    """Its weight among the teams that an engine serves."""
    return team.weight * PRIORITIES[team.priority]


class User(Record, frozen=True, omit_defaults=True, kw_only=True):
    """A person in a team. `role` bounds the role of each of its keys."""

    team: Id
    role: Role = "member"


class StoredSecret(msgspec.Struct, frozen=True, omit_defaults=True):
    """A keyed digest of a key's secret, in hex. `expires`: seconds since 1970; 0: never."""

    digest: str
    expires: float = 0.0


class Key(Record, frozen=True, omit_defaults=True, kw_only=True):
    """A bearer key. Its id is the public part; `secrets` are two while a rotation's grace lasts.

    `team` is empty only for an owner's key: of `organisation`, or of the whole fleet.
    """

    team: Parent = ""
    organisation: Parent = ""
    user: Parent = ""
    role: Role = "member"
    secrets: Annotated[tuple[StoredSecret, ...], Meta(max_length=4)] = ()
    created: float = 0.0
    expires: Annotated[float, Meta(ge=0)] = 0.0
    models: Names = ()
    routes: Names = ()
    networks: Names = ()


class Model(Record, frozen=True, omit_defaults=True, kw_only=True):
    """What a served model costs and bears. Its id is its main name."""

    id: Annotated[str, Meta(pattern=_NAME)]
    price: Price = Price()


class Target(msgspec.Struct, frozen=True, omit_defaults=True):
    """A served model and its share of the requests."""

    model: Word
    weight: Annotated[float, Meta(ge=0, le=1e6)] = 1.0


class Defaults(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Values of request fields that a client left out."""

    max_tokens: Tokens | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_MAX_INT32)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: RepetitionPenalty | None = None


class Caps(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The most that request fields may be; a higher value is lowered."""

    max_tokens: Tokens | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None


class Alias(Record, frozen=True, omit_defaults=True, kw_only=True):
    """A public name for served models. Its id is the name, or `team/name` where it is one team's.

    One target is drawn by weight; `fallbacks` follow in their order where it cannot answer, under
    the conditions of `fall_back_on`. From `deprecated` (a date) on, answers carry a warning; from
    `sunset` on, the name is withdrawn.
    """

    id: Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f]{1,192}$")]
    team: Parent = ""
    targets: Annotated[tuple[Target, ...], Meta(min_length=1, max_length=32)]
    fallbacks: Annotated[tuple[Word, ...], Meta(max_length=32)] = ()
    fall_back_on: Annotated[tuple[Condition, ...], Meta(max_length=3)] = CONDITIONS
    defaults: Defaults = Defaults()
    caps: Caps = Caps()
    deprecated: Day = ""
    sunset: Day = ""

    @property
    def public_name(self) -> str:
        return self.id.removeprefix(f"{self.team}/") if self.team else self.id

    @property
    def models(self) -> tuple[str, ...]:
        """Every served model that it names, once."""
        return tuple(dict.fromkeys((*(target.model for target in self.targets), *self.fallbacks)))


Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]  # fmt: skip
"""Signatures by a private key. What is checked with a shared secret, or not at all, is not here."""


class Grant(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What a token may do whose `claim` has this `value`, or has it in its list.

    A claim inside others is named by its path, with dots. `team` is empty only for an owner: of
    `organisation`, or of the whole fleet.
    """

    claim: Word
    value: Word
    team: Parent = ""
    organisation: Parent = ""
    role: Role = "member"


class Issuer(Record, frozen=True, omit_defaults=True, kw_only=True):
    """Who signs tokens (JWT) that open as keys do, with what its `grants` say: the first that fits.

    `issuer` is the tokens' `iss`, `audiences` one of which is their `aud`. `jwks` says where the
    public keys are: an https URL, or a file of the gateway. `user_claim` names the user of the
    team, where there is one.
    """

    issuer: Annotated[str, Meta(min_length=1, max_length=500)]
    audiences: Annotated[tuple[Word, ...], Meta(min_length=1, max_length=16)]
    jwks: Annotated[str, Meta(min_length=1, max_length=500)]
    algorithms: Annotated[tuple[Algorithm, ...], Meta(min_length=1, max_length=10)] = (
        "RS256", "ES256", "EdDSA",
    )  # fmt: skip
    leeway_s: Annotated[float, Meta(ge=0, le=300)] = 30.0
    user_claim: Annotated[str, Meta(max_length=200)] = "sub"
    grants: Annotated[tuple[Grant, ...], Meta(min_length=1, max_length=MAX_LIST)]


Entry = Organisation | Team | User | Key | Model | Alias | Issuer
TYPES: Mapping[Kind, type[Entry]] = {
    "organisation": Organisation,
    "team": Team,
    "user": User,
    "key": Key,
    "model": Model,
    "alias": Alias,
    "issuer": Issuer,
}
_KIND_OF: Mapping[type[Entry], Kind] = {cls: kind for kind, cls in TYPES.items()}


def kind_of(entry: Entry) -> Kind:
    return _KIND_OF[type(entry)]


def place_of(entry: Entry) -> str:
    """Its field in the directory: `kind/id`."""
    return f"{kind_of(entry)}/{entry.id}"
