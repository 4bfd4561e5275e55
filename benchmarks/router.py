"""The router in a simulated fleet that replays traces: hit share and TTFT by policy; its own cost.

    python benchmarks/router.py replay --traces DIR [--workload conversation] [--factors 2,4,5]
    python benchmarks/router.py gateways --traces DIR [--workload conversation] [--factors 4]
    python benchmarks/router.py pick [--workers 1000] [--blocks 100000]

    replay    round_robin; least_load, the router without its index; forebay; and oracle, the
              router with perfect sight of all caches, queues and what is on its way
    gateways  forebay with 1 and with 8 gateways, each with a view of its own
    pick      time of one choice, each the least of three, and the index's memory

`factors` speed the trace up. Router and index are the gateway's own code. All but `pick` is
simulated time (fleet.py has the cost model), so a seed gives the same figures on any machine. What
workers say is known 5 to 55 ms late, a request reaches its worker after 2 ms. `shared` is the hit
share of one cache as large as all together, which no routing beats. Rows go to
results/router.csv.
"""

import argparse
import csv
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, pstdev

from common import RESULTS
from fleet import CACHE_TOKENS, DECODE_RATE, PREFILL_RATE, Clock, Report, Request, SimWorker
from fleet_traces import BLOCK, WORKLOADS, block_hash, faster, load, shared_hits
from forebay_gateway.prefix_index import PrefixIndex
from forebay_gateway.roster import Worker
from forebay_gateway.router import pick
from forebay_gateway.routing import Pool, expect, route
from forebay_shared.models import ModelCard
from forebay_shared.wire import Load

DIGEST_S = 0.05
TRAVEL_S = 0.005
SUBMIT_S = 0.002
AGE_S = 15.0
POLICIES = ("round_robin", "least_load", "forebay", "oracle")


def known(name: str, number: int, block_size: int = BLOCK) -> Worker:
    """A worker as a gateway's roster has it."""
    worker = Worker(name, number)
    worker.card = ModelCard(
        names=("m",), revision="r", family="f", engine="simulated", tokenizer="", vocab_size=1,
        max_model_len=1 << 20, block_size=block_size, created=0,
    )  # fmt: skip
    return worker


class Asked:
    """A request as the router sees its prompt."""

    def __init__(self, request: Request) -> None:
        self.tokens = request.prompt
        self._chain = request.chain

    def blocks(self, block_size: int) -> list[int]:
        return self._chain


class Seen:
    """A simulated worker as it is at this moment, for the oracle."""

    def __init__(self, worker: SimWorker) -> None:
        self.name = ""
        self.number = worker.number
        self.queued_tokens = worker.tokens_to_prefill
        self.busy = worker.num_running + worker.num_waiting + len(worker.coming)
        self.prefill_rate = PREFILL_RATE * worker.speed
        self.decode_rate = DECODE_RATE * worker.speed


class View:
    """One gateway: what it knows of the fleet, and its policy."""

    def __init__(self, truth: list[SimWorker], policy: str, seed: int) -> None:
        self.index = PrefixIndex(1 << 30)
        self.workers = [known(f"w{one.number}", one.number) for one in truth]
        self.predicted = 0
        self._pool = Pool(self.workers)
        self._truth = truth
        self._policy = policy
        self._random = random.Random(seed)
        self._turn = seed

    def learn(self, number: int, report: Report, now: float) -> None:
        speed = self._truth[number].speed
        rates = (PREFILL_RATE * speed, DECODE_RATE * speed)
        queue = (report.running, report.waiting, report.waiting_tokens)
        self.workers[number].report(Load(*queue, 0.0, 0.0, *rates), now)
        if self._policy == "forebay":
            self.index.evict(number, report.evicted)
            self.index.store(number, report.stored)

    def choose(self, request: Request) -> tuple[int, int]:
        """The worker's number, and the hit that is expected there, in tokens."""
        tie = self._random.getrandbits(16)
        if self._policy == "round_robin":
            self._turn += 1
            return self._turn % len(self.workers), 0
        if self._policy == "oracle":
            seen = [Seen(one) for one in self._truth]
            held = [one.will_match(request.chain) * BLOCK for one in self._truth]
            holders = [pair for pair in zip(seen, held, strict=True) if pair[1]]
            best = pick(seen, holders, prompt_tokens=request.prompt, tie=tie)
            assert best is not None
            return best.worker.number, 0
        choice = route(self.index, self._pool, Asked(request), tie=tie)
        assert choice is not None
        if self._policy == "forebay":
            expect(self.index, choice.worker, request.chain)
        self.predicted += choice.cached_tokens
        return choice.worker.number, choice.cached_tokens


