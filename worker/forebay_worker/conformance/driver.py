"""Drives one engine and keeps what it emits, by request, in order."""

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence

from forebay_shared.asked import Asked
from forebay_shared.models import ModelCard
from forebay_shared.sampling import SamplingParams
from forebay_shared.telemetry import EngineMetrics
from forebay_shared.wire import (
    Delta,
    Done,
    Embedded,
    Failed,
    Load,
    Reply,
    SequenceStart,
    Started,
    Submit,
    SubmitText,
    TextDelta,
    pack_ids,
)
from prometheus_client import CollectorRegistry

from forebay_worker.engines.base import Engine, Teller

WAIT_S = 120.0
"""An engine on a slow CPU may take its time; none may take for ever."""
GATEWAY = "conformance"


class Outcome:
    """What came of one sequence: its tokens, how it ended, and whether all came in order."""

    def __init__(self, replies: Sequence[Reply], index: int = 0, emitted: int = 0) -> None:
        mine = [reply for reply in replies if getattr(reply, "index", index) == index]
        self.started = [reply for reply in mine if isinstance(reply, Started)]
        self.deltas = [reply for reply in mine if isinstance(reply, Delta)]
        self.done = [reply for reply in mine if isinstance(reply, Done)]
        self.failed = [reply for reply in mine if isinstance(reply, Failed)]
        self.token_ids = [token for delta in self.deltas for token in delta.token_ids]
        self._check(mine, emitted)

    def _check(self, mine: Sequence[Reply], emitted: int) -> None:
        for delta in self.deltas:
            assert delta.token_ids, "a Delta holds at least one token"
            assert delta.offset == emitted, "offsets count what was emitted before, without a gap"
            emitted += len(delta.token_ids)
        if not self.failed:
            assert len(self.started) == 1, "one Started for each sequence"
            assert len(self.done) == 1, "one Done for each sequence"
            kinds = [type(reply) for reply in mine if isinstance(reply, Started | Delta | Done)]
            assert kinds[0] is Started, "Started comes first"
            assert kinds[-1] is Done, "nothing comes after Done"

    @property
    def reason(self) -> str:
        assert not self.failed, self.failed
        return self.done[0].finish_reason


class Driven:
    """A started engine. Every request gets an id of its own."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._numbers = itertools.count()
        self._replies: defaultdict[str, list[Reply]] = defaultdict(list)
        self._gateways: dict[str, str] = {}
        self._arrived = threading.Condition()
        card = engine.card
        metrics = EngineMetrics(
            CollectorRegistry(),
            model_name=card.name,
            engine=GATEWAY,
            max_model_len=card.max_model_len,
        )
        engine.start(self._emit, metrics)

    @property
    def card(self) -> ModelCard:
        return self.engine.card

    def _emit(self, events: Sequence[tuple[str, Reply]]) -> None:
        with self._arrived:
            for gateway, reply in events:
                assert gateway == self._gateways[reply.request_id], "to the gateway that asked"
                self._replies[reply.request_id].append(reply)
            self._arrived.notify_all()

    def name(self, gateway: str) -> str:
        """An id for a request of `gateway`."""
        request_id = f"request-{next(self._numbers)}"
        self._gateways[request_id] = gateway
        return request_id

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *starts: SequenceStart,
        gateway: str = GATEWAY,
        cache_salt: str = "",
        priority: int = 0,
        adapter: str = "",
    ) -> str:
        """Queues a request; its id."""
        request_id = self.name(gateway)
        self.engine.submit(
            Submit(
                request_id=request_id,
                attempt=1,
                gateway=gateway,
                prompt=pack_ids(prompt),
                sampling=sampling,
                starts=starts or (SequenceStart(),),
                cache_salt=cache_salt,
                priority=priority,
                adapter=adapter,
            )
        )
        return request_id

    def submit_text(
        self, asked: Asked, sampling: SamplingParams, *given: str, indexes: tuple[int, ...] = (0,)
    ) -> str:
        """Queues a request for an engine that speaks text; its id."""
        assert isinstance(self.engine, Teller)
        request_id = self.name(GATEWAY)
        self.engine.submit_text(
            SubmitText(
                request_id=request_id,
                attempt=1,
                gateway=GATEWAY,
                asked=asked,
                sampling=sampling,
                given=given,
                indexes=indexes,
            )
        )
        return request_id

    def replies(self, request_id: str) -> list[Reply]:
        with self._arrived:
            return list(self._replies[request_id])

    def wait(self, condition: Callable[[], bool]) -> None:
        """Until `condition`, which is asked again after each step's events."""
        with self._arrived:
            assert self._arrived.wait_for(condition, WAIT_S), "the engine did not answer in time"

    def wait_tokens(self, request_id: str, count: int = 1) -> None:
        """Until so many tokens of a request have come, or it has failed."""
        self.wait(
            lambda: (
                sum(map(_tokens, self._replies[request_id])) >= count
                or any(isinstance(reply, Failed) for reply in self._replies[request_id])
            )
        )

    def ended(self, request_id: str, sequences: int = 1) -> list[Reply]:
        """All replies of a request, once it is over."""
        self.wait(lambda: _over(self._replies[request_id], sequences))
        return self.replies(request_id)

    def run(
        self, prompt: Sequence[int], sampling: SamplingParams, *starts: SequenceStart
    ) -> list[Outcome]:
        """One request to its end; the outcome of each sequence."""
        return self.outcomes(self.submit(prompt, sampling, *starts), *starts)

    def outcomes(self, request_id: str, *starts: SequenceStart) -> list[Outcome]:
        starts = starts or (SequenceStart(),)
        replies = self.ended(request_id, len(starts))
        return [Outcome(replies, start.index, len(start.emitted) // 4) for start in starts]

    def load(self) -> Load:
        return self.engine.load()

    def stop(self) -> None:
        self.engine.stop(10.0)


def _tokens(reply: Reply) -> int:
    return len(reply.token_ids) if isinstance(reply, Delta) else isinstance(reply, TextDelta)


def _over(replies: Sequence[Reply], sequences: int) -> bool:
    if any(isinstance(reply, Failed | Embedded) for reply in replies):
        return True
    return sum(isinstance(reply, Done) for reply in replies) >= sequences
