"""Usage records in a table of a SQL database, for whoever keeps accounts there.

SQLAlchemy's core does the speaking, so any database that it knows will do; it is an extra
(`forebay-gateway[sql]`), as is the database's own driver, and imported when it is asked for. It
knows no Redis.
"""

import importlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from forebay_shared.books import UsageRecord
from forebay_shared.settings import StartError

from forebay_gateway.teams.sinks import Entry, SinkError

TABLE = "forebay_usage"
_IDS = ("organisation", "team", "user", "key")
_NAMES = ("model", "alias")
"""Of served models, which may be paths: of any length."""
_ID_LENGTH = 255
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

    What is there is left as it is; columns that an older table lacks are added.
    """

    def __init__(self, sql: Any, engine: Any) -> None:
        self._sql = sql
        self._engine = engine
        self._table = _table(sql)
        self._room: dict[str, int] | None = None
        """The most characters of those columns that have a bound; None until it was looked."""

    def write(self, entries: Sequence[Entry]) -> None:
        """Raises SinkError for a table that has no place for a record."""
        if self._room is None:
            self._table.metadata.create_all(self._engine)
            self._room = self._mend()
        rows = {(record.id, record.attempts): _row(entry, record) for entry, record in entries}
        _check_room(self._room, rows.values())
        try:
            self._insert(rows)
        except self._sql.exc.IntegrityError:  # another gateway was quicker
            self._insert(rows)

    def _mend(self) -> dict[str, int]:
        """Adds what the table lacks; how many characters each bounded column takes."""
        found = self._columns()
        for column in self._table.columns:
            if column.name not in found:
                self._add(column)
        lengths = {name: getattr(each["type"], "length", None) for name, each in found.items()}
        return {name: length for name, length in lengths.items() if length}

    def _columns(self) -> dict[str, Any]:
        columns = self._sql.inspect(self._engine).get_columns(TABLE)
        return {column["name"]: column for column in columns}

    def _add(self, column: Any) -> None:
        """Raises SinkError where that cannot be done; another gateway may be quicker."""
        made = self._sql.schema.CreateColumn(column).compile(dialect=self._engine.dialect)
        statement = f"ALTER TABLE {TABLE} ADD COLUMN {str(made).strip()}"
        try:
            if column.server_default is None:  # what would older rows have in it?
                raise SinkError(f"the table {TABLE} is another one: it has no {column.name}")
            with self._engine.begin() as connection:
                connection.execute(self._sql.text(statement))
        except self._sql.exc.SQLAlchemyError:
            if column.name not in self._columns():
                raise SinkError(
                    f"the table {TABLE} has no column {column.name}, and it could not be added: "
                    f"let its owner run: {statement}"
                ) from None

    def _insert(self, rows: dict[Place, dict[str, Any]]) -> None:
        columns = self._table.c
        ids = [id_ for id_, _ in rows]
        with self._engine.begin() as connection:
            known = self._sql.select(columns.id, columns.attempt).where(columns.id.in_(ids))
            there = {(id_, attempt) for id_, attempt in connection.execute(known)}
            new = [row for place, row in rows.items() if place not in there]
            if new:
                connection.execute(self._table.insert(), new)


def _check_room(room: Mapping[str, int], rows: Iterable[Mapping[str, Any]]) -> None:
    """SQLite takes what is too long all the same, other databases would refuse the whole batch."""
    for row in rows:
        for name, most in room.items():
            value = row.get(name)
            if isinstance(value, str) and len(value) > most:
                raise SinkError(
                    f"the column {name} of the table {TABLE} takes {most} characters and is to "
                    f"have {len(value)}: make it TEXT"
                )


def _table(sql: Any) -> Any:
    id_ = sql.String(_ID_LENGTH)
    return sql.Table(
        TABLE,
        sql.MetaData(),
        sql.Column("id", id_, primary_key=True),
        sql.Column("attempt", sql.Integer, primary_key=True, autoincrement=False),
        sql.Column("entry", sql.String(48), nullable=False),
        sql.Column("at", sql.DateTime, nullable=False, index=True),
        *(sql.Column(each, id_, nullable=False) for each in _IDS),
        *(sql.Column(each, sql.Text, nullable=False) for each in _NAMES),
        sql.Column("outcome", sql.String(16), nullable=False),
        *(sql.Column(each, sql.BigInteger, nullable=False) for each in _COUNTS),
        *(sql.Column(each, sql.Float, nullable=False) for each in _TIMES),
        sql.Column("cost_billionths", sql.BigInteger, nullable=False),
        sql.Column("estimated", sql.Boolean, nullable=False, server_default=sql.false()),
    )


def _row(entry: str, record: UsageRecord) -> dict[str, Any]:
    """`at` is in UTC; SQLite has no exact decimals, so `cost` is a whole number of billionths."""
    fields = {
        name: value.replace("\x00", "\ufffd") if isinstance(value, str) else value
        for name, value in msgspec.structs.asdict(record).items()  # PostgreSQL's texts have no NUL
    }
    at = datetime.fromtimestamp(record.at, UTC).replace(tzinfo=None)
    attempt, cost = fields.pop("attempts"), fields.pop("cost")
    return {**fields, "attempt": attempt, "entry": entry, "at": at, "cost_billionths": cost}
