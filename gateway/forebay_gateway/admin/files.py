"""Files of the command line: teams.yaml in and out, and rows as a table, CSV or JSON."""

import csv
import datetime
import io
import sys
from collections.abc import Collection, Hashable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import yaml
from forebay_shared.settings import StartError

Tree = dict[str, Any]
MAX_BYTES = 8_000_000
MAX_VALUES = 2_000_000
"""With what anchors stand for, again and again: a few lines of them may mean millions."""


class _TwiceError(yaml.YAMLError):
    """A mapping has a name twice."""

    def __init__(self, name: object, mark: object) -> None:
        super().__init__(f"{name} is there twice")
        self.problem_mark = mark


class _Loader(yaml.SafeLoader):
    """YAML in which no name of a mapping silently replaces an earlier one: a limit, say."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise _TwiceError(key.value, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def load(name: str) -> Tree:
    """The document in a file, or in standard input for "-". Raises StartError."""
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"{name}: cannot be read: {getattr(error, 'strerror', error)}") from None
    if len(text) > MAX_BYTES:
        raise StartError(f"{name}: larger than {MAX_BYTES} bytes")
    try:
        tree = yaml.load(text, _Loader)  # noqa: S506 - it is a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        what = str(error) if isinstance(error, _TwiceError) else "not YAML"
        raise StartError(f"{name}: {what}{where}") from None
    except RecursionError:
        raise StartError(f"{name}: is nested too deeply") from None
    except (ValueError, OverflowError) as error:  # a day that no month has
        raise StartError(f"{name}: a value cannot be read: {error}") from None
    if not isinstance(tree, dict):
        raise StartError(f"{name}: must be a mapping of sections")
    if _is_larger(cast(Tree, tree), MAX_VALUES):
        raise StartError(f"{name}: holds more than {MAX_VALUES} values; do its anchors repeat it?")
    return cast(Tree, _without_dates(cast(Tree, tree)))


def dump(tree: Tree) -> str:
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def show(rows: Sequence[Tree], form: str) -> str:
    """Rows with the same fields, as a table for people, CSV or JSON."""
    if form == "json":
        return msgspec.json.format(msgspec.json.encode(rows)).decode() + "\n"
    fields = list(dict.fromkeys(name for row in rows for name in row))
    if form == "csv":
        out = io.StringIO()
        writer = csv.DictWriter(out, fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return out.getvalue()
    lines = [fields, *[[_cell(row.get(name, "")) for name in fields] for row in rows]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    numeric = [all(_is_number(row.get(name)) for row in rows) for name in fields]
    texts = [
        "  ".join(
            word.rjust(width) if right else word.ljust(width)
            for word, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    ]
    return "\n".join(texts) + "\n" if rows else "nothing\n"


def _cell(value: object) -> str:
    if isinstance(value, dict | list):
        return msgspec.json.encode(value).decode()
    # Names are whatever their teams' admins called them: nothing in them steers a terminal.
    return "".join(each if each.isprintable() else "?" for each in str(value))


def _is_number(value: object) -> bool:
    return isinstance(value, int) or (
        isinstance(value, str) and value.replace(".", "", 1).isdigit()
    )


def _is_larger(tree: object, most: int) -> bool:
    """Whether it holds more values than that; one that holds itself does."""
    left, found = [tree], 1
    while left:
        value = left.pop()
        inside: Collection[object] = ()
        if isinstance(value, dict):
            inside = cast("dict[object, object]", value).values()
        elif isinstance(value, list):
            inside = cast("list[object]", value)
        found += len(inside)
        if found > most:
            return True
        left += inside
    return False


def _without_dates(tree: object) -> object:
    """YAML reads 2026-12-31 as a date; the records hold texts and seconds."""
    if isinstance(tree, dict):
        items = cast("dict[object, object]", tree).items()
        return {
            str(name): _expiry(value) if name == "expires" else _without_dates(value)
            for name, value in items
        }
    if isinstance(tree, list):
        return [_without_dates(value) for value in cast("list[object]", tree)]
    return tree.isoformat() if isinstance(tree, datetime.date) else tree


def _expiry(value: object) -> object:
    """Midnight in UTC of a date, as seconds."""
    if isinstance(value, datetime.datetime):
        zoned = value if value.tzinfo else value.replace(tzinfo=datetime.UTC)
        return zoned.timestamp()
    if isinstance(value, datetime.date):
        return datetime.datetime(
            value.year, value.month, value.day, tzinfo=datetime.UTC
        ).timestamp()
    return value
