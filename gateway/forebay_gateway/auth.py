"""Who may call: bearer keys, kept as keyed digests and compared in constant time; default-deny.

The decision is made on the raw ASGI path before any body is read and before any routing, so that no
spelling of a path or of a Host header opens a door. It knows no routes and no handlers.
"""

import hmac
import secrets
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from forebay_shared.errors import AuthenticationError

OPEN_PATHS = frozenset({"/health", "/ready"})
METRICS_PATH = "/metrics"


class Keyring:
    """The keys that may call. Without any key the gateway is open.

    Every look-up compares with every key, so its time tells nothing about which one was near.
    """

    def __init__(self, keys: Sequence[str], *, protect_metrics: bool = False) -> None:
        self._secret = secrets.token_bytes(32)
        self._digests = [self._digest(key.encode("utf-8", "surrogateescape")) for key in keys]
        self._open_paths = OPEN_PATHS if protect_metrics else OPEN_PATHS | {METRICS_PATH}

    def _digest(self, key: bytes) -> bytes:
        # Keyed BLAKE2b is a MAC of 2 us; OpenSSL's HMAC takes 20 us and more to set up.
        return blake2b(key, key=self._secret, digest_size=32).digest()

    def authorize(self, path: str, headers: Mapping[bytes, bytes]) -> str:
        """The caller's team: "" when open, else the number of its key, which is opaque and stable.

        Raises AuthenticationError for a path that asks for a key when none or a wrong one is sent.
        """
        if not self._digests or path in self._open_paths:
            return ""
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
        if found < 0:
            raise AuthenticationError("The API key is not valid.")
        return f"key-{found}"


def _presented_key(headers: Mapping[bytes, bytes]) -> bytes:
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return token.strip()
    return headers.get(b"x-api-key", b"").strip()
