"""From a body's bytes to a frozen struct, with errors that name the field and what would be right.

A byte order mark in front is left out, as every Windows shell may write one; of a key that comes
twice the last one counts, as for most parsers. Where an integer is wanted 8.0 is one, as for JSON
Schema: languages with one kind of number write it so. It knows no schema.
"""

import re
from collections.abc import Iterator
from functools import cache
from typing import TypeVar

import msgspec
from forebay_shared.errors import InvalidRequestError
from msgspec import inspect

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
        return _decode(decoder, body)
    except msgspec.ValidationError as error:
        raise translate(str(error), decoder.type) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"The body is not valid JSON in UTF-8{_place(error)}.") from None
    except RecursionError:
        raise InvalidRequestError("The body is nested too deep.") from None


def _decode(decoder: msgspec.json.Decoder[T], body: bytes | bytearray) -> T:
    """As msgspec does, but 8.0 is an integer: a body that is wrong without it is read again."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if not _NO_INTEGER.match(str(error)):
            raise
    return decoder.decode(_in_whole_numbers(body))


def _place(error: msgspec.DecodeError | UnicodeDecodeError) -> str:
    """Where a body is wrong, as far as the decoder tells; nothing of what stands there."""
    if isinstance(error, UnicodeDecodeError):
        return f": see byte {error.start}"
    found = _BYTE.search(str(error))
    return f": see byte {found.group(1)}" if found else ""


_BYTE = re.compile(r"\(byte (\d+)\)$")
_NO_INTEGER = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float`")
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?'
_FRACTION_OF_NOTHING = re.compile(_STRING + rb"|(?<!\d)(-?\d++)\.0++(?![\d.eE])")
"""Nothing is looked at twice, whatever the body is: a string without an end is one to the end of
the body, and a number is begun at its first digit only."""


def _in_whole_numbers(body: bytes | bytearray) -> bytes:
    """The same JSON with 8 for 8.0, and all bytes where they were."""
    return _FRACTION_OF_NOTHING.sub(lambda found: (found[1] or found[0]).ljust(len(found[0])), body)


# msgspec's messages hold our own names and types only, but for a few that quote the value: of those
# only the first words are read, and the path, which is the last thing in them.
_AT = " - at `"
_PATH = re.compile(r"(key in )?\$\.?(.*)`")
_BOUND = re.compile(r"^Expected `(\w+)` (>=|<=|>|<) (-?[\d.e+-]+)")
_LENGTH = re.compile(r"^Expected `array` of length >= (\d+)")
_SHORTER = re.compile(r"^Expected `str` of length <= (\d+)")
_MATCHING = re.compile(r"^Expected `str` matching regex '\^?(.*?)\$?'")
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
_OF_A_MAP = "[...]"
_STEP = re.compile(r"\w+|\[\d+\]|\[\.\.\.\]")


def translate(message: str, kind: object = None) -> InvalidRequestError:
    """A decoder's message as an error that names the field and what would be right; `kind` is what
    was decoded."""
    head, at, place = message.rpartition(_AT)
    message = head if at else message
    found = _PATH.fullmatch(place)
    path = found.group(2) if found else ""
    param = path.replace(_OF_A_MAP, "")
    if missing := _MISSING.match(message):
        param = f"{param}.{missing.group(1)}" if param else missing.group(1)
        return InvalidRequestError(f"{param} is required.", param=param)
    if not found or not param:
        return InvalidRequestError("The body must be a JSON object.")
    subject = param
    if path.endswith(_OF_A_MAP):
        subject = f"Each {'key' if found.group(1) else 'value'} of {param}"
    return InvalidRequestError(f"{subject} {_expectation(message, path, kind)}.", param=param)


def _expectation(message: str, path: str, kind: object) -> str:
    if bound := _BOUND.match(message):
        known = _KINDS.get(bound.group(1), "a value")
        return f"must be {known} {_RELATION[bound.group(2)]} {bound.group(3)}"
    if _LENGTH.match(message):
        return "must not be empty"
    if shorter := _SHORTER.match(message):
        return f"must have at most {shorter.group(1)} characters"
    if matching := _MATCHING.match(message):
        return f"must be a string of the form {matching.group(1)}"
    if message.startswith("Invalid enum value") and (allowed := _allowed(kind, path)):
        return f"must be one of {', '.join(allowed)}"
    if message.startswith("Number out of range"):
        return "is a number that is too large"
    if type_ := _TYPE.match(message):
        names = [_KINDS[name] for name in type_.group(1).split(" | ") if name in _KINDS]
        return f"must be {' or '.join(names)}"
    return "is out of range or of the wrong form"


_type_info = cache(inspect.type_info)


def _allowed(kind: object, path: str) -> list[str]:
    """The values that a field of a struct may have, when it is one of a few."""
    at = [] if kind is None else [_type_info(kind)]
    for step in _STEP.findall(path):
        at = [inner for each in at for inner in _inside(each, step)]
    literals = [each for outer in at for each in _members(outer)]
    return [
        str(value)
        for each in literals
        if isinstance(each, inspect.LiteralType)
        for value in each.values
    ]


def _inside(type_: inspect.Type, step: str) -> Iterator[inspect.Type]:
    for member in _members(type_):
        if isinstance(member, inspect.StructType):
            yield from (field.type for field in member.fields if field.encode_name == step)
        elif isinstance(member, inspect.ListType) and step.startswith("["):
            yield member.item_type
        elif isinstance(member, inspect.DictType) and step == _OF_A_MAP:
            yield member.value_type


def _members(type_: inspect.Type) -> tuple[inspect.Type, ...]:
    if isinstance(type_, inspect.Metadata):
        return _members(type_.type)
    return type_.types if isinstance(type_, inspect.UnionType) else (type_,)
