"""Makes, rotates and ends keys: what becomes of a record, and the one time that a secret is seen.

It knows no Redis: what it returns is for `store` to write.
"""

from msgspec.structs import replace

from forebay_gateway.teams.records import Key, StoredSecret
from forebay_gateway.teams.secrets import digest, new_id, new_secret, token


def make(key: Key, pepper: bytes, now: float) -> tuple[Key, str]:
    """A new key like `key`, and what its owner sends, which cannot be shown again."""
    key_id, secret = new_id(), new_secret()
    stored = StoredSecret(digest(pepper, key_id, secret.encode()))
    return replace(key, id=key_id, secrets=(stored,), created=now), token(key_id, secret)


def rotate(key: Key, pepper: bytes, now: float, grace_s: float) -> tuple[Key, str]:
    """The key with a new secret; the one before lives for `grace_s` more, older ones end now."""
    secret = new_secret()
    stored = StoredSecret(digest(pepper, key.id, secret.encode()))
    last = [replace(each, expires=now + grace_s) for each in key.secrets[:1] if grace_s > 0]
    return replace(key, secrets=(stored, *last)), token(key.id, secret)