class Fleet:
    """Simulated workers behind gateways, and the requests that come to them."""

    def __init__(
        self, requests: list[Request], policy: str, *, workers: int, gateways: int, seed: int
    ) -> None:
        self.clock = Clock()
        self.workers = [SimWorker(number, self.clock, BLOCK) for number in range(workers)]
        self.views = [View(self.workers, policy, seed + at) for at in range(gateways)]
        self._random = random.Random(seed)
        self._left = len(requests)
        for worker in self.workers:
            worker.finished = self._finished
            self._digest(worker)
        for number, request in enumerate(requests):
            self.clock.at(request.at, self._arrival(request, str(number)))
        self._age()

    def _finished(self, _: Request) -> None:
        self._left -= 1

    def _arrival(self, request: Request, name: str) -> Callable[[], None]:
        def arrive() -> None:
            now = self.clock.now
            view = self._random.choice(self.views)
            number, cached = view.choose(request)
            worker = view.workers[number]
            worker.place(name, request.prompt - cached)
            self.workers[number].coming.append(request)
            self.clock.at(now + SUBMIT_S, lambda: self.workers[number].submit(request))
            accepted = now + SUBMIT_S + TRAVEL_S
            self.clock.at(accepted, lambda: worker.settle(name, self.clock.now))

        return arrive

    def _digest(self, worker: SimWorker) -> None:
        if not self._left:
            return
        report = worker.report()

        def deliver() -> None:
            for view in self.views:
                view.learn(worker.number, report, self.clock.now)

        self.clock.at(self.clock.now + TRAVEL_S, deliver)
        self.clock.at(self.clock.now + DIGEST_S, lambda: self._digest(worker))

    def _age(self) -> None:
        if self._left:
            for view in self.views:
                view.index.age()
            self.clock.at(self.clock.now + AGE_S, self._age)


