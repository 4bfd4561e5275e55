"""Requests for the simulated fleet from public traces: `load(folder, workload, limit, seed)`."""

import csv
import gzip
import itertools
import json
import random
from collections import OrderedDict
from datetime import datetime
from operator import attrgetter
from pathlib import Path
from typing import Any

from fleet import Request

BLOCK = 512
"""Tokens of a block in Mooncake's traces, and in the simulation."""
TICK_S = 3.0
GROUPS = 150
PREFIX = 6_144
WORKLOADS = ("conversation", "synthetic", "azure")


def load(folder: Path, workload: str, limit: int, seed: int, groups: int = GROUPS) -> list[Request]:
    """The first `limit` requests: Mooncake's by their hash ids; Azure's lengths, each behind one of
    `groups` prefixes of 6,144 tokens, some of which are asked for more often."""
    if workload == "azure":
        return _azure(folder / "azure_llm_2023_conv.csv.gz", limit, random.Random(seed), groups)
    with gzip.open(folder / f"mooncake_{workload}.jsonl.gz", "rt") as lines:
        source = random.Random(seed)
        requests = [_mooncake(json.loads(line), source) for line in itertools.islice(lines, limit)]
    return sorted(requests, key=attrgetter("at"))


def faster(requests: list[Request], factor: float) -> list[Request]:
    """The same requests, none of them served yet, arriving `factor` times as fast."""
    return [Request(one.at / factor, one.prompt, one.output, one.chain) for one in requests]


def shared_hits(requests: list[Request], blocks: int) -> int:
    """Blocks found if all workers had one cache, as large as all of theirs: no routing beats it."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        found = list(itertools.takewhile(cache.__contains__, request.chain))
        hits += len(found)
        for key in reversed(request.chain):
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > blocks:
            cache.popitem(last=False)
    return hits


def block_hash(number: int) -> int:
    """A number's hash of 64 bits, evenly spread (splitmix64)."""
    mask = (1 << 64) - 1
    number = (number + 1) * 0x9E3779B97F4A7C15 & mask
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & mask
    number = (number ^ number >> 27) * 0x94D049BB133111EB & mask
    return number ^ number >> 31


def _mooncake(row: dict[str, Any], source: random.Random) -> Request:
    """At a moment within TICK_S of its time: the trace's clock ticks in steps of three seconds, and
    requests that come at one instant cannot be told of each other, whatever the gateways share."""
    length = int(row["input_length"])
    chain = [block_hash(number) for number in row["hash_ids"][: (length - 1) // BLOCK]]
    at = row["timestamp"] / 1000 + source.uniform(0, TICK_S)
    return Request(at, length, int(row["output_length"]), chain)


def _azure(path: Path, limit: int, source: random.Random, groups: int) -> list[Request]:
    weights = [(rank + 1) ** -0.7 for rank in range(groups)]
    fresh = itertools.count(1 << 40)
    requests: list[Request] = []
    began = 0.0
    with gzip.open(path, "rt") as lines:
        for row in itertools.islice(csv.DictReader(lines), limit):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            began = began or at
            length = PREFIX + int(row["ContextTokens"])
            (group,) = source.choices(range(groups), weights)
            chain = [block_hash(group << 20 | number) for number in range(PREFIX // BLOCK)]
            own = (length - 1) // BLOCK - len(chain)
            chain += [block_hash(next(fresh)) for _ in range(own)]
            requests.append(Request(at - began, length, max(1, int(row["GeneratedTokens"])), chain))
    return requests
