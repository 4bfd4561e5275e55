"""Plays requests against a server: arrivals by plan, concurrency under a limit. No metrics."""

import asyncio
import itertools
import math
import random
from collections.abc import Callable, Sequence

from forebay_gateway.bench.client import Client, Outcome


def arrivals(count: int, rate: float, burstiness: float, rng: random.Random) -> list[float]:
    """Seconds from the start to each of `count` requests, at `rate` per second; inf is all at once.

    Gaps follow a gamma distribution of shape `burstiness`: 1 is a Poisson process, below it is
    burstier, above it is more even. They are scaled so that the last arrives at count / rate: two
    seeds differ in pattern, never in load.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = [rng.gammavariate(burstiness, 1.0) for _ in range(count)]
    scale = count / rate / sum(gaps) if gaps else 0.0
    return [at * scale for at in itertools.accumulate(gaps)]


async def play(
    client: Client,
    bodies: Sequence[bytes],
    offsets: Sequence[float],
    *,
    max_concurrency: int | None = None,
    request_ids: str = "",
    on_done: Callable[[Outcome], None] = lambda outcome: None,
) -> tuple[list[Outcome], float]:
    """Sends body i at offset i, or later while `max_concurrency` are open.

    Returns the outcomes, in the order of the bodies, and the seconds that all took.
    """
    gate = asyncio.Semaphore(max_concurrency or max(1, len(bodies)))
    start = client.clock()

    async def one(index: int, body: bytes) -> Outcome:
        due = client.clock()
        async with gate:
            outcome = await client.stream(body, f"{request_ids}{index}" if request_ids else "")
        outcome.queued = outcome.sent - due
        on_done(outcome)
        return outcome

    tasks: list[asyncio.Task[Outcome]] = []
    async with asyncio.TaskGroup() as group:
        for index, (body, offset) in enumerate(zip(bodies, offsets, strict=True)):
            wait = start + offset - client.clock()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(group.create_task(one(index, body), name=f"bench-{index}"))
    return [task.result() for task in tasks], client.clock() - start
