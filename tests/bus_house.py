"""What the tests of the bus share: echo workers as processes, jobs, answers put together."""

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from forebay_gateway.backend import Backend
from forebay_gateway.generation import Generation
from forebay_gateway.jobs import Job
from forebay_gateway.ledger import Event
from forebay_shared import keys
from forebay_shared.sampling import SamplingParams
from forebay_shared.wire import Delta, Done, Started

LONG_LEASE_S = 60.0
_WORKER = """
import sys
from forebay_shared import keys
if sys.argv[5] != "0.0":
    keys.LEASE_MS = int(float(sys.argv[5]) * 1000)  # before anybody else has read it
from forebay_shared.settings import Secret, WorkerSettings
from forebay_worker.main import run
sys.exit(run(WorkerSettings(
    engine="echo", redis_url=Secret(sys.argv[1]), echo_delay_ms=float(sys.argv[2]),
    drain_timeout_s=float(sys.argv[3]), echo_cache_blocks=int(sys.argv[4]),
    enable_lora=len(sys.argv) > 6, lora_modules=tuple(sys.argv[6:]),
)))
"""


class WorkerProcess:
    """A real worker with the echo engine."""

    def __init__(
        self,
        url: str,
        delay_ms: float = 0.0,
        drain_s: float = 5.0,
        cache_blocks: int = 0,
        lease_s: float = 0.0,
        adapters: Sequence[str] = (),
    ) -> None:
        options = [str(delay_ms), str(drain_s), str(cache_blocks), str(lease_s)]
        arguments = [sys.executable, "-c", _WORKER, url, *options, *adapters]
        self.process = subprocess.Popen(arguments, stderr=subprocess.DEVNULL)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def workers(
    url: str,
    count: int,
    *,
    delay_ms: float = 0.0,
    drain_s: float = 5.0,
    cache_blocks: int = 0,
    lease_s: float = 0.0,
    adapters: Sequence[str] = (),
) -> Iterator[list[WorkerProcess]]:
    """Starts `count` workers; kills what is left of them. The list may grow meanwhile.

    `lease_s` takes the place of the usual lease, in the workers; `adapters` are NAME=PATH each.
    """
    running = [
        WorkerProcess(url, delay_ms, drain_s, cache_blocks, lease_s, adapters) for _ in range(count)
    ]
    try:
        yield running
    finally:
        for worker in running:
            worker.kill()


@dataclass
class Answer:
    """What a client got, by index."""

    tokens: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    done: dict[int, Done] = field(default_factory=dict[int, Done])
    started: list[int] = field(default_factory=list[int])

    def take(self, events: Sequence[Event]) -> None:
        for event in events:
            assert event.index not in self.done
            if isinstance(event, Started):
                assert event.index not in self.started
                self.started.append(event.index)
            elif isinstance(event, Delta):
                tokens = self.tokens.setdefault(event.index, [])
                assert event.offset == len(tokens)
                tokens.extend(event.token_ids)
            else:
                self.done[event.index] = event

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens.values()))


def job(
    backend: Backend,
    prompt: Sequence[int] = (1, 2, 3),
    *,
    tokens: int = 8,
    n: int = 1,
    cache_salt: str = "",
    model: str = "echo",
) -> Job:
    """A job for the echo model, or an adapter of it."""
    return Job(
        request_id=keys.incarnation(),
        card=backend.roster.find(model),
        prompt=list(prompt),
        sampling=SamplingParams(max_tokens=tokens),
        n=n,
        cache_salt=cache_salt,
    )


def expected(prompt: Sequence[int], tokens: int, index: int = 0) -> list[int]:
    """What the echo engine answers."""
    return [prompt[(position + index) % len(prompt)] for position in range(tokens)]


async def answer(
    generation: Generation, until: int | None = None, so_far: Answer | None = None
) -> Answer:
    """Collects the events, after `so_far`; stops early once `until` tokens are there."""
    collected = so_far or Answer()
    while until is None or collected.count < until:
        events = await generation.events()
        if not events:
            break
        collected.take(events)
    return collected


async def run_job(backend: Backend, one: Job) -> Answer:
    async with backend.dispatcher.generate(one) as generation:
        return await answer(generation)
