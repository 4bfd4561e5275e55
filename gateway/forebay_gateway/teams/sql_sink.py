"""Usage records in a table of a SQL database, for whoever keeps accounts there.

SQLAlchemy's core does the speaking, so any database that it knows will do; it is an extra
(`forebay-gateway[sql]`), as is the database's own driver, and imported when it is asked for. It
knows no Redis.
"""

import importlib
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from forebay_shared.books import UsageRecord
from forebay_shared.settings import StartError

from forebay_gateway.teams.sinks import Entry

TABLE = "forebay_usage"
_NAMES = ("organisation", "team", "user", "key", "model", "alias")
_COUNTS = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
_TIMES = ("queued_ms", "prefill_ms", "decode_ms")

Place = tuple[str, int]
"""A record's id and its number of attempts."""


def open_database(url: str) -> "SqlSink":
    """The table in the database at `url`, made when it is first written to. Raises StartError."""
    try:
        sql: Any = importlib.import_module("sqlalchemy")
    except ImportError:
        raise StartError(
            "--usage-export: a database needs SQLAlchemy: pip install 'forebay-gateway[sql]'"
        ) from None
    try:
        return SqlSink(sql, sql.create_engine(url, pool_pre_ping=True))
    except sql.exc.ArgumentError:  # it quotes the URL, which may hold a password
        raise StartError(
            "--usage-export: no such database: sqlite:////path or postgresql+psycopg://… is needed"
        ) from None
    except ImportError as error:
        raise StartError(f"--usage-export: the driver {error.name} is not installed") from None


class SqlSink:
    """The table `forebay_usage`: a row per record, by its id and its number of attempts.

    What is there is left as it is.
    """

    def __init__(self, sql: Any, engine: Any) -> None:
        self._sql = sql
        self._engine = engine
        self._table = _table(sql)
        self._made = False

    def write(self, entries: Sequence[Entry]) -> None:
        if not self._made:
            self._table.metadata.create_all(self._engine)
            self._made = True
        rows = {(record.id, record.attempts): _row(entry, record) for entry, record in entries}
        try:
            self._insert(rows)
        except self._sql.exc.IntegrityError:  # another gateway was quicker
            self._insert(rows)

    def _insert(self, rows: dict[Place, dict[str, Any]]) -> None:
        columns = self._table.c
        ids = [id_ for id_, _ in rows]
        with self._engine.begin() as connection:
            known = self._sql.select(columns.id, columns.attempt).where(columns.id.in_(ids))
            there = {(id_, attempt) for id_, attempt in connection.execute(known)}
            new = [row for place, row in rows.items() if place not in there]
            if new:
                connection.execute(self._table.insert(), new)


def _table(sql: Any) -> Any:
    name = sql.String(255)
    return sql.Table(
        TABLE,
        sql.MetaData(),
        sql.Column("id", name, primary_key=True),
        sql.Column("attempt", sql.Integer, primary_key=True, autoincrement=False),
        sql.Column("entry", sql.String(48), nullable=False),
        sql.Column("at", sql.DateTime, nullable=False, index=True),
        *(sql.Column(each, name, nullable=False) for each in _NAMES),
        sql.Column("outcome", sql.String(16), nullable=False),
        *(sql.Column(each, sql.BigInteger, nullable=False) for each in _COUNTS),
        *(sql.Column(each, sql.Float, nullable=False) for each in _TIMES),
        sql.Column("cost_billionths", sql.BigInteger, nullable=False),
    )


def _row(entry: str, record: UsageRecord) -> dict[str, Any]:
    """`at` is in UTC; SQLite has no exact decimals, so `cost` is a whole number of billionths."""
    fields = msgspec.structs.asdict(record)
    at = datetime.fromtimestamp(record.at, UTC).replace(tzinfo=None)
    attempt, cost = fields.pop("attempts"), fields.pop("cost")
    return {**fields, "attempt": attempt, "entry": entry, "at": at, "cost_billionths": cost}
