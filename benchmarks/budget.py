"""What a step's token budget does to throughput and latency: the engine's core over a simulated
H200, in simulated time, so on any machine.

    python benchmarks/budget.py --model qwen3-8b --budgets 8192,8192:2048 --cases 512/128/256

A budget is TOTAL:BESIDE, tokens of a step and prompt tokens of one in which others decode. A step
takes what `decode_step.py` and `offline.py` have measured on the card (see `Card`), the host works
one step ahead as it does there, and a client sends its next request some milliseconds after its
last answer, as in `online.py`: so many rounds of so many clients, all of them at once at first.
"""

import argparse
import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import quantiles
from typing import NamedTuple

from forebay_shared.sampling import SamplingParams
from forebay_shared.settings import WorkerSettings
from forebay_shared.wire import Delta, Done, SequenceStart, Submit, pack_ids
from forebay_worker.engine import core as core_module
from forebay_worker.engine import pipeline as pipeline_module
from forebay_worker.engine.batch import Sampled, ScheduledRow
from forebay_worker.engine.core import EngineCore
from forebay_worker.engine.intake import Limits
from forebay_worker.engine.ports import Unrecorded

HTTP_S = 0.008
"""From an answer's last token on the card until the client's next request is in the worker."""
ROUNDS = 4


class Card(NamedTuple):
    """A model on an H200, in seconds. Products of T tokens take the larger of `weights` (their
    bytes) and T * `token`, rounded where the two meet; `kv` and `attention` are those of a cached
    position: read by a decode row, and attended to by a token of a prompt."""

    weights: float
    token: float
    kv: float
    attention: float
    host: float = 0.0003

    def seconds(self, rows: list[ScheduledRow]) -> float:
        tokens, cached = 0, 0.0
        for row in rows:
            tokens += row.num_new
            end = row.sequence.num_computed + row.num_new
            if row.num_new == 1:
                cached += end * self.kv
            else:
                cached += row.num_new * (end - row.num_new / 2) * self.attention
        products = (self.weights**2.5 + (tokens * self.token) ** 2.5) ** 0.4
        return products + cached


CARDS = {
    # 8B: 1 row 4.5 ms, 256 rows of 1,024 15.4, a prompt of 2,048 44, 8,192 tokens of such 190.
    "qwen3-8b": Card(4.4e-3, 21.2e-6, 147_456 / 4.3e12, 4 * 4096 * 36 / 420e12),
    # 0.6B: 1 row 0.95 ms, 256 rows of 1,024 8.4, a prompt of 2,048 5.1, 8,192 tokens 19.
    "qwen3-0.6b": Card(0.93e-3, 1.9e-6, 114_688 / 4.3e12, 4 * 2048 * 28 / 400e12),
}
CASES = {
    "qwen3-8b": ["1024/128/32", "1024/128/128", "512/128/256", "4096/512/64", "128/512/256"],
    "qwen3-0.6b": ["128/128/256", "1024/128/32", "1024/128/128", "512/128/256"],
}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Step:
    """A launched step; whoever asks for its results waits until it has run."""

    card: "SimulatedCard"
    ends: float
    values: list[Sampled | None]
    may_wait: bool = True

    def results(self) -> list[Sampled | None]:
        clock = self.card.clock
        clock.now = max(clock.now, self.ends)
        return self.values


class SimulatedCard:
    """Runs one step after another, in the time of `Card`."""

    num_blocks, block_size, max_model_len, vocab_size = 16_384, 64, 40_960, 50_000
    token_budget = 8192
    prefill_budget = 2048
    scores_prompts = False

    def __init__(self, card: Card, clock: Clock) -> None:
        self.clock = clock
        self._card = card
        self._free_at = 0.0
        self.steps = 0

    def execute(self, rows: list[ScheduledRow]) -> list[Sampled | None]:
        return self.launch(rows).results()

    def launch(self, rows: list[ScheduledRow]) -> Step:
        self.clock.now += self._card.host
        self.steps += 1
        self._free_at = max(self._free_at, self.clock.now) + self._card.seconds(rows)
        return Step(self, self._free_at, [Sampled(7) if row.samples else None for row in rows])


