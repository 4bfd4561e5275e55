"""The engine's host time per step: all of a step but the model, with a runner that takes no time.

    python benchmarks/engine_host.py [--running 32] [--steps 3000]

A closed loop keeps `--running` sequences going: 128 to 512 tokens in, a third of them shared, 64 to
192 out, in four teams. Prints median and p99 and appends them to results/engine_host.csv; those of
the thread's CPU time are what repeats on a machine that does other work too. The goal is 1 ms at 32
running sequences.
"""

import argparse
import csv
import gc
import os
import random
from datetime import date
from itertools import count
from time import perf_counter, thread_time

from common import RESULTS, commit, machine
from forebay_shared.sampling import SamplingParams
from forebay_shared.settings import WorkerSettings
from forebay_shared.wire import Done, Submit, pack_ids
from forebay_worker.engine.batch import Sampled, ScheduledRow
from forebay_worker.engine.core import EngineCore
from forebay_worker.engine.intake import Limits
from forebay_worker.engine.ports import Unrecorded

Times = tuple[float, float]
"""Wall and CPU, in seconds."""


class InstantRunner:
    """Answers at once; the time that even that took is not the host's."""

    num_blocks, block_size, max_model_len, vocab_size = 16_384, 16, 4096, 50_000
    token_budget = prefill_budget = 2048
    scores_prompts = False

    def __init__(self) -> None:
        self.spent = 0.0, 0.0
        self._tokens = random.Random(1)

    def execute(self, rows: list[ScheduledRow]) -> list[Sampled | None]:
        began = _clocks()
        results = [
            Sampled(self._tokens.randrange(2, 50_000)) if row.samples else None for row in rows
        ]
        self.spent = _since(began, self.spent)
        return results


def measure(running: int, steps: int) -> list[Times]:
    """Host seconds, wall and CPU, of each step that had all `running` sequences in its batch."""
    rng, names, runner = random.Random(0), count(), InstantRunner()
    core = EngineCore(runner, Limits.of(runner), WorkerSettings(max_num_seqs=running), Unrecorded())
    shared = [rng.randrange(50_000) for _ in range(128)]
    times: list[Times] = []
    missing = running
    while len(times) < steps:
        submits = [_submit(next(names), shared, rng) for _ in range(missing)]
        runner.spent, began = (0.0, 0.0), _clocks()
        for submit in submits:
            core.submit(submit, began[0])
        core.step()
        core.load()
        events = core.take_events()
        wall, cpu = _since(began)
        if len(core.scheduler.running) + missing >= running:
            times.append((wall - runner.spent[0], cpu - runner.spent[1]))
        missing = sum(isinstance(message, Done) for _, message in events)
    return times


def _clocks() -> Times:
    return perf_counter(), thread_time()


def _since(began: Times, added: Times = (0.0, 0.0)) -> Times:
    now = _clocks()
    return now[0] - began[0] + added[0], now[1] - began[1] + added[1]


def _submit(name: int, shared: list[int], rng: random.Random) -> Submit:
    prompt = [rng.randrange(50_000) for _ in range(rng.randint(128, 384))]
    return Submit(
        request_id=f"request-{name}",
        attempt=1,
        gateway="gateway",
        prompt=pack_ids(shared + prompt if name % 3 == 0 else prompt),
        sampling=SamplingParams(max_tokens=rng.randint(64, 192)),
        team=f"team-{name % 4}",
        queue_timeout_ms=60_000,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3000)
    options = parser.parse_args()
    gc.collect()
    wall, cpu = (
        sorted(each) for each in zip(*measure(options.running, options.steps), strict=True)
    )
    row = {
        "date": date.today().isoformat(),
        "commit": commit(),
        "machine": machine(),
        "load": round(os.getloadavg()[0], 1),
        "running": options.running,
        "steps": options.steps,
        "median_ms": _ms(wall, 0.5),
        "p99_ms": _ms(wall, 0.99),
        "cpu_median_ms": _ms(cpu, 0.5),
        "cpu_p99_ms": _ms(cpu, 0.99),
    }
    print(", ".join(f"{name} {value}" for name, value in row.items()))
    _append(row)


def _ms(ordered: list[float], share: float) -> float:
    return round(ordered[int(len(ordered) * share)] * 1000, 3)


def _append(row: dict[str, object]) -> None:
    path = RESULTS / "engine_host.csv"
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, row)
        if new:
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    main()
