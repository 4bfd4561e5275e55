"""What a metered request holds while it runs, and the record that it leaves: for the three who may
settle it.

Its gateway does, when it is over; its worker, when the gateway is gone; the ledger, when both are.
The script lets the first one through. It knows no HTTP, no engine and no team's rules.
"""

import time
from typing import Literal

import msgspec

from forebay_shared import keys
from forebay_shared.link import Argument
from forebay_shared.scripts import Script
from forebay_shared.wire import Usage

SETTLE = Script("settle")

Outcome = Literal["completed", "cancelled", "error", "lost"]


class UsageRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one request cost. `at` is when it ended, in seconds since 1970; `cost` is in billionths
    of the currency; `model` is the served one, `alias` the name that was asked for.
    `reasoning_tokens` are those of the output that were thinking, as far as its gateway read it.
    """

    id: str
    at: float = 0.0
    key: str = ""
    user: str = ""
    team: str = ""
    organisation: str = ""
    model: str = ""
    alias: str = ""
    outcome: Outcome = "completed"
    attempts: int = 1
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    queued_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    cost: int = 0
    estimated: bool = False
    """Nothing told what it used: an upstream without usage, or cut before it told; or its gateway
    and its worker are both gone."""


class Rates(msgspec.Struct, frozen=True, array_like=True):
    """Billionths of the currency per token."""

    input: float = 0.0
    cached: float = 0.0
    output: float = 0.0

    def cost(self, input_tokens: int, cached_tokens: int, output_tokens: int) -> int:
        fresh = input_tokens - cached_tokens
        return round(fresh * self.input + cached_tokens * self.cached + output_tokens * self.output)


class Hold(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a request reserved, where, and its record but for what it used.

    `plan` is the scopes' limits as the scripts read them. It is the last field, since `admit.lua`
    puts it there: it has it anyway.
    """

    record: UsageRecord
    rates: Rates
    slots: list[str]
    input_tokens: int
    output_tokens: int
    cost: int
    plan: msgspec.Raw


_encode = msgspec.msgpack.Encoder().encode
decode_hold = msgspec.msgpack.Decoder(Hold).decode
encode_record = msgspec.json.Encoder().encode
decode_record = msgspec.json.Decoder(UsageRecord).decode


def admission(
    hold: Hold, now_ms: int = 0, *, started: bool = False
) -> tuple[list[str], list[Argument]]:
    """Keys and arguments of the script `admit`. `now_ms` 0: by fleet time; `started`: the
    request runs already, whatever the limits say.
    """
    plan = bytes(hold.plan)
    books = [keys.open_requests(), keys.holds(), keys.uses(), keys.fleet_clock()]
    names = [*books, *hold.slots]
    arguments: list[Argument] = [
        now_ms, hold.record.id, keys.HOLD_MS, hold.input_tokens, hold.output_tokens, hold.cost,
        _encode(hold)[: -len(plan)], plan, "started" if started else "", keys.SLOTS_TTL_MS,
    ]  # fmt: skip
    return names, arguments


def total(usages: list[Usage]) -> Usage:
    """Several sequences of one request as one: they share the prompt."""
    if not usages:
        return Usage()
    return Usage(
        prompt_tokens=max(usage.prompt_tokens for usage in usages),
        cached_tokens=min(usage.cached_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        queued_ms=min(usage.queued_ms for usage in usages),
        prefill_ms=max(usage.prefill_ms for usage in usages),
        decode_ms=max(usage.decode_ms for usage in usages),
        estimated=any(usage.estimated for usage in usages),
    )


def record_of(
    hold: Hold, usage: Usage, outcome: Outcome, attempts: int = 1, reasoning_tokens: int = 0
) -> UsageRecord:
    """The finished record of a request that ends now."""
    cached = min(usage.cached_tokens, usage.prompt_tokens)
    return msgspec.structs.replace(
        hold.record,
        at=round(time.time(), 3),
        outcome=outcome,
        attempts=attempts,
        input_tokens=usage.prompt_tokens,
        cached_tokens=cached,
        output_tokens=usage.completion_tokens,
        reasoning_tokens=min(reasoning_tokens, usage.completion_tokens),
        queued_ms=round(usage.queued_ms, 1),
        prefill_ms=round(usage.prefill_ms, 1),
        decode_ms=round(usage.decode_ms, 1),
        cost=hold.rates.cost(usage.prompt_tokens, cached, usage.completion_tokens),
        estimated=usage.estimated,
    )


def settlement(
    hold: Hold, record: UsageRecord, *, only_held: bool = False, now_ms: int = 0
) -> tuple[list[str], list[Argument]]:
    """Keys and arguments of the script `settle`. `only_held`: not when the hold is gone.

    `now_ms` 0: by fleet time.
    """
    names = [
        keys.open_requests(),
        keys.holds(),
        keys.settled(),
        keys.records(),
        keys.uses(),
        keys.fleet_clock(),
        *hold.slots,
    ]
    arguments: list[Argument] = [
        now_ms, record.id, hold.input_tokens, hold.output_tokens, hold.cost, record.input_tokens,
        record.output_tokens, record.cost, 1_000 * keys.SETTLED_KEEP_S, keys.RECORDS_MAXLEN,
        "held" if only_held else "", encode_record(record), bytes(hold.plan),
    ]  # fmt: skip
    return names, arguments
