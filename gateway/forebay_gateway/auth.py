"""Who may call: bearer keys, kept as keyed digests and compared in constant time, and signed
tokens; default-deny.

The decision is made on the raw ASGI path before any body is read and before any routing, so that no
spelling of a path or of a Host header opens a door. Configured keys are here, those of teams in
`teams`. It knows no routes and no handlers.
"""

import hmac
import secrets
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Protocol

from forebay_shared.errors import AuthenticationError

from forebay_gateway.teams.bearer import looks_signed
from forebay_gateway.teams.caller import Caller
from forebay_gateway.teams.secrets import Token, split

OPEN_PATHS = frozenset({"/health", "/ping", "/ready"})
METRICS_PATH = "/metrics"


class Identifies(Protocol):
    """teams.Teams, or nobody."""

    @property
    def closed(self) -> bool: ...

    def identify(self, token: Token, client: str) -> Caller: ...

    async def identify_bearer(self, presented: bytes, client: str) -> Caller: ...


class Keyring:
    """The keys that may call. Without any key, configured or of a team, the gateway is open.

    Every look-up of a configured key compares with all of them, so its time tells nothing about
    which one was near.
    """

    def __init__(
        self,
        keys: Sequence[str],
        *,
        admin_key: str = "",
        teams: Identifies | None = None,
        protect_metrics: bool = False,
    ) -> None:
        self._secret = secrets.token_bytes(32)
        self._digests = [self._digest(key.encode("utf-8", "surrogateescape")) for key in keys]
        self._root = len(self._digests) if admin_key else -1
        if admin_key:
            self._digests.append(self._digest(admin_key.encode("utf-8", "surrogateescape")))
        self._teams = teams
        self._open_paths = OPEN_PATHS if protect_metrics else OPEN_PATHS | {METRICS_PATH}

    def _digest(self, key: bytes) -> bytes:
        # Keyed BLAKE2b is a MAC of 2 us; OpenSSL's HMAC takes 20 us and more to set up.
        return blake2b(key, key=self._secret, digest_size=32).digest()

    async def authorize(
        self, path: str, headers: Mapping[bytes, bytes], client: str = ""
    ) -> Caller:
        """The caller, who comes from the address `client`. A configured key's team is its number,
        which is opaque and stable.

        Raises:
            AuthenticationError: the path asks for a key and none or a wrong one is sent.
            PermissionDeniedError, OverloadedError: as teams.Teams.identify and identify_bearer.
        """
        if path in self._open_paths:
            return Caller()
        closed = bool(self._digests) or (self._teams is not None and self._teams.closed)
        if not closed:
            return Caller()
        key = _presented_key(headers)
        if not key:
            raise AuthenticationError(
                "No API key was sent. Send it as 'Authorization: Bearer KEY'."
            )
        digest = self._digest(key)
        found = -1
        for number, known in enumerate(self._digests):
            if hmac.compare_digest(digest, known):
                found = number
        if found >= 0:
            return Caller(f"key-{found}", root=found == self._root)
        if self._teams is not None and (token := split(key)) is not None:
            return self._teams.identify(token, client)
        if self._teams is not None and looks_signed(key):
            return await self._teams.identify_bearer(key, client)
        raise AuthenticationError("The API key is not valid.")


def _presented_key(headers: Mapping[bytes, bytes]) -> bytes:
    """The bearer goes before Anthropic's header and Azure's; an empty one, as clients send whose
    variable is empty, is none."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and (bearer := token.strip()):
        return bearer
    return headers.get(b"x-api-key", b"").strip() or headers.get(b"api-key", b"").strip()
