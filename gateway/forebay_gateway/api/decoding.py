"""From a body's bytes to a frozen struct, with errors that name the field and what would be right.

A byte order mark in front is left out, as every Windows shell may write one; of a key that comes
twice the last one counts, as for most parsers. It knows no schema.
"""

import re
from typing import TypeVar

import msgspec
from forebay_shared.errors import InvalidRequestError

T = TypeVar("T")

_NULL = msgspec.Raw(b"null")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def null() -> msgspec.Raw:
    """What an absent field of raw JSON holds: a factory, since a schema cannot tell of such a
    default."""
    return _NULL


def decode(decoder: msgspec.json.Decoder[T], body: bytes | bytearray) -> T:
    """Raises InvalidRequestError that names the first bad field."""
    if body.startswith(_BYTE_ORDER_MARK):
        body = body[len(_BYTE_ORDER_MARK) :]
    try:
        if not body.isascii():
            body.decode()  # the decoder passes over what it does not know, whatever bytes it holds
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise translate(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidRequestError("The body is not valid JSON in UTF-8.") from None
    except RecursionError:
        raise InvalidRequestError("The body is nested too deep.") from None


# msgspec's messages hold our own names and types only, but for a few that quote the value; those
# fall through to the plain text.
_PATH = re.compile(r" - at `(?:key in )?\$\.?(.*?)`$")
_BOUND = re.compile(r"^Expected `(\w+)` (>=|<=|>|<) (-?[\d.e+]+)")
_LENGTH = re.compile(r"^Expected `array` of length >= (\d+)")
_TYPE = re.compile(r"^Expected `([\w| ]+)`, got")
_MISSING = re.compile(r"^Object missing required field `(\w+)`")
_RELATION = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}
_KINDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}


def translate(message: str) -> InvalidRequestError:
    """A decoder's message as an error that names the field and what would be right."""
    found = _PATH.search(message)
    param = found.group(1).replace("[...]", "") if found else ""
    if missing := _MISSING.match(message):
        param = f"{param}.{missing.group(1)}" if param else missing.group(1)
        return InvalidRequestError(f"{param} is required.", param=param)
    if not param:
        return InvalidRequestError("The body must be a JSON object.")
    return InvalidRequestError(f"{param} {_expectation(message)}.", param=param)


def _expectation(message: str) -> str:
    if bound := _BOUND.match(message):
        kind = _KINDS.get(bound.group(1), "a value")
        return f"must be {kind} {_RELATION[bound.group(2)]} {bound.group(3)}"
    if _LENGTH.match(message):
        return "must not be empty"
    if type_ := _TYPE.match(message):
        names = [_KINDS[name] for name in type_.group(1).split(" | ") if name in _KINDS]
        return f"must be {' or '.join(names)}"
    return "is out of range or of the wrong form"
