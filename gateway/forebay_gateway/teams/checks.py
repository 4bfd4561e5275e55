"""Plain data to records: types, unknown fields, and what a type cannot say.

Every error names the field by its path. It knows no Redis and no HTTP.
"""

import ipaddress
from collections.abc import Iterator, Sequence
from datetime import date
from functools import cache
from typing import cast, get_args
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

import msgspec
from forebay_shared.errors import InvalidRequestError
from forebay_shared.telemetry import ROUTES
from msgspec.structs import fields

from forebay_gateway.teams.records import (
    TYPES,
    Alias,
    Caps,
    Entry,
    Issuer,
    Key,
    Kind,
    Limits,
    Record,
)

_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def parse(kind: Kind, tree: object, where: str) -> Entry:
    """A record of plain data. Raises InvalidRequestError that names the field below `where`."""
    cls = TYPES[kind]
    try:
        entry = msgspec.convert(tree, cls)
    except msgspec.ValidationError as error:
        raise _badly_typed(str(error), where) from None
    unknown = next(_unknown(tree, cls, where), None)
    if unknown is not None:
        raise InvalidRequestError(f"{unknown} is not a field that there is.", param=unknown)
    check(entry, where)
    return entry


def check(entry: Entry, where: str) -> None:
    """What a type cannot say. Raises InvalidRequestError that names the field below `where`."""
    seen: set[tuple[str, str]] = set()
    for number, budget in enumerate(entry.budgets):
        at = f"{where}.budgets[{number}]"
        if (budget.unit, budget.window) in seen:
            raise _invalid(at, "is the second of its unit and window")
        seen.add((budget.unit, budget.window))
        try:
            ZoneInfo(budget.time_zone)
        except (KeyError, ValueError, OSError):
            raise _invalid(f"{at}.time_zone", "must be a zone such as Europe/Paris") from None
    if isinstance(entry, Key):
        _check_key(entry, where)
    elif isinstance(entry, Alias):
        _check_unlimited(entry, where, "a model's: give them to those that the alias names")
        _check_alias(entry, where)
    elif isinstance(entry, Issuer):
        _check_unlimited(entry, where, "a team's: give them to those that the grants name")
        _check_issuer(entry, where)


def _check_key(key: Key, where: str) -> None:
    if not key.team and key.role != "owner":
        raise _invalid(f"{where}.team", "is needed for every role but owner")
    if key.team and key.organisation:
        raise _invalid(f"{where}.organisation", "goes with no team: the team says which it is")
    for number, route in enumerate(key.routes):
        if route not in ROUTES:
            known = ", ".join(ROUTES)
            raise _invalid(f"{where}.routes[{number}]", f"must be one of {known}")
    for number, network in enumerate(key.networks):
        try:
            ipaddress.ip_network(network)
        except ValueError:
            raise _invalid(
                f"{where}.networks[{number}]", "must be a network such as 10.0.0.0/8"
            ) from None


def _check_alias(alias: Alias, where: str) -> None:
    if alias.team and not alias.id.startswith(f"{alias.team}/"):
        raise _invalid(f"{where}.id", f"must begin with {alias.team}/, its team")
    if not alias.public_name:
        raise _invalid(f"{where}.id", "must hold a name behind its team")
    if not any(target.weight for target in alias.targets):
        raise _invalid(f"{where}.targets", "needs a weight above 0")
    names = [target.model for target in alias.targets]
    if len(set(names)) < len(names):
        raise _invalid(f"{where}.targets", "must name each model once")
    for name in Caps.__struct_fields__:
        default, cap = getattr(alias.defaults, name), getattr(alias.caps, name)
        if default is not None and cap is not None and default > cap:
            raise _invalid(f"{where}.defaults.{name}", "must not be above its cap")
    for name in ("deprecated", "sunset"):
        _check_day(getattr(alias, name), f"{where}.{name}")
    if alias.sunset and not alias.deprecated <= alias.sunset:
        raise _invalid(f"{where}.sunset", "must not be before the day of deprecation")


def _check_issuer(issuer: Issuer, where: str) -> None:
    if not is_location(issuer.jwks):
        raise _invalid(
            f"{where}.jwks",
            "must be an https:// URL, an http:// one of this host, or the whole path of a file",
        )
    for number, grant in enumerate(issuer.grants):
        at = f"{where}.grants[{number}]"
        if grant.role != "owner" and not grant.team:
            raise _invalid(f"{at}.team", "is needed for every role but owner")
        if grant.team and (grant.organisation or grant.role == "owner"):
            raise _invalid(f"{at}.team", "goes with neither an organisation nor the role owner")


def is_location(jwks: str) -> bool:
    """Whether keys may be read from there: nobody on the way must be able to put in others."""
    if jwks.startswith("/"):
        return True
    try:
        url = urlsplit(jwks)
        host = url.hostname or ""
    except ValueError:
        return False
    if url.username is not None or not host or not jwks.isascii() or not jwks.isprintable():
        return False
    return url.scheme == "https" or (url.scheme == "http" and host in _LOOPBACK)


def _check_unlimited(record: Record, where: str, whose: str) -> None:
    if record.budgets or record.limits != Limits():
        at = f"{where}.budgets" if record.budgets else f"{where}.limits"
        raise _invalid(at, f"are {whose}")


def _check_day(text: str, at: str) -> None:
    try:
        date.fromisoformat(text or "2000-01-01")
    except ValueError:
        raise _invalid(at, "must be a date such as 2026-12-31") from None


def _invalid(at: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{at} {what}.", param=at)


def _badly_typed(message: str, where: str) -> InvalidRequestError:
    """msgspec's message, which ends in a path, as a sentence about the field."""
    text, _, path = message.partition(" - at `$")
    at = where + path.rstrip("`")
    return InvalidRequestError(f"{at}: {text}.", param=at)


def _unknown(tree: object, struct: type[msgspec.Struct] | None, where: str) -> Iterator[str]:
    """Paths of fields in `tree`, or in what it lists, that `struct` does not have."""
    if struct is None:
        return
    if isinstance(tree, list | tuple):
        for number, item in enumerate(cast("Sequence[object]", tree)):
            yield from _unknown(item, struct, f"{where}[{number}]")
    elif isinstance(tree, dict):
        known = _structs_by_field(struct)
        for name, value in cast("dict[str, object]", tree).items():
            at = f"{where}.{name}"
            if name not in known:
                yield at
            else:
                yield from _unknown(value, known[name], at)


@cache  # msgspec evaluates the annotations anew each time, which takes a millisecond
def _structs_by_field(struct: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct] | None]:
    return {each.encode_name: _struct_in(each.type) for each in fields(struct)}


def _struct_in(cls: object) -> type[msgspec.Struct] | None:
    """The struct that a field's type is, or is a list of."""
    if isinstance(cls, type) and issubclass(cls, msgspec.Struct):
        return cls
    for part in get_args(cls):
        if (found := _struct_in(part)) is not None:
            return found
    return None
