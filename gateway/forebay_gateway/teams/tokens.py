"""Public keys and what is signed with them: a JWKS read, a token's signature and times checked.

Pure. It is imported when the first issuer is there: the cryptography behind it takes 0.3 s to load.
"""

from collections.abc import Mapping
from typing import Any, cast

import jwt
import msgspec
from forebay_shared.errors import AuthenticationError

from forebay_gateway.teams.records import Algorithm, Issuer

MAX_KEYS = 64
Claims = Mapping[str, object]

_FITTING: Mapping[tuple[str, str], tuple[Algorithm, ...]] = {
    ("RSA", ""): ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("EC", "P-521"): ("ES512",),
    ("OKP", "Ed25519"): ("EdDSA",),
    ("OKP", "Ed448"): ("EdDSA",),
}
_SAID: tuple[tuple[type[jwt.PyJWTError], str], ...] = (
    (jwt.ExpiredSignatureError, "The token has expired."),
    (jwt.ImmatureSignatureError, "The token is not valid yet."),
    (jwt.InvalidAudienceError, "The token is for somebody else: its audience is not this server."),
    (jwt.InvalidSignatureError, "The token's signature is not valid."),
    (jwt.MissingRequiredClaimError, "The token needs exp, iss and aud."),
)


class KeySet:
    """An issuer's public keys, each with the algorithms that it is for."""

    def __init__(self, keys: Mapping[tuple[str, str], jwt.PyJWK]) -> None:
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, kid: str, algorithm: str) -> jwt.PyJWK | None:
        """The key of that id; where a token names none, the only one for its algorithm."""
        if kid:
            return self._keys.get((kid, algorithm))
        fitting = [key for (_, each), key in self._keys.items() if each == algorithm]
        return fitting[0] if len(fitting) == 1 else None


def read_keys(document: bytes) -> KeySet:
    """The keys of a JWKS that check signatures. Others are left out: shared secrets, private keys,
    keys for encryption, RSA below 2048 bits, and what is of no known kind.

    Raises ValueError for what is no JWKS.
    """
    try:
        listed = msgspec.json.decode(document, type=_Document).keys
    except (msgspec.DecodeError, RecursionError):
        raise ValueError("not a JWKS") from None
    if len(listed) > MAX_KEYS:
        raise ValueError(f"more than {MAX_KEYS} keys")
    keys: dict[tuple[str, str], jwt.PyJWK] = {}
    for number, fields in enumerate(listed):
        kid = fields.get("kid", f"\0{number}")
        if not isinstance(kid, str):
            continue
        for algorithm in _algorithms(fields):
            try:
                key = jwt.PyJWK(fields, algorithm)
                prepared = key.Algorithm.prepare_key(key.key)
                weak = key.Algorithm.check_key_length(prepared)
            except (jwt.PyJWTError, ValueError, TypeError):
                continue
            if not weak:
                keys.setdefault((kid, algorithm), key)
    return KeySet(keys)


def verify(token: str, key: jwt.PyJWK, issuer: Issuer) -> Claims:
    """The claims of a token that is signed with the key, for us, and valid now.

    The algorithm is the key's own, whatever the token says. Raises AuthenticationError.
    """
    try:
        claims = jwt.decode(
            token,
            key,
            algorithms=[key.algorithm_name],
            audience=list(issuer.audiences),
            issuer=issuer.issuer,
            leeway=issuer.leeway_s,
            options={"require": ["exp", "iss", "aud"]},
        )
        float(claims["exp"])  # a whole number of any size is one to the library
        return cast(Claims, claims)
    except jwt.PyJWTError as error:
        said = (words for kind, words in _SAID if isinstance(error, kind))
        raise AuthenticationError(next(said, "The token is not valid.")) from None
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise AuthenticationError("The token is not valid.") from None


class _Document(msgspec.Struct):
    keys: list[dict[str, Any]]


def _algorithms(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """What a key may check; nothing when it is for something else."""
    if fields.get("use", "sig") != "sig" or "d" in fields:
        return ()
    if "verify" not in fields.get("key_ops", ("verify",)):
        return ()
    kty = str(fields.get("kty"))
    curve = "" if kty == "RSA" else str(fields.get("crv"))
    fitting = _FITTING.get((kty, curve), ())
    named = fields.get("alg")
    return tuple(each for each in fitting if named in (None, each))
