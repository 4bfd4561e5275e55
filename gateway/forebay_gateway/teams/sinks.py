"""Where usage records are exported to: files of a directory, one per day, or a table.

A sink is written to in order, in batches, and may get a batch again: it keeps each record once. It
blocks, so it belongs on a thread. It knows no Redis.
"""

import csv
import fcntl
import io
import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import msgspec
from forebay_shared.books import UsageRecord
from forebay_shared.settings import StartError

from forebay_gateway.teams.books import money

Entry = tuple[str, UsageRecord]
"""A record and its place in the stream, `milliseconds-number`."""
Form = Literal["jsonl", "csv"]

COLUMNS = ("entry", *UsageRecord.__struct_fields__)
_LONGEST_LINE = 65_536


class SinkError(Exception):
    """A sink has no place for records. Its words are for the log: no secret, and what to do."""


class Sink(Protocol):
    """Something that keeps records. Its errors are its own; whoever writes tries again."""

    def write(self, entries: Sequence[Entry]) -> None:
        """Keeps those that it does not have yet; when it returns they are safe."""
        ...


def open_sink(target: str, form: Form) -> Sink:
    """The sink of a directory's path or a database's URL. Raises StartError for what is neither."""
    if "://" in target:
        from forebay_gateway.teams.sql_sink import open_database

        return open_database(target)
    return FileSink(Path(target), form)


class FileSink:
    """`usage-2026-12-31.jsonl` in a directory: a line per record, in the order of the stream.

    A day is that of the record's entry, by the clock of Redis, in UTC, so its file only grows. The
    last line says what is there already. A lock on the file keeps two processes from writing at
    once; a line that a crash has cut off is written again.
    """

    def __init__(self, directory: Path, form: Form) -> None:
        self._directory = directory
        self._form = form
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = error.strerror or "it is no directory"
            raise StartError(f"--usage-export: cannot write to {directory}: {reason}") from None

    def write(self, entries: Sequence[Entry]) -> None:
        for day, group in groupby(entries, key=_day):
            with self._locked(day) as file:
                last = self._mend(file)
                new = [each for each in group if last is None or _place(each[0]) > _place(last)]
                file.write(self._lines(new, self._columns(file)))
                file.flush()
                os.fsync(file.fileno())

    def _locked(self, day: str) -> BinaryIO:
        path = self._directory / f"usage-{day}.{self._form}"
        file = path.open("a+b")
        fcntl.flock(file, fcntl.LOCK_EX)
        return file

    def _mend(self, file: BinaryIO) -> str | None:
        """Cuts off a torn last line; the entry of the last whole one, None without any."""
        end = file.seek(0, os.SEEK_END)
        start = file.seek(max(0, end - _LONGEST_LINE))
        whole, newline, _ = file.read().rpartition(b"\n")
        file.truncate(start + len(whole) + len(newline))
        file.seek(0, os.SEEK_END)
        line = whole.rpartition(b"\n")[2].decode()
        if self._form == "csv":
            entry = line.partition(",")[0]
            return entry if entry not in ("", COLUMNS[0]) else None
        return str(json.loads(line)["entry"]) if line else None

    def _columns(self, file: BinaryIO) -> Sequence[str]:
        """Of a CSV file that has a header; an older forebay's stays as it is for its day."""
        if self._form == "jsonl" or file.tell() == 0:
            return ()
        file.seek(0)
        header = file.readline(_LONGEST_LINE).decode().rstrip("\n").split(",")
        file.seek(0, os.SEEK_END)
        return header

    def _lines(self, entries: Sequence[Entry], columns: Sequence[str]) -> bytes:
        """`columns` are those of the file; none where it is new."""
        rows = [row_of(entry, record) for entry, record in entries]
        if self._form == "jsonl":
            return b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
        out = io.StringIO()
        writer = csv.DictWriter(out, columns or COLUMNS, extrasaction="ignore", lineterminator="\n")
        if rows and not columns:
            writer.writeheader()
        writer.writerows({name: _one_line(value) for name, value in row.items()} for row in rows)
        return out.getvalue().encode()


def row_of(entry: str, record: UsageRecord) -> dict[str, Any]:
    """A record's fields by name, all of them; `cost` as an exact decimal."""
    fields = msgspec.structs.asdict(record)
    return {"entry": entry, **fields, "cost": money(record.cost)}


def _day(entry: Entry) -> str:
    return datetime.fromtimestamp(_place(entry[0])[0] / 1000, UTC).date().isoformat()


def _place(entry: str) -> tuple[int, int]:
    """What an entry's id is ordered by."""
    ms, _, number = entry.partition("-")
    return int(ms), int(number)


def _one_line(value: object) -> object:
    return " ".join(value.split()) if isinstance(value, str) else value
