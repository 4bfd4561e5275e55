"""`forebay worker`: builds the engine, serves until it is told to stop, drains, says farewell.

Exit codes: 0 after a clean stop, 1 when something fails. A StartError (no such engine or model) is
left to the command line, which prints its one line.
"""

import asyncio
import logging
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

import uvloop
from forebay_shared import collector, keys
from forebay_shared.bus import Publisher
from forebay_shared.errors import DrainingError, WorkerLostError
from forebay_shared.logs import configure_logging
from forebay_shared.reader import Reader
from forebay_shared.settings import WorkerSettings
from forebay_shared.supervise import Supervisor, shielded
from forebay_shared.telemetry import EngineMetrics, WorkerMetrics
from forebay_shared.tracing import opened
from prometheus_client import CollectorRegistry

from forebay_worker.alarm import last_resort
from forebay_worker.announcement import Announcement
from forebay_worker.beacon import Presence
from forebay_worker.digest import Digests
from forebay_worker.door import Bounds
from forebay_worker.engines.base import Engine, Measured
from forebay_worker.engines.naming import expected_names
from forebay_worker.engines.registry import build
from forebay_worker.service import Service
from forebay_worker.watchdog import Watchdog

if TYPE_CHECKING:
    from forebay_shared.tracing.spans import Tracing

log = logging.getLogger(__name__)

FAREWELL_S = 1.0
ENGINE_STOP_S = 5.0


def run(settings: WorkerSettings) -> int:
    """Runs one worker process; returns its exit code. Raises StartError before anything runs."""
    configure_logging(settings.log_level, "worker")
    worker = keys.incarnation()
    with Announcement(settings.redis_url, worker, expected_names(settings)) as announced:
        engine = build(settings)
        collector.calm()
        try:
            with (
                opened(settings.otlp_traces_endpoint, "forebay-worker") as tracing,
                asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
            ):
                serving = serve(
                    settings,
                    engine,
                    worker=worker,
                    loaded=announced.end,
                    tracing=tracing,
                    alarm=last_resort(),
                )
                runner.run(serving)
        except Exception:
            log.exception("the worker failed")
            return 1
    return 0


async def serve(
    settings: WorkerSettings,
    engine: Engine,
    *,
    worker: str = "",
    loaded: Callable[[], None] = lambda: None,
    stop: asyncio.Event | None = None,
    tracing: "Tracing | None" = None,
    alarm: Callable[[float], None] = lambda _: None,
) -> None:
    """Serves until SIGTERM, SIGINT or `stop`, then drains. Raises what a failed task raised.

    `worker` is this incarnation's name, where it has one yet; `loaded` is called before its first
    beacon. For `alarm` see `Watchdog`.
    """
    stop = stop or _stop_on_signals()
    worker = worker or keys.incarnation()
    metrics = _metrics(settings, engine, worker)
    publisher = Publisher(settings.redis_url)
    mishaps = WorkerMetrics(metrics.registry, engine=worker)
    bounds = Bounds(
        settings.max_num_queued_reqs, settings.max_num_queued_tokens, settings.team_queue_share
    )
    service = Service(worker, engine, publisher, mishaps, tracing, bounds)
    watchdog = Watchdog(engine, mishaps, settings.step_timeout_s, alarm)
    digests = Digests(worker, engine, publisher)
    service.on_sync = digests.sync
    presence = Presence(worker, engine, publisher, metrics, digests, service.fence)
    reader = Reader(settings.redis_url, [service.feed()])
    async with Supervisor("worker") as tasks:
        tasks.start("publisher", publisher.run())
        engine.start(service.emit, metrics)
        try:
            tasks.start("reader", reader.run())
            tasks.start("watch", service.watch())
            tasks.start("watchdog", watchdog.run())
            loaded()
            tasks.start("beacon", presence.run())
            log.info("worker %s serves %s", worker, engine.card.name)
            await _stopped(stop, tasks)
            await _drain(settings.drain_timeout_s, service, presence)
        finally:
            await shielded(_leave(engine, service, presence), ENGINE_STOP_S + FAREWELL_S)
    log.info("worker %s stopped", worker)


def _metrics(settings: WorkerSettings, engine: Engine, worker: str) -> EngineMetrics:
    """The engine's, in a registry that the process's own go into, too."""
    card = engine.card
    metrics = EngineMetrics(
        CollectorRegistry(),
        model_name=card.name,
        engine=worker,
        max_model_len=card.max_model_len,
    )
    metrics.cache_config(
        block_size=card.block_size,
        cache_dtype=settings.kv_cache_dtype,
        enable_prefix_caching=settings.enable_prefix_caching,
        gpu_memory_utilization=settings.gpu_memory_utilization,
    )
    if isinstance(engine, Measured):
        engine.measure(metrics.registry, worker)
    return metrics


def _stop_on_signals() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT; the second ends the process at once, as by default."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def handle(number: signal.Signals) -> None:
        stop.set()
        loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle, number)
    return stop


async def _stopped(stop: asyncio.Event, tasks: Supervisor) -> None:
    """Waits for the stop, or raises what ended a task."""
    stopping = asyncio.create_task(stop.wait())
    failing = asyncio.create_task(tasks.failure())
    try:
        await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            failing.result()
    finally:
        stopping.cancel()
        failing.cancel()


async def _drain(timeout_s: float, service: Service, presence: Presence) -> None:
    """Finishes what it can in the time; the rest goes back to its gateways."""
    service.refuse(DrainingError("The worker is being stopped. Please retry."))
    presence.retire()
    log.info("draining %d requests", service.open_requests)
    if not await service.drained(timeout_s):
        log.warning("handed over %d requests that still ran", service.give_back())


async def _leave(engine: Engine, service: Service, presence: Presence) -> None:
    """Gives back what is still open, which is nothing after a drain; ends the engine, sends what is
    still to be said, then the farewell."""
    if not presence.draining:
        service.refuse(WorkerLostError("The worker was lost. Please retry."))
        presence.retire()
        service.give_back()
    await asyncio.to_thread(engine.stop, ENGINE_STOP_S)
    await service.flushed(FAREWELL_S / 2)
    await presence.farewell()