def replay(
    requests: list[Request], factor: float, policy: str, *, workers: int, gateways: int, seed: int
) -> dict[str, float]:
    """Runs one fleet to the end; its figures."""
    own = faster(requests, factor)
    fleet = Fleet(own, policy, workers=workers, gateways=gateways, seed=seed)
    fleet.clock.run()
    tokens = sum(one.prompt for one in own)
    ttft = sorted(one.ttft_s for one in own)
    held = sum(len(worker.cache) for worker in fleet.workers)
    work = [worker.prefilled for worker in fleet.workers]
    room = workers * CACHE_TOKENS // BLOCK
    return {
        "hit": sum(one.cached for one in own) / tokens,
        "predicted": sum(view.predicted for view in fleet.views) / tokens,
        "shared": shared_hits(own, room) * BLOCK / tokens,
        "ttft_p50_s": ttft[len(ttft) // 2],
        "ttft_p90_s": ttft[len(ttft) * 9 // 10],
        "ttft_p99_s": ttft[len(ttft) * 99 // 100],
        "prefill_spread": pstdev(work) / mean(work),
        "index_bytes_per_block": max(view.index.nbytes for view in fleet.views) / held,
    }


def time_picks(workers: int, blocks: int, seed: int) -> dict[str, float]:
    """Choices among many workers that hold many blocks, of which each tenth is everybody's."""
    index, source = PrefixIndex(1 << 40), random.Random(seed)
    everybody = [block_hash(number) for number in range(64)]
    fleet = [known(f"w{number}", number, 64) for number in range(workers)]
    ends: list[list[int]] = []
    began = time.process_time()
    for worker in fleet:
        worker.report(Load(source.randrange(200), 0, source.randrange(50_000)), 0.0)
        own = [source.getrandbits(64) for _ in range(blocks - len(everybody))]
        index.store(worker.number, everybody)
        index.store(worker.number, own)
        ends.append(own[:1000])
    build_s = time.process_time() - began
    pool = Pool(fleet)
    taken: list[float] = []
    for number in range(20_000):
        chain = everybody + source.choice(ends)[: source.randrange(1000)]
        asked = Asked(Request(0.0, len(chain) * 64 + 65, 1, chain))
        taken.append(min(_time_pick(index, pool, asked, number * 31) for _ in range(3)))
    taken.sort()
    count = len(index)
    return {
        "pick_p50_us": taken[len(taken) // 2] * 1e6,
        "pick_p99_us": taken[len(taken) * 99 // 100] * 1e6,
        "store_us": build_s / (workers * blocks) * 1e6,
        "index_mib": index.nbytes / (1 << 20),
        "index_bytes_per_block": index.nbytes / (count + len(everybody) * (workers - 1)),
    }


def _time_pick(index: PrefixIndex, pool: Pool[Worker], asked: Asked, tie: int) -> float:
    """Seconds by the wall clock, which is read without a system call: a processor's clock costs as
    much as a pick on some machines. The least of a few leaves out what others do meanwhile."""
    began = time.perf_counter()
    route(index, pool, asked, tie=tie)
    return time.perf_counter() - began


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("what", choices=["replay", "gateways", "pick"])
    made.add_argument("--traces", type=Path, help="folder with the trace files")
    made.add_argument("--workload", choices=WORKLOADS, default="conversation")
    made.add_argument("--factors", default="2,4,5,6", help="default: %(default)s")
    made.add_argument("--requests", type=int, default=6_000, help="default: %(default)s")
    made.add_argument("--workers", type=int, help="default: 8; for pick 1,000")
    made.add_argument("--blocks", type=int, default=100_000, help="per worker, for pick")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--no-save", action="store_true")
    flags = made.parse_args()
    flags.workers = flags.workers or (1_000 if flags.what == "pick" else 8)
    if flags.what == "pick":
        figures = time_picks(flags.workers, flags.blocks, flags.seed)
        show(flags, "pick", f"{flags.blocks} blocks", 0.0, 1, figures)
        return
    requests = load(flags.traces, flags.workload, flags.requests, flags.seed)
    runs = [("forebay", 1), ("forebay", 8)]
    if flags.what == "replay":
        runs = [(policy, 1) for policy in POLICIES]
    for factor in map(float, flags.factors.split(",")):
        for policy, gateways in runs:
            figures = replay(
                requests, factor, policy, workers=flags.workers, gateways=gateways, seed=flags.seed
            )
            show(flags, flags.workload, policy, factor, gateways, figures)


def show(
    flags: argparse.Namespace,
    workload: str,
    policy: str,
    factor: float,
    gateways: int,
    figures: dict[str, float],
) -> None:
    """Prints a run and appends it to the results."""
    texts = {name: f"{value:.4g}" for name, value in figures.items()}
    print(workload, policy, f"x{factor:g} gateways={gateways}", texts, flush=True)
    if flags.no_save:
        return
    path = RESULTS / "router.csv"
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        rows = csv.writer(file)
        if fresh:
            rows.writerow(
                [
                    "workload",
                    "policy",
                    "factor",
                    "workers",
                    "gateways",
                    "requests",
                    "seed",
                    "metric",
                    "value",
                ]
            )
        run = [workload, policy, factor, flags.workers, gateways, flags.requests, flags.seed]
        rows.writerows([*run, name, text] for name, text in texts.items())


if __name__ == "__main__":
    main()
