"""From a signed token (JWT) to the rights of who sent it: issuer, signature, claims, grant.

What no grant maps is refused. It knows no HTTP and no Redis.
"""

import secrets
from base64 import urlsafe_b64decode
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple, cast

import msgspec
from forebay_shared.errors import AuthenticationError, PermissionDeniedError

from forebay_gateway.teams.access import Access
from forebay_gateway.teams.directory import Directory
from forebay_gateway.teams.jwks import KeyKeeper
from forebay_gateway.teams.records import Grant, Issuer, Key

MAX_TOKEN_BYTES = 8_192
MAX_REMEMBERED = 4_096
"""Tokens whose signature need not be checked again: 0.4 to 0.7 ms each, on a busy core."""
REMEMBERED_S = 60.0
"""After it the issuer's keys are asked for again, which may be too old by then."""
MAX_SHOWN = 100
_SCOPES = frozenset({"scope", "scp"})
"""Claims that are lists in one text, with spaces between."""


class Head(NamedTuple):
    """What an unchecked token says of itself: enough to find the key, and never believed."""

    issuer: str
    algorithm: str
    kid: str


class _Opened(NamedTuple):
    access: Access
    name: str
    until: float


class Bearers:
    """The tokens of the directory's issuers."""

    def __init__(self, directory: Directory, keeper: KeyKeeper) -> None:
        self._directory = directory
        self._keeper = keeper
        self._secret = secrets.token_bytes(32)
        self._opened: OrderedDict[bytes, _Opened] = OrderedDict()
        self._resolved: dict[tuple[str, ...], Access] = {}
        self._before: dict[tuple[str, ...], Access] = {}
        self._issuers: Mapping[str, Issuer] = {}
        self._version = (-1, -1)

    def __len__(self) -> int:
        """Tokens that are remembered."""
        return len(self._opened)

    async def open(self, presented: bytes, now: float, client: str) -> tuple[Access, str]:
        """The rights of a token, and who it is, for the audit log. `now` in seconds since 1970.

        Raises:
            AuthenticationError: it is not valid, or of nobody that is known.
            PermissionDeniedError: no grant maps it, or what it belongs to is disabled.
            OverloadedError: its issuer's keys cannot be read.
        """
        self._refresh()
        place = blake2b(presented, key=self._secret, digest_size=32).digest()
        opened = self._opened.get(place)
        if opened is None or now >= opened.until:
            generation = self._directory.generation
            opened = await self._open(presented, now)
            if generation == self._directory.generation:
                self._refresh()
                self._remember(place, opened)
        if (error := opened.access.refusal(now, client)) is not None:
            raise error
        return opened.access, opened.name

    async def _open(self, presented: bytes, now: float) -> _Opened:
        head = peek(presented)
        issuer = self._issuers.get(head.issuer)
        if issuer is None:
            raise AuthenticationError("The token's issuer is not known here.")
        if issuer.disabled:
            raise PermissionDeniedError("The issuer of this token is disabled.")
        if head.algorithm not in issuer.algorithms:
            raise AuthenticationError("The token is signed in a way that is not allowed here.")
        key = await self._keeper.key(issuer, head.kid, head.algorithm)
        if key is None:
            raise AuthenticationError("The token is signed with a key that its issuer has not.")
        from forebay_gateway.teams import tokens  # loaded by now: the key comes from there

        claims = tokens.verify(presented.decode("ascii"), key, issuer)
        grant = grant_of(issuer, claims)
        user = self._user(issuer, grant, claims)
        ends = float(cast(float, claims["exp"])) + issuer.leeway_s
        access = self._access(issuer, grant, user)
        return _Opened(access, name_of(issuer, claims), min(ends, now + REMEMBERED_S))

    def _user(self, issuer: Issuer, grant: Grant, claims: Mapping[str, object]) -> str:
        """The id of the grant's team's user that the token names; empty where there is none."""
        for value in values_of(claims, issuer.user_claim):
            user = self._directory.user(value.lower())
            if user is not None and grant.team and user.team == grant.team:
                return user.id
        return ""

    def _access(self, issuer: Issuer, grant: Grant, user: str) -> Access:
        where = (issuer.id, grant.team or grant.organisation, user, grant.role)
        access = self._resolved.get(where)
        if access is None:
            key = Key(
                id="/".join(part for part in where[:3] if part),
                team=grant.team,
                organisation=grant.organisation,
                user=user,
                role=grant.role,
            )
            access = self._resolved[where] = Access(key, self._directory, "token")
            access.follow(self._before.get(where))
        return access

    def _refresh(self) -> None:
        """Forgets all when the directory or any issuer's keys have changed."""
        version = (self._directory.generation, self._keeper.version)
        if version != self._version:
            if version[0] != self._version[0]:
                self._issuers = self._directory.issuers()
                self._before, self._resolved = self._resolved, {}
            self._version = version
            self._opened.clear()

    def _remember(self, place: bytes, opened: _Opened) -> None:
        self._opened[place] = opened
        if len(self._opened) > MAX_REMEMBERED:
            self._opened.popitem(last=False)


