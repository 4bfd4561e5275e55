"""Every Redis key and its life, as functions: the only strings with colons.

Keys grow with processes (and with teams), never with requests. All keys of one process share a hash
tag, so that they sit in one slot of a Redis Cluster. What a dead incarnation left is cleared by one
gateway (`janitor.py`), and goes by itself when there is none. Lives end by the clock of Redis,
which may leap: so they are long, or short, renewed by who lives and judged by each reader's own
clock.
"""

import secrets

LEASE_MS = 2_500
"""A process that has not renewed its lease for this long is dead: known to all within 3 s, with the
time to look."""
LEASE_MOST_MS = 60_000
"""A lease with more life than this got it before the clock of Redis was put back: who lives has
made its own short again within a second."""
RENEW_S = 1.0
STREAM_TTL_MS = 7_200_000
"""What a dead incarnation left vanishes after this, if no gateway clears it. It is long since it
goes by the clock of Redis, whose leap by an hour must end nothing that lives."""
BLOB_TTL_MS = 7_200_000
ROSTER_MAXLEN = 4_096
DIGEST_KEEP_S = 10.0
"""So long the stream of digests reaches back, by its writers' clocks; who is later asks anew."""
WORK_MAXLEN = 65_536
REPLY_MAXLEN = 65_536


def is_alive(life_ms: object) -> bool:
    """Whether a lease with so much life left, as PTTL says it, is one that somebody renews."""
    return isinstance(life_ms, int) and 0 <= life_ms <= LEASE_MOST_MS


def incarnation() -> str:
    """A fresh name for one life of a process."""
    return secrets.token_hex(5)


def work(worker: str) -> str:
    """Stream: what gateways ask of one worker incarnation."""
    return f"fb:{{w:{worker}}}:work"


def worker_lease(worker: str) -> str:
    return f"fb:{{w:{worker}}}:lease"


def worker_card(worker: str) -> str:
    """String: the worker's ModelCard, msgpack."""
    return f"fb:{{w:{worker}}}:card"


def metrics(process: str) -> str:
    """String: a process's metrics snapshot, for the one scrape of the base URL."""
    return f"fb:{{m:{process}}}:metrics"


def reply(gateway: str) -> str:
    """Stream: what workers answer to one gateway incarnation, one packed entry per step."""
    return f"fb:{{g:{gateway}}}:reply"


def gateway_lease(gateway: str) -> str:
    return f"fb:{{g:{gateway}}}:lease"


def roster() -> str:
    """Stream: beacons and farewells of all workers."""
    return "fb:{roster}:events"


def digests() -> str:
    """Stream: what changes in the prefix caches of all workers, and snapshots of them."""
    return "fb:{digests}:events"


def gateways() -> str:
    """Set: gateway incarnations."""
    return "fb:{roster}:gateways"


def janitor_lease() -> str:
    """String: the gateway that clears away, for now, what dead incarnations left."""
    return "fb:{roster}:janitor"


def members() -> str:
    """Hash: worker incarnation -> last Beacon, the snapshot for a gateway that joins."""
    return "fb:{roster}:members"


def blob(sha256: str) -> str:
    """String: a tokenizer or template by the hash of its content, zlib-compressed."""
    return f"fb:{{b:{sha256}}}:blob"


CHANGES_MAXLEN = 4_096
HOLD_MS = 30_000
"""An admitted request is taken for lost when its gateway has not renewed it for so long."""
SETTLED_KEEP_S = 900
"""A settlement is known for so long, against repeats."""
SLOTS_TTL_MS = 7_200_000
"""Slots that nobody renews end after HOLD_MS by fleet time; their key goes after this."""
RECORDS_MAXLEN = 1_000_000
AUDIT_MAXLEN = 100_000


def directory() -> str:
    """Hash: `kind/id` -> `revision json`: organisations, teams, users, keys, models, aliases,
    issuers.

    All that teams have in Redis shares one hash tag, since one script must see all of it.
    """
    return "fb:{teams}:directory"


def directory_revision() -> str:
    """String: the number of changes of the directory so far."""
    return "fb:{teams}:revision"


def changes() -> str:
    """Stream: the last changes of the directory, for all gateways."""
    return "fb:{teams}:changes"


def uses() -> str:
    """Hash: scope (`team:red`) -> what it has used and holds of its limits, as `admit.lua` says."""
    return "fb:{teams}:use"


def slots(scope: str) -> str:
    """Sorted set: open requests of a scope that bounds them, by the end of their leases."""
    return f"fb:{{teams}}:slots:{scope}"


def open_requests() -> str:
    """Sorted set: admitted requests that are not settled, by the end of their leases."""
    return "fb:{teams}:open"


def holds() -> str:
    """Hash: request id -> its Hold, for whoever must settle it in its gateway's place."""
    return "fb:{teams}:holds"


def settled() -> str:
    """Sorted set: requests that were settled lately, by when."""
    return "fb:{teams}:settled"


def fleet_clock() -> str:
    """String: the time of the fleet, by which leases and rates of teams go, and the time of Redis
    then; see `fleet_time.lua`."""
    return "fb:{teams}:clock"


def records() -> str:
    """Stream: a UsageRecord of each settled request."""
    return "fb:{teams}:usage"


def ledger_lease() -> str:
    """String: the gateway that keeps the books now."""
    return "fb:{teams}:ledger"


def ledger_cursor() -> str:
    """String: the last record that is in the books."""
    return "fb:{teams}:cursor"


def exports() -> str:
    """Hash: target's hash -> the last record that it has, and when a gateway last named it."""
    return "fb:{teams}:exports"


def exporter_lease(target: str) -> str:
    """String: the gateway that exports to a target now."""
    return f"fb:{{teams}}:exporter:{target}"


def book_of_hours(day: str) -> str:
    """Hash: the figures of each hour of a day (2026-12-31), by organisation down to alias."""
    return f"fb:{{teams}}:hours:{day}"


def book_of_days(month: str) -> str:
    """Hash: the figures of each day of a month (2026-12)."""
    return f"fb:{{teams}}:days:{month}"


def audit() -> str:
    """Stream: who changed what in the directory."""
    return "fb:{teams}:audit"


def pepper() -> str:
    """String: the key of the digests of keys, where no gateway was given one."""
    return "fb:{teams}:pepper"


def pepper_mark() -> str:
    """String: the fingerprint of the pepper that a fleet began with."""
    return "fb:{teams}:pepper_mark"


def response(team: str, response_id: str) -> str:
    """Hash: a stored response, the input that it answers, and how far it is."""
    return f"fb:{{r:{team}}}:response:{response_id}"


def response_events(team: str, response_id: str) -> str:
    """List: the events of a response that is streamed from the background, by their number."""
    return f"fb:{{r:{team}}}:events:{response_id}"


def responses(team: str) -> tuple[str, str, str]:
    """A team's books of its responses: when they were kept, their sizes, which are running."""
    return f"fb:{{r:{team}}}:index", f"fb:{{r:{team}}}:sizes", f"fb:{{r:{team}}}:running"
