"""Flags and environment -> settings, and settings -> environment.

A field `max_num_seqs` is the flag `--max-num-seqs` (also `--max_num_seqs`) and the variable
FOREBAY_MAX_NUM_SEQS; the flag wins. Kinds: int (also 8k, 2M as in vLLM), float, str, Secret,
Literal, bool (`--x` and `--no-x`), tuple (a flag that may be repeated; in a variable parted by
commas, or a JSON list). A secret may also stand in a file, which FOREBAY_THE_NAME_FILE names, as
containers are given theirs. It knows no command and reads no other file.
"""

import argparse
import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NoReturn,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta

from forebay_shared.settings import Secret, StartError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

S = TypeVar("S", bound="DataclassInstance")

PREFIX = "FOREBAY_"
SYNONYMS = {"half": "float16", "float": "float32", "fp8_e4m3": "fp8"}
"""Values that vLLM spells otherwise."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]").search
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True, slots=True)
class Option:
    """One field of a settings class, as a flag."""

    name: str
    kind: type
    choices: tuple[str, ...]
    repeatable: bool
    meta: Meta
    default: object

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    def convert(self, text: str, source: str) -> object:
        """The value that `text` means. Raises StartError, which names `source`, for a bad one."""
        value = _convert(self, text)
        if value is None or not _within(self.meta, value) or (self.names and _CONTROL(text)):
            shown = "this value" if self.kind is Secret else repr(text)
            raise StartError(f"{source}: {shown} is not {self.expected}")
        return value

    @property
    def takes_many(self) -> bool:
        """Several values may follow one flag, as vLLM has it."""
        return bool((self.meta.extra or {}).get("many"))

    @property
    def names(self) -> bool:
        """It gives a name that people see in lists, logs and errors, each on one line."""
        return bool((self.meta.extra or {}).get("names"))

    @property
    def expected(self) -> str:
        """What a right value is, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.kind is bool:
            return "true or false"
        if self.kind not in {int, float}:
            return "a text without control characters" if self.names else "a text"
        noun = "an integer" if self.kind is int else "a number"
        return f"{noun} {_bounds(self.meta)}".rstrip()


def options(settings: "type[DataclassInstance]") -> list[Option]:
    """The fields of a settings class, in its order."""
    kinds = get_type_hints(settings, include_extras=True)
    return [_option(field, kinds[field.name]) for field in fields(settings)]


def parse(
    settings: type[S],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    parser: argparse.ArgumentParser,
    positional: str = "",
) -> S:
    """The settings that `arguments` and `environment` ask for.

    `parser` has the flags already (`add_flags`). Raises StartError in one line.
    """
    given, unknown = parser.parse_known_args([_dashes(word) for word in arguments])
    found = options(settings)
    if unknown:
        raise StartError(_unknown(unknown[0], found, positional))
    values: dict[str, object] = {}
    for option in found:
        words: list[str] | None = getattr(given, option.name, None)
        source = option.flag
        if option.name == positional and given.positional is not None:
            words, source = [given.positional], positional.upper()
        if words is None and option.variable in environment:
            words, source = _from_variable(option, environment), option.variable
        file = option.variable + "_FILE"
        if words is None and option.kind is Secret and file in environment:
            words, source = _from_file(option, environment[file], file), file
        if words is not None:
            items = [option.convert(word, source) for word in words]
            values[option.name] = tuple(items) if option.repeatable else items[-1]
    return settings(**values)


def add_flags(
    parser: argparse.ArgumentParser,
    settings: "type[DataclassInstance]",
    groups: Mapping[str, Iterable[str]],
    *,
    positional: str = "",
    hidden: Iterable[str] = (),
) -> None:
    """Adds every field to `parser`, under the headings of `groups`; what is in none comes last."""
    homes = {title: parser.add_argument_group(title) for title in groups}
    titles = {name: title for title, names in groups.items() for name in names}
    rest = parser.add_argument_group("more")
    for option in options(settings):
        home = homes.get(titles.get(option.name, ""), rest)
        text = argparse.SUPPRESS if option.name in hidden else _help(option)
        if option.name == positional:
            name = positional.upper()
            parser.add_argument("positional", nargs="?", metavar=name, help=_help(option))
            text = argparse.SUPPRESS
        if option.kind is bool:
            negative = "--no-" + option.flag.removeprefix("--")
            flags: dict[str, Any] = {"dest": option.name, "action": "append_const"}
            home.add_argument(option.flag, const="true", help=text, **flags)
            home.add_argument(negative, const="false", help=argparse.SUPPRESS, **flags)
        else:
            shown = "{" + ",".join(option.choices) + "}" if option.choices else _metavar(option)
            home.add_argument(
                option.flag,
                dest=option.name,
                action="extend" if option.takes_many else "append",
                nargs="+" if option.takes_many else None,
                metavar=shown,
                help=text,
            )