def looks_signed(presented: bytes) -> bool:
    """Whether it has the form of a JWT: three parts, the first a JSON object."""
    return presented.startswith(b"eyJ") and presented.count(b".") == 2


def peek(presented: bytes) -> Head:
    """Raises AuthenticationError for what is no token, or is one that nobody should send."""
    if len(presented) > MAX_TOKEN_BYTES:
        raise AuthenticationError(f"The token is larger than {MAX_TOKEN_BYTES} bytes.")
    header, payload, _ = presented.split(b".")
    try:
        presented.decode("ascii")
        said = _decode_header(_bytes(header))
        issuer = _decode_payload(_bytes(payload)).iss
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise AuthenticationError("The token is not a valid JWT.") from None
    if said.crit is not msgspec.UNSET:
        raise AuthenticationError("The token asks for an extension that is not known here.")
    return Head(issuer, said.alg, said.kid)


def grant_of(issuer: Issuer, claims: Mapping[str, object]) -> Grant:
    """The first grant that fits. Raises PermissionDeniedError when none does."""
    for grant in issuer.grants:
        if grant.value in values_of(claims, grant.claim):
            return grant
    raise PermissionDeniedError("The token is valid, but nothing here is granted to its claims.")


def values_of(claims: Mapping[str, object], path: str) -> list[str]:
    """The values of a claim as texts: of its list, or its only one; [] when it is absent."""
    value: object = claims.get(path)
    if value is None:
        value = claims
        for name in path.split("."):
            value = _member(value, name)
    if isinstance(value, str):
        return value.split(" ") if path in _SCOPES else [value]
    if isinstance(value, list):
        return [each for each in cast("Sequence[object]", value) if isinstance(each, str)]
    if isinstance(value, bool):
        return ["true" if value else "false"]
    return [str(value)] if isinstance(value, int) else []


def name_of(issuer: Issuer, claims: Mapping[str, object]) -> str:
    """Who it is, for people: a text of one line."""
    named = next(iter(values_of(claims, issuer.user_claim)), "") or str(claims.get("sub", ""))
    shown = "".join(each if each.isprintable() else "?" for each in named[:MAX_SHOWN])
    return f"token {issuer.id}: {shown}"


def _member(value: object, name: str) -> object:
    return cast("dict[str, object]", value).get(name) if isinstance(value, dict) else None


def _bytes(part: bytes) -> bytes:
    return urlsafe_b64decode(part + b"=" * (-len(part) % 4))


class _Header(msgspec.Struct):
    alg: str
    kid: str = ""
    crit: object = msgspec.UNSET


class _Payload(msgspec.Struct):
    iss: str


_decode_header = msgspec.json.Decoder(_Header).decode
_decode_payload = msgspec.json.Decoder(_Payload).decode
