"""A worker's lease: what it takes for lost is what gateways take for lost."""

import asyncio

import pytest
from forebay_shared import keys
from forebay_shared.bus import Publisher
from forebay_shared.settings import Secret, WorkerSettings
from forebay_shared.telemetry import EngineMetrics
from forebay_worker.beacon import LOST_S, Presence
from forebay_worker.digest import Digests
from forebay_worker.engines.echo.engine import EchoEngine
from prometheus_client import CollectorRegistry

LEASE_S = keys.LEASE_MS / 1000


async def test_a_lease_is_lost_when_beacons_come_so_far_apart(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lapsed: list[float] = []
    engine = EchoEngine(WorkerSettings(engine="echo"))
    publisher = Publisher(Secret(redis_url))
    metrics = EngineMetrics(CollectorRegistry(), model_name="m", engine="w", max_model_len=1)
    digests = Digests("w", engine, publisher)
    now = 1000.0
    presence = Presence("w", engine, publisher, metrics, digests, lambda: lapsed.append(now))
    with monkeypatch.context() as patch:  # no await in here: no timer of the loop would fire
        patch.setattr(asyncio.get_running_loop(), "time", lambda: now)
        presence.renew()
        for _ in range(3):  # in time, as a busy process is now and then
            now += LOST_S - 0.01
            presence.renew()
        assert lapsed == []
        now += LEASE_S  # it was stopped as it would have renewed: for less than a lease
        presence.renew()
        assert lapsed == [now]
        now += keys.RENEW_S
        presence.renew()
        assert len(lapsed) == 1