def to_environment(settings: "DataclassInstance") -> dict[str, str]:
    """The variables that give `settings` again: how a supervisor hands them, secrets too, on."""
    variables: dict[str, str] = {}
    for option in options(type(settings)):
        value: Any = getattr(settings, option.name)
        if option.repeatable:
            variables[option.variable] = msgspec.json.encode([str(item) for item in value]).decode()
        elif option.kind is bool:
            variables[option.variable] = "true" if value else "false"
        else:
            variables[option.variable] = str(value)
    return variables


class Parser(argparse.ArgumentParser):
    """Raises StartError where argparse prints its usage and exits."""

    def error(self, message: str) -> NoReturn:
        raise StartError(message.removeprefix("argument ").replace(": expected one", " needs one"))


def _option(field: Field[Any], kind: Any) -> Option:
    meta = Meta()
    if get_origin(kind) is Annotated:
        kind, meta = get_args(kind)[:2]
    repeatable = get_origin(kind) is tuple
    if repeatable:
        kind = get_args(kind)[0]
    choices: tuple[str, ...] = get_args(kind) if get_origin(kind) is Literal else ()
    return Option(field.name, str if choices else kind, choices, repeatable, meta, field.default)


def _convert(option: Option, text: str) -> object:
    """None when `text` means nothing of the option's kind."""
    if option.choices:
        text = SYNONYMS.get(text, text)
        return text if text in option.choices else None
    if option.kind is bool:
        words = {"true": True, "1": True, "yes": True, "on": True}
        return (words | dict.fromkeys(("false", "0", "no", "off"), False)).get(text.lower())
    if option.kind is int:
        match = re.fullmatch(r"(-?\d+)([kmgKMG]?)", text.strip(), re.ASCII)
        return int(match[1]) * _UNITS.get(match[2], 1) if match else None
    if option.kind is float:
        try:
            number = float(text)
        except ValueError:
            return None
        return number if math.isfinite(number) else None
    return option.kind(text)


def _within(meta: Meta, value: object) -> bool:
    if not isinstance(value, int | float):
        return True
    return (
        (meta.ge is None or value >= meta.ge)
        and (meta.gt is None or value > meta.gt)
        and (meta.le is None or value <= meta.le)
        and (meta.lt is None or value < meta.lt)
    )


def _bounds(meta: Meta) -> str:
    if meta.ge is not None and meta.le is not None:
        return f"from {meta.ge} to {meta.le}"
    low = f"at least {meta.ge}" if meta.ge is not None else ""
    low = f"above {meta.gt}" if meta.gt is not None else low
    high = f"at most {meta.le}" if meta.le is not None else ""
    high = f"below {meta.lt}" if meta.lt is not None else high
    return " and ".join(part for part in (low, high) if part)


def _from_variable(option: Option, environment: Mapping[str, str]) -> list[str]:
    text = environment[option.variable]
    if not option.repeatable:
        return [text]
    if not text.startswith("["):
        return [word.strip() for word in text.split(",") if word.strip()]
    try:
        return msgspec.json.decode(text, type=list[str])
    except msgspec.DecodeError:
        raise StartError(f"{option.variable}: not a JSON list of texts") from None


def _from_file(option: Option, path: str, source: str) -> list[str]:
    """The secret in a file, or of a repeatable one those on its lines."""
    try:
        text = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise StartError(f"{source}: cannot read {path}: {reason}") from None
    return text.split() if option.repeatable else [text]


def _dashes(word: str) -> str:
    """`--max_num_seqs=4` -> `--max-num-seqs=4`, as vLLM reads it too."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _unknown(word: str, found: Sequence[Option], positional: str) -> str:
    if not word.startswith("-"):
        only = f"one {positional.upper()} at most" if positional else "flags only"
        return f"unexpected argument {word!r}: {only}"
    flag = word.partition("=")[0]
    close = difflib.get_close_matches(flag, [option.flag for option in found], n=1)
    return f"unknown flag {flag}: " + (f"did you mean {close[0]}?" if close else "see --help")


def _help(option: Option) -> str:
    text = option.meta.description or ""
    if option.kind is bool:
        default = "on" if option.default else "off"
        return f"{text} (default: {default}; --no-{option.name.replace('_', '-')} turns it off)"
    if option.kind is Secret or option.default in ("", ()):
        return text
    return f"{text} (default: {option.default})"


def _metavar(option: Option) -> str:
    kinds = {int: "N", float: "X", Secret: "SECRET"}
    return kinds.get(option.kind, "TEXT")