@dataclass
class Request:
    asked: float
    tokens_at: list[float] = field(default_factory=list[float])


class Figures(NamedTuple):
    """Output tokens per second, and milliseconds."""

    throughput: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    itl_p99: float


def measure(card: Card, case: str, total: int, beside: int) -> Figures:
    """A closed loop of the case's clients."""
    prompt, new, clients = map(int, case.split("/"))
    clock = Clock()
    core_module.monotonic = pipeline_module.monotonic = clock  # simulated time for the engine too
    runner = SimulatedCard(card, clock)
    settings = WorkerSettings(
        max_num_batched_tokens=total,
        max_num_prefill_tokens=beside,
        enable_prefix_caching=False,
        max_num_queued_reqs=4096,
    )
    core = EngineCore(runner, Limits.of(runner), settings, Unrecorded())
    arrivals = [(index * 1e-4, index) for index in range(clients)]
    requests: dict[str, Request] = {}
    packed = pack_ids(random.Random(0).choices(range(50_000), k=prompt))
    left = (ROUNDS - 1) * clients
    while arrivals or not core.idle:
        if core.idle:
            clock.now = max(clock.now, arrivals[0][0])
        while arrivals and arrivals[0][0] <= clock.now:
            asked, index = heapq.heappop(arrivals)
            requests[str(index)] = Request(asked)
            core.submit(_submit(str(index), packed, new), clock.now)
        core.step()
        for _, event in core.take_events():
            if isinstance(event, Delta):
                requests[event.request_id].tokens_at += [clock.now] * len(event.token_ids)
            elif isinstance(event, Done) and left > 0:
                heapq.heappush(arrivals, (clock.now + HTTP_S, len(requests) + len(arrivals)))
                left -= 1
    return _figures(list(requests.values()), clock.now)


def _submit(name: str, prompt: bytes, new: int) -> Submit:
    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    return Submit(
        request_id=name,
        attempt=1,
        gateway="",
        prompt=prompt,
        sampling=sampling,
        starts=(SequenceStart(0),),
    )


def _figures(requests: list[Request], seconds: float) -> Figures:
    first = [each.tokens_at[0] - each.asked for each in requests]
    per_token = [
        (each.tokens_at[-1] - each.tokens_at[0]) / (len(each.tokens_at) - 1) for each in requests
    ]
    gaps = [after - before for each in requests for before, after in pairwise(each.tokens_at)]
    count = sum(len(each.tokens_at) for each in requests)
    return Figures(
        count / seconds, _at(first, 50), _at(first, 99), _at(per_token, 50), _at(gaps, 99)
    )


def _at(values: list[float], percent: int) -> float:
    return quantiles(values, n=100)[percent - 1] * 1e3


def budgets(text: str) -> Iterator[tuple[int, int]]:
    for each in text.split(","):
        total, _, beside = each.partition(":")
        yield int(total), int(beside or total)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(CARDS), default="qwen3-8b")
    parser.add_argument("--budgets", default="8192,8192:4096,8192:2048,8192:1024,8192:512,2048")
    parser.add_argument("--cases", default="", help="IN/OUT/CLIENTS, ...; default: some")
    options = parser.parse_args()
    for case in options.cases.split(",") if options.cases else CASES[options.model]:
        for total, beside in budgets(options.budgets):
            found = measure(CARDS[options.model], case, total, beside)
            print(
                f"{options.model} {case} {total}:{beside}: {found.throughput:,.0f} tok/s, "
                f"TTFT {found.ttft_p50:.0f} / {found.ttft_p99:.0f} ms, "
                f"TPOT {found.tpot_p50:.1f} ms, ITL p99 {found.itl_p99:.0f} ms",
                flush=True,
            )


if __name__ == "__main__":
    main()
