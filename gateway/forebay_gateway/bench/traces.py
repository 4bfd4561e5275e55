"""Public request traces, gzipped or plain, into rows. Knows no prompts and no load.

Two formats, told apart by the first byte:
    Azure LLM inference (CSV): TIMESTAMP,ContextTokens,GeneratedTokens
    Mooncake (JSON lines): timestamp (ms), input_length, output_length, hash_ids of blocks of 512
        tokens; an equal id is an equal block with equal blocks before it
"""

import csv
import gzip
import itertools
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TextIO

import msgspec

MOONCAKE_BLOCK = 512
GZIP_MAGIC = b"\x1f\x8b"


class TraceRow(msgspec.Struct, frozen=True):
    """One recorded request; `at_s` is the time since the trace's first, lengths are in tokens."""

    at_s: float
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()
    block_size: int = MOONCAKE_BLOCK


class _MooncakeLine(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, limit: int) -> list[TraceRow]:
    """The first `limit` rows by arrival. Raises ValueError that names the file and line."""
    with _open(path) as lines:
        first = lines.readline()
        read = _mooncake if first.lstrip().startswith("{") else _azure
        rows = _checked(path, read(itertools.chain([first], lines)), limit)
    return sorted(rows, key=lambda row: row.at_s)


def _open(path: Path) -> TextIO:
    with path.open("rb") as raw:
        zipped = raw.read(2) == GZIP_MAGIC
    return gzip.open(path, "rt", encoding="utf-8") if zipped else path.open(encoding="utf-8")


def _checked(path: Path, rows: Iterator[TraceRow], limit: int) -> list[TraceRow]:
    found: list[TraceRow] = []
    try:
        found.extend(itertools.islice(rows, limit))
    except (ValueError, KeyError, TypeError) as exc:
        raise ValueError(f"{path}: row {len(found) + 1} is no trace row ({exc})") from None
    if not found:
        raise ValueError(f"{path}: no rows")
    return found


def _azure(lines: Iterable[str]) -> Iterator[TraceRow]:
    start: datetime | None = None
    for record in csv.DictReader(lines):
        at = datetime.fromisoformat(record["TIMESTAMP"])
        start = start or at
        yield TraceRow(
            at_s=(at - start).total_seconds(),
            input_len=int(record["ContextTokens"]),
            output_len=int(record["GeneratedTokens"]),
        )


def _mooncake(lines: Iterable[str]) -> Iterator[TraceRow]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    start: float | None = None
    for line in filter(str.strip, lines):
        row = decoder.decode(line)
        start = row.timestamp if start is None else start
        at_s = (row.timestamp - start) / 1e3
        yield TraceRow(at_s, row.input_length, row.output_length, row.hash_ids)
