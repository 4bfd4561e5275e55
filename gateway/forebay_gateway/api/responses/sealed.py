"""`encrypted_content` of a reasoning item: the thinking, for a client that sends it back.

Clients that store nothing here, as coding agents do, keep this field and leave out the text. It is
packed, not encrypted: what is in it the client has had as text. It knows no item.
"""

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode

_MARK = "fb1."
"""What was packed elsewhere does not begin so, and cannot be read."""


def seal(text: str) -> str:
    return _MARK + urlsafe_b64encode(text.encode()).decode()


def unseal(sealed: str) -> str | None:
    """The text; None for what was not packed here."""
    if not sealed.startswith(_MARK):
        return None
    try:
        return urlsafe_b64decode(sealed.removeprefix(_MARK)).decode()
    except (binascii.Error, ValueError):
        return None
