"""Boxes: each reply to its own attempt, woken once per packet, bounded for a slow client."""

import asyncio

import pytest
from forebay_gateway.inbox import COMPACT_AT, MAX_TOKENS, Inbox
from forebay_shared.errors import OverloadedError
from forebay_shared.telemetry import GatewayMetrics
from forebay_shared.wire import Delta, TokenLogprobs
from prometheus_client import CollectorRegistry


@pytest.fixture
def metrics() -> GatewayMetrics:
    return GatewayMetrics(CollectorRegistry())


def _dropped(metrics: GatewayMetrics, reason: str) -> float:
    value = metrics.registry.get_sample_value("forebay_dropped_replies_total", {"reason": reason})
    return value or 0.0


async def test_unknown_and_stale_replies_are_dropped_and_counted(metrics: GatewayMetrics) -> None:
    inbox = Inbox(metrics)
    old = inbox.open("r", 1)
    box = inbox.open("r", 2)
    inbox.close(old)  # closing the old attempt's box must leave the new one open
    inbox.deliver(
        [Delta("r", 1, 0, 0, [1]), Delta("other", 1, 0, 0, [2]), Delta("r", 2, 0, 0, [3])]
    )
    assert box.take() == [Delta("r", 2, 0, 0, [3])]
    assert (_dropped(metrics, "fenced"), _dropped(metrics, "unknown")) == (1, 1)
    inbox.close(box)
    assert len(inbox) == 0


async def test_a_waiter_wakes_once_per_packet_with_all_of_it_merged(
    metrics: GatewayMetrics,
) -> None:
    inbox = Inbox(metrics)
    box = inbox.open("r", 1)
    takes: list[int] = []

    async def client() -> None:
        for _ in range(2):
            await box.wait()
            takes.append(len(box.take()))

    task = asyncio.create_task(client())
    await asyncio.sleep(0)
    inbox.deliver([Delta("r", 1, 0, place, [place]) for place in range(10)])
    await asyncio.sleep(0)
    assert takes == [1]
    inbox.deliver([Delta("r", 1, 0, 10, [10])])
    await task
    assert takes == [1, 1]


async def test_a_slow_client_holds_few_objects_and_is_cut_at_the_bound(
    metrics: GatewayMetrics,
) -> None:
    inbox = Inbox(metrics)
    box = inbox.open("r", 1)
    for place in range(MAX_TOKENS - COMPACT_AT):
        inbox.deliver([Delta("r", 1, 0, place, [1])])
    assert len(box._pending) <= COMPACT_AT
    assert box.error is None
    assert inbox.tokens == MAX_TOKENS - COMPACT_AT
    for place in range(MAX_TOKENS - COMPACT_AT, MAX_TOKENS + 2 * COMPACT_AT):
        inbox.deliver([Delta("r", 1, 0, place, [1])])
    assert isinstance(box.error, OverloadedError)


async def test_log_probabilities_count_towards_the_bound(metrics: GatewayMetrics) -> None:
    inbox = Inbox(metrics)
    box = inbox.open("r", 1)
    logprobs = TokenLogprobs(-1.0, [(token, -1.0) for token in range(20)])
    for place in range(MAX_TOKENS // 20):
        inbox.deliver([Delta("r", 1, 0, place, [1], [logprobs])])
    assert isinstance(box.error, OverloadedError)


async def test_a_cancelled_wait_loses_nothing(metrics: GatewayMetrics) -> None:
    inbox = Inbox(metrics)
    box = inbox.open("r", 1)
    task = asyncio.create_task(box.wait())
    await asyncio.sleep(0)
    inbox.deliver([Delta("r", 1, 0, 0, [1])])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await box.wait()
    assert box.take() == [Delta("r", 1, 0, 0, [1])]
