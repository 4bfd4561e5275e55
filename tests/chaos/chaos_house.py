"""A small fleet that is meant to be broken: two gateways, two workers, one Redis, three teams.

What dies is started again where it was, as a supervisor would. A trial is one fault under load,
and what must hold when it is over.
"""

import contextlib
import random
import secrets
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from balance import Balance
from fleet_house import START_S, Fleet, Gateway, Process, Worker
from forebay_gateway.admin.client import AdminClient
from forebay_shared.settings import Secret, StartError
from load import End, Load
from meters import Meters
from redis_house import RedisServer
from requests_mix import TINY, Mix, TinyMix, echo_mix
from serve_house import until

ADMIN_KEY = "sk-admin-of-chaos"
CLIENTS = 10
TEAMS = ("red", "green", "blue")
ECHO = ("--engine", "echo", "--echo-delay-ms", "10", "--echo-cache-blocks", "200")
"""A step of 10 ms: an answer takes a second, so that a fault finds it in its middle."""
NARROW = "narrow"
"""A fourth team, that may have few requests open; a load asks for it by name."""
NARROW_SLOTS = 4
_TEAMS = [{"id": team, "keys": [{"name": "app"}]} for team in TEAMS]
_NARROW = {
    "id": NARROW,
    "limits": {"concurrent_requests": NARROW_SLOTS},
    "keys": [{"name": "app"}],
}
_DOCUMENT = {"organisations": [{"id": "acme", "teams": [*_TEAMS, _NARROW]}]}


class House:
    """`workers` are the flags of each, `variables` theirs too. `sound` until a trial fails."""

    def __init__(
        self,
        redis: RedisServer,
        workers: Sequence[tuple[str, ...]] = (ECHO, ECHO),
        mix: Mix = echo_mix,
        *,
        gateways: int = 2,
        gateway: tuple[str, ...] = (),
        **variables: str,
    ) -> None:
        self.redis = redis
        self.mix = mix
        self.sound = True
        self._meters: Meters | None = None
        self.fleet = Fleet(redis)
        self.marks = {"FOREBAY_ADMIN_KEY": ADMIN_KEY, "TEST_HOUSE": secrets.token_hex(8)}
        """Variables of all its processes; the second tells them from others'."""
        self._variables = variables
        self._kinds, self._gateway = workers, gateway
        try:
            self.workers = [self.new_worker(number) for number in range(len(workers))]
            self.gateways = [self.new_gateway(number) for number in range(gateways)]
            self.ready()
            self.make_teams()
            self.balance = Balance(self)
        except BaseException:
            self.close()
            raise

    def new_worker(self, number: int) -> Worker:
        """In place `number`; one that is not kept in `workers` is a guest."""
        return self.fleet.worker(
            *self._kinds[number % len(self._kinds)], **self.marks | self._variables
        )

    def new_gateway(self, number: int, port: int = 0) -> Gateway:
        return self.fleet.gateway(*self._gateway, port=port, **self.marks)

    @property
    def bases(self) -> list[str]:
        return [gateway.base for gateway in self.gateways]

    @property
    def processes(self) -> list[Process]:
        return [*self.gateways, *self.workers]

    def ready(self) -> None:
        """Waits until each gateway knows these very workers: it shows their metrics then."""
        for gateway in self.gateways:
            until(lambda g=gateway: all(self._shows(g, worker) for worker in self.workers), START_S)

    @staticmethod
    def _shows(gateway: Gateway, worker: Worker) -> bool:
        answer = gateway.get("/metrics") if worker.name else None
        return answer is not None and f'engine="{worker.name}"' in answer.text

    def heal(self) -> None:
        """Starts again what has ended, gateways on their old ports, and waits for all."""
        for number, gateway in enumerate(self.gateways):
            if not gateway.alive:
                gateway.close()
                self.gateways[number] = self.new_gateway(number, gateway.port)
        for number, worker in enumerate(self.workers):
            if not worker.alive:
                worker.close()
                self.workers[number] = self.new_worker(number)
        self.fleet.processes = list(self.processes)
        self.ready()

    def metric(self, name: str, **labels: str) -> float:
        """Summed over the house's processes, those that died lately included."""
        speaker = next(gateway for gateway in self.gateways if gateway.alive)
        return speaker.metric(name, **labels)

    def load(
        self,
        rng: random.Random,
        clients: int = CLIENTS,
        mix: Mix | None = None,
        keys: Sequence[str] = (),
    ) -> Load:
        return Load(self.bases, keys or self.keys, mix or self.mix, rng, clients)

    @contextlib.contextmanager
    def trial(
        self,
        rng: random.Random,
        *,
        ends: tuple[End, ...] = ("ok",),
        statuses: Collection[int] = (503,),
        clients: int = CLIENTS,
        mix: Mix | None = None,
        keys: Sequence[str] = (),
        books: bool = True,
    ) -> Iterator[Load]:
        """Runs a load; the block does the harm. Afterwards every request has ended in one of
        `ends`, what died is back, and the books balance. It is one of those that are `metered`.

        `books` False: Redis has lost them, so only the rest is looked at.
        """
        assert self._meters is not None, "say which metrics move: house.metered(…)"
        self.sound = False
        with self.load(rng, clients, mix, keys) as load:
            yield load
        load.only(*ends, statuses=statuses)
        self.heal()
        self.balance.check(load, books=books)
        self.sound = True

    @contextlib.contextmanager
    def metered(self, *moves: str, still: Sequence[str] = ()) -> Iterator[None]:
        """The block's trials must make each metric of `moves` move, and none of `still`; a metric
        is written as in a query, `name{label="value"}`. It is what an operator would see."""
        self._metrics_are_whole()
        with Meters(self._scrape) as self._meters:
            try:
                yield
                self._meters.check(moves, still)
            finally:
                self._meters = None

    def _metrics_are_whole(self) -> None:
        """Waits until the scrape shows every process: what one has counted before is its past."""
        gateways = len(self.gateways)
        until(lambda: self._scrape().count("\nforebay_workers{") >= gateways)
        until(lambda: all(f'engine="{worker.name}"' in self._scrape() for worker in self.workers))

    def _scrape(self) -> str:
        speaker = next((gateway for gateway in self.gateways if gateway.alive), None)
        answer = speaker and speaker.get("/metrics")
        return answer.text if answer is not None and answer.status_code == 200 else ""

    def close(self) -> None:
        self.fleet.close()

    def make_teams(self) -> None:
        """Teams with a key each, which every gateway knows. Also after Redis lost them.

        A token is told once, when its key is made: keys whose tokens are not known here, of a house
        before or of an answer that was lost, are made anew.
        """
        admin = AdminClient(self.gateways[0].base, Secret(ADMIN_KEY))
        tokens: dict[str, str] = {}

        def made() -> bool:
            with contextlib.suppress(StartError):  # a start takes long where much else runs
                admin.call("POST", "apply", {}, {"prune": True})
                tokens.update(admin.call("POST", "apply", _DOCUMENT)["tokens"])
            return bool(tokens)

        until(made)
        for gateway in self.gateways:
            for token in tokens.values():
                until(lambda g=gateway, t=token: _opens(g, t))
        named = {label.removeprefix("key/").partition("/")[0]: t for label, t in tokens.items()}
        self.narrow_key = named.pop(NARROW)
        self.keys = list(named.values())

    def add_teams(self, bounds: Mapping[str, Mapping[str, object]]) -> dict[str, str]:
        """Makes teams with these limits and budgets, by name. Their keys, which every gateway knows
        then."""
        teams = [{"id": name, "keys": [{"name": "app"}], **more} for name, more in bounds.items()]
        admin = AdminClient(self.gateways[0].base, Secret(ADMIN_KEY))
        document = {"organisations": [{"id": "acme", "teams": teams}]}
        tokens = admin.call("POST", "apply", document)["tokens"]
        for gateway in self.gateways:
            for token in tokens.values():
                until(lambda g=gateway, t=token: _opens(g, t))
        return {label.removeprefix("key/").partition("/")[0]: t for label, t in tokens.items()}


