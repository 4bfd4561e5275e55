"""What must hold when a trial is over: books, gauges, keys and processes.

- every accepted request ended once: one usage row each, of the outcome that its client saw;
- nothing is open: no slot, no hold, no stream, no generation, no row in an engine's batch;
- free and cached blocks are all there are: an engine at rest uses none;
- Redis holds the keys of the living, and nothing else that stays;
- no process of the house's is left beside those that it knows.
"""

from collections import Counter
from typing import TYPE_CHECKING

import msgspec
import psutil
from forebay_shared import keys
from forebay_shared.books import UsageRecord, decode_record
from load import Load, Outcome
from serve_house import until

if TYPE_CHECKING:
    from chaos_house import House

GAUGES = (
    "forebay_open_generations", "forebay_open_streams", "forebay_inbox_tokens",
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
)  # fmt: skip
SETTLED_S = 100.0
"""The ledger settles what nobody else could, 80 s after it was last renewed: a request, say, that a
Redis which stood still admits when its gateway has given it up."""
CLEARED_S = 75.0
"""Keys of the dead are cleared within seconds; their own life ends within keys.STREAM_TTL_MS."""
_MATCHING = {"ok": {"completed"}, "broken": {"error"}, "left": {"cancelled", "completed"}}


class Balance:
    """Of one house; each check looks at what came since the last."""

    def __init__(self, house: "House") -> None:
        self._house = house
        self._position = "-"
        self.forget()

    def forget(self) -> None:
        """What was asked until now is not counted."""
        self._at_rest()
        self._new_rows()

    def check(self, load: Load, *, books: bool = True) -> None:
        self._at_rest()
        rows = self._new_rows()
        if books:
            _compare(load.outcomes, rows)
        self._keys_live_on_time()
        self._no_strangers()

    def check_keys(self) -> None:
        """The keys of the dead have gone."""
        client = self._house.redis.client
        living = len(self._house.processes)

        def only_living() -> bool:
            owners = {key.split(b"}")[0] for key in client.scan_iter("fb:{[wg]:*")}
            members = client.hlen(keys.members()) + client.scard(keys.gateways())
            return len(owners) == living == members

        until(only_living, CLEARED_S)

    def _at_rest(self) -> None:
        client = self._house.redis.client
        for name in GAUGES:
            _until_zero(lambda name=name: self._house.metric(name), name)
        _until_zero(lambda: client.zcard(keys.open_requests()), "open requests")
        _until_zero(lambda: client.hlen(keys.holds()), "holds")
        _until_zero(lambda: sum(map(client.zcard, client.scan_iter(keys.slots("*")))), "slots")

    def _new_rows(self) -> list[UsageRecord]:
        entries = self._house.redis.client.xrange(keys.records(), min=self._position)
        if entries:
            self._position = f"({entries[-1][0].decode()}"
        rows = [_row(fields) for _, fields in entries]
        return [row for row in rows if row is not None]

    def _keys_live_on_time(self) -> None:
        """What is not of the teams' directory and books goes by itself when nobody renews it."""
        client = self._house.redis.client
        stays = [
            key
            for key in client.scan_iter()
            if not key.startswith(b"fb:{teams}:") and client.ttl(key) == -1
        ]
        assert not stays, f"keys without a TTL: {stays}"
        strange = [key for key in client.scan_iter() if not key.startswith(b"fb:{")]
        assert not strange, f"keys of nobody: {strange}"

    def _no_strangers(self) -> None:
        """Every process with the house's mark descends from one that the house knows."""
        known = {one.process.pid for one in self._house.processes}
        for process in psutil.process_iter():
            try:
                mark = process.environ().get("TEST_HOUSE")
                if (
                    mark == self._house.marks["TEST_HOUSE"]
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    family = {process.pid, *(parent.pid for parent in process.parents())}
                    assert family & known, f"left: {process.cmdline()}"
            except psutil.Error:
                continue


def _row(fields: dict[bytes, bytes]) -> UsageRecord | None:
    """None: a test put it there to harm."""
    try:
        return decode_record(fields[b"p"])
    except (KeyError, msgspec.DecodeError):
        return None


def _until_zero(value, name: str) -> None:
    try:
        until(lambda: value() == 0, SETTLED_S)
    except AssertionError:
        raise AssertionError(f"{name}: {value()}, not 0") from None


def _compare(outcomes: list[Outcome], rows: list[UsageRecord]) -> None:
    """One row for each accepted request, that agrees with what its client saw."""
    twice = [id_ for id_, count in Counter(row.id for row in rows).items() if count > 1]
    assert not twice, f"several rows of one request: {twice}"
    by_id = {row.id: row for row in rows}
    nameless = [one for one in outcomes if not one.id and one.status != one.ask.refused]
    for outcome in outcomes:
        if outcome.id:
            _agree(outcome, by_id.pop(outcome.id, None))
    surely = sum(one.end == "ok" for one in nameless)
    assert surely <= len(by_id) <= len(nameless), (
        f"{len(by_id)} rows for {len(nameless)} requests, {surely} of them answered: "
        f"{list(by_id.values())[:3]}"
    )


def _agree(outcome: Outcome, row: UsageRecord | None) -> None:
    assert row is not None, f"no row for {outcome}"
    wanted = _MATCHING.get(outcome.end)
    assert wanted is None or row.outcome in wanted, f"{row} for {outcome}"
    if outcome.end == "ok" and outcome.usage is not None:
        billed = {"prompt_tokens": row.input_tokens, "completion_tokens": row.output_tokens}
        said = {name: outcome.usage[name] for name in billed}
        assert said == billed, f"{row} for {outcome}"
