"""`make soak MINUTES=30`: a mixed load for long, faults underneath, and what grows meanwhile.

    PYTHONPATH=tests:tests/chaos python tests/chaos/soak.py --minutes 30 [--seed 7]

Two gateways, two workers of a small model and two that echo answer chats, texts, structured output,
tools, vectors, bad requests and clients that leave, of three teams. About once a minute a worker or
a gateway is killed, stopped or told to leave; the first gateway and the first worker of each kind
are only made to stand still, so that their lives are long. Every few seconds each process is looked
at. Behind a warm-up of five minutes a line is fitted through the samples of each life that lasted
long enough; its slope, less two standard errors, must not exceed its bound. Exits with 1 when one
does, when an answer was wrong, a usage record is missing, or anything is left in the end. A run of
less than ten minutes judges no slopes.
"""

import argparse
import contextlib
import csv
import math
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
from chaos_house import ECHO, House, learn, tiny_flags
from fleet_house import Process, Worker
from load import Load, Outcome
from redis_house import redis_running
from requests_mix import Ask, TinyMix, echo_mix
from serve_house import until
from tiny_checkpoint import make_directory

SAMPLE_S = 5.0
FAULT_S = 60.0
WARM_S = 300.0
CLIENTS = 10


class Bound(NamedTuple):
    """The most that a quantity may grow, per hour."""

    per_hour: float
    unit: str


BOUNDS = {
    "rss": Bound(30.0, "MB"),
    "fds": Bound(10.0, ""),
    "threads": Bound(4.0, ""),
    "redis_keys": Bound(60.0, ""),
    "redis_mb": Bound(40.0, "MB"),
    "p50_ms": Bound(300.0, "ms"),
    "p99_ms": Bound(3000.0, "ms"),
}
"""Half an hour sees a leak of a megabyte per 2,000 requests; six hours, bounds ten times as tight.
Redis keeps the usage records, some 250 bytes per request, for a week."""


@dataclass(frozen=True)
class Sample:
    """`who`: a life of a process, or the whole."""

    at_s: float
    who: str
    what: str
    value: float


class Fit(NamedTuple):
    """A line by least squares: its slope per hour, and that slope's standard error."""

    slope: float
    error: float
    first: float
    last: float


def fit(points: Sequence[tuple[float, float]]) -> Fit:
    """`points` are (seconds, value)."""
    xs, ys = [at / 3600 for at, _ in points], [value for _, value in points]
    mean_x, mean_y = statistics.fmean(xs), statistics.fmean(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in zip(xs, ys, strict=True))
    error = math.sqrt(rest / max(1, len(xs) - 2) / spread)
    return Fit(slope, error, ys[0], ys[-1])