def _opens(gateway: Gateway, token: str) -> bool:
    answer = gateway.get("/v1/models", key=token)
    return answer is not None and answer.status_code == 200


def stop(process: Process) -> None:
    process.send(signal.SIGSTOP)


def resume(process: Process) -> None:
    process.send(signal.SIGCONT)


def tiny_flags(model: Path, pool_bytes: int = 4_000_000) -> tuple[str, ...]:
    """Of a worker with a native engine on a CPU."""
    name = ("--model", str(model), "--served-model-name", "tiny", "--max-model-len", "512")
    return (*name, "--kv-cache-memory-bytes", str(pool_bytes))


def tiny_house(redis: RedisServer, worker: tuple[str, ...], **variables: str) -> House:
    """Two such workers, which count all their blocks again whenever they rest; what is right is
    learned before any harm."""
    mix = TinyMix("tiny")
    counting = {"FOREBAY_LOG_LEVEL": "debug", "TEST_PACE_S": "0.01"}
    house = House(redis, (worker, worker), mix, **counting | variables)
    try:
        learn(house, mix)
    except BaseException:
        house.close()
        raise
    return house


def learn(house: House, mix: TinyMix) -> None:
    """Asks each kind of request alone."""
    for number in range(len(TINY)):
        for stream in (False, True):
            ask = mix.ask(number, stream=stream)
            answer = house.gateways[0].post(ask.path, dict(ask.body))
            assert answer.status_code == 200, answer.text
            mix.learn(number, stream=stream, transcript=ask.read(answer.content))
    house.balance.forget()
