"""Keys as clients send them: `sk-fb-<public id>-<secret>`, made, taken apart and compared.

The secret is kept as a keyed digest only; the digest's key is the installation's pepper, so what is
in Redis alone is of no use to guess with. It knows no record and no Redis.
"""

import hmac
import secrets
from hashlib import blake2b
from typing import NamedTuple

PREFIX = b"sk-fb-"
_ID_BYTES, _SECRET_BYTES = 6, 24
_MAX_BYTES = 128


class Token(NamedTuple):
    """The two parts of a presented key."""

    id: str
    secret: bytes


def new_id() -> str:
    """A public id: 48 random bits in hex."""
    return secrets.token_hex(_ID_BYTES)


def new_secret() -> str:
    """192 random bits in hex: no character in it breaks a double click."""
    return secrets.token_hex(_SECRET_BYTES)


def token(key_id: str, secret: str) -> str:
    """What a client sends."""
    return f"{PREFIX.decode()}{key_id}-{secret}"


def split(presented: bytes) -> Token | None:
    """The parts of a key of ours; None for anything else."""
    if not presented.startswith(PREFIX) or len(presented) > _MAX_BYTES:
        return None
    key_id, dash, secret = presented[len(PREFIX) :].partition(b"-")
    if not (dash and secret and key_id.isascii()):
        return None
    return Token(key_id.decode("ascii"), secret)


def digest(pepper: bytes, key_id: str, secret: bytes) -> str:
    """The keyed digest of a secret. The id goes in, so a digest fits no other key's record.

    Keyed BLAKE2b is a MAC of 2 us; a secret of 192 random bits needs no slow hash.
    """
    message = key_id.encode() + b"\0" + secret
    return blake2b(message, key=pepper[:64], digest_size=32, person=b"forebay-key").hexdigest()


def fingerprint(pepper: bytes) -> str:
    """What two gateways compare to know whether they have one pepper. Whoever guesses the pepper by
    it still lacks the secrets, which are random."""
    return blake2b(key=pepper[:64], digest_size=16, person=b"forebay-pepper").hexdigest()


def same(one: str, other: str) -> bool:
    """Compares digests in constant time."""
    return hmac.compare_digest(one, other)