class Soak:
    """One run. `samples` in order of time."""

    def __init__(self, house: House, load: Load, rng: random.Random, seconds: float) -> None:
        self.house = house
        self.load = load
        self.samples: list[Sample] = []
        self.faults: list[str] = []
        self._rng = rng
        self._seconds = seconds
        self._began = time.monotonic()
        self._seen = 0

    def run(self) -> None:
        next_fault = FAULT_S / 2
        while (now := time.monotonic() - self._began) < self._seconds:
            self._sample(now)
            if now > next_fault and now < self._seconds - FAULT_S / 2:
                next_fault = now + self._rng.uniform(0.5, 1.5) * FAULT_S
                self._harm()
            time.sleep(SAMPLE_S)

    def _harm(self) -> None:
        """One fault, and the supervisor's answer to it."""
        kind = self._rng.choice(["kill", "kill", "leave", "stand still"])
        workers, gateways = self.house.workers, self.house.gateways
        stands = kind == "stand still"
        victims = [*workers[::2], *gateways[:1]] if stands else [*workers[1::2], *gateways[1:]]
        victim = self._rng.choice(victims)
        role = "worker" if isinstance(victim, Worker) else "gateway"
        self.faults.append(f"{kind} {role}")
        if kind == "stand still":
            victim.send(signal.SIGSTOP)
            time.sleep(4.0)  # the fault itself
            victim.send(signal.SIGCONT)
        elif kind == "leave":
            victim.send(signal.SIGTERM)
            until(lambda: not victim.alive, 60)
        else:
            victim.kill()
        self.house.heal()
        minutes = (time.monotonic() - self._began) / 60
        asked = len(self.load.outcomes)
        print(f"{minutes:5.1f} min  {asked:6d} requests  {kind} {role}", flush=True)

    def _sample(self, now: float) -> None:
        for process in self.house.processes:
            with contextlib.suppress(psutil.Error):
                self._look_at(process, now)
        info = self.house.redis.client.info()
        self._note(now, "redis", "redis_mb", info["used_memory"] / 2**20)
        self._note(now, "redis", "redis_keys", self.house.redis.client.dbsize())
        outcomes = self.load.outcomes[self._seen :]
        self._seen += len(outcomes)
        waits = sorted(one.seconds * 1000 for one in outcomes if one.end == "ok")
        if len(waits) >= 10:
            self._note(now, "clients", "p50_ms", waits[len(waits) // 2])
            self._note(now, "clients", "p99_ms", waits[int(len(waits) * 0.99)])

    def _look_at(self, process: Process, now: float) -> None:
        life = psutil.Process(process.process.pid)
        role = "worker" if isinstance(process, Worker) else "gateway"
        who = f"{role} {life.pid}"
        with life.oneshot():
            self._note(now, who, "rss", life.memory_info().rss / 2**20)
            self._note(now, who, "fds", life.num_fds())
            self._note(now, who, "threads", life.num_threads())

    def _note(self, now: float, who: str, what: str, value: float) -> None:
        self.samples.append(Sample(round(now, 1), who, what, round(value, 2)))


def judge(samples: Sequence[Sample], seconds: float) -> list[str]:
    """What grew beyond its bound; prints every fit. Nothing is judged in so short a run that all of
    it is warm-up."""
    lines: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for sample in samples:
        lines[sample.who, sample.what].append((sample.at_s, sample.value))
    grew: list[str] = []
    for (who, what), points in sorted(lines.items()):
        warm_s = min(WARM_S, seconds / 4)
        warm = [point for point in points if point[0] >= points[0][0] + warm_s]
        if len(warm) < 12 or warm[-1][0] - warm[0][0] < seconds / 4:
            continue
        found, bound = fit(warm), BOUNDS[what]
        surely = found.slope - 2 * found.error
        text = (
            f"{who:16} {what:10} {found.first:9.1f} -> {found.last:9.1f}  "
            f"{found.slope:+8.1f} ± {2 * found.error:.1f} {bound.unit}/h of {bound.per_hour:g}"
        )
        print(text)
        if surely > bound.per_hour and seconds >= 2 * WARM_S:
            grew.append(text)
    return grew


def both(rng: random.Random, tiny: TinyMix) -> Ask:
    """Most to the echo, which costs little."""
    return tiny(rng) if rng.random() < 0.3 else echo_mix(rng)


def write(path: Path, samples: Sequence[Sample]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["at_s", "who", "what", "value"])
        writer.writerows((s.at_s, s.who, s.what, s.value) for s in samples)


def summary(outcomes: Sequence[Outcome], faults: Sequence[str], seconds: float) -> str:
    ends: defaultdict[str, int] = defaultdict(int)
    for one in outcomes:
        ends["meant" if one.ask.refused == one.status else one.end] += 1
    return (
        f"{seconds / 60:.0f} min, {len(outcomes)} requests "
        f"({', '.join(f'{count} {end}' for end, count in sorted(ends.items()))}), "
        f"{len(faults)} faults"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/soak.csv"))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    rng, seconds = random.Random(given.seed), given.minutes * 60
    with tempfile.TemporaryDirectory() as directory, redis_running() as redis:
        mix = TinyMix("tiny")
        model = make_directory(Path(directory))
        kinds = [ECHO, ECHO, tiny_flags(model), tiny_flags(model)]
        house = House(redis, kinds, lambda dice: both(dice, mix))
        try:
            learn(house, mix)
            with house.load(rng, CLIENTS) as load:
                soak = Soak(house, load, rng, seconds)
                soak.run()
            write(given.out, soak.samples)
            print(summary(load.outcomes, soak.faults, seconds))
            grew = judge(soak.samples, seconds)
            load.only("ok", "cut")
            house.balance.check(load)
            house.balance.check_keys()
        finally:
            house.close()
    for line in grew:
        print(f"grew: {line}", file=sys.stderr)
    return 1 if grew else 0


if __name__ == "__main__":
    sys.exit(main())
