"""What dead processes leave in Redis is cleared by one gateway, soon; what lives is left alone."""

import signal

import pytest
from bus_house import workers
from forebay_gateway import janitor
from forebay_gateway.backend import connect
from forebay_gateway.janitor import CLEAR
from forebay_shared import keys
from forebay_shared.settings import GatewaySettings, Secret
from redis_house import RedisServer, WaitUntil


async def test_the_keys_of_dead_processes_go_and_those_of_the_living_stay(
    redis_url: str,
    wait_until: WaitUntil,
    session_redis: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(janitor, "LEASE_MS", 600_000)  # who begins goes on, however slowly
    client = session_redis.client
    settings = GatewaySettings(redis_url=Secret(redis_url))
    async with connect(settings) as one, connect(settings) as other:
        with workers(redis_url, 4) as running:
            await wait_until(lambda: len(one.roster.workers) == 4)
            for worker in running[1:]:
                worker.send(signal.SIGKILL)
            client.sadd(keys.gateways(), "dead")
            client.xadd(keys.reply("dead"), {"p": b"late"})
            await wait_until(lambda: len(one.roster.workers) == 1)
            (living,) = one.roster.workers
            await wait_until(lambda: client.hkeys(keys.members()) == [living.encode()])
            await wait_until(lambda: not client.sismember(keys.gateways(), "dead"))
            left = {key.decode() for key in client.scan_iter("fb:{w:*")}
            own = (keys.work, keys.worker_lease, keys.worker_card)
            assert left <= {key(living) for key in own}
            assert client.exists(keys.work(living), keys.worker_card(living)) == 2
            assert client.exists(keys.reply("dead")) == 0
            assert client.exists(keys.reply(one.gateway), keys.reply(other.gateway)) == 2
            done = [each.telemetry.fleet.strays_cleared._value.get() for each in (one, other)]
            assert sorted(done) == [0, 4]
            client.set(keys.gateway_lease("back"), "1", px=60_000)
            client.set(keys.reply("back"), "kept", px=60_000)
            names = [keys.gateway_lease("back"), keys.reply("back")]
            assert await CLEAR.send(one.publisher, names, [keys.LEASE_MOST_MS]) == 0
            assert client.exists(*names) == 2
