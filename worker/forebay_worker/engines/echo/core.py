"""EchoCore: every running sequence gets one token a step, and a step takes as long as is asked for.

It is driven by the engine's loop, as `engine.core` is, and does not sleep: while the time of a step
runs, it says that it is stalled, and the loop takes commands.
"""

import logging
from collections import deque
from collections.abc import Callable
from time import monotonic

from forebay_shared.errors import (
    DeadlineError,
    EngineError,
    ForebayError,
    OverloadedError,
    UnsupportedError,
)
from forebay_shared.models import CAP_GENERATE, ModelCard
from forebay_shared.settings import WorkerSettings
from forebay_shared.wire import (
    Delta,
    Done,
    FinishReason,
    Load,
    Started,
    Submit,
    TokenLogprobs,
)

from forebay_worker.engine import replies
from forebay_worker.engine.cache_log import CacheLog
from forebay_worker.engine.intake import checked_prompt
from forebay_worker.engine.ports import Event, Recorder
from forebay_worker.engines.echo.cache import EchoCache
from forebay_worker.engines.echo.model import CAPITALS, SPACE
from forebay_worker.engines.echo.sequence import Sequence

log = logging.getLogger(__name__)

PREFILL_TOKENS = 8_192
"""A step with so many prompt tokens starts no further sequence, where prefill takes time."""
_FAR = -100.0


class EchoCore:
    """The requests of one echo engine. Every method returns at once."""

    def __init__(
        self,
        card: ModelCard,
        settings: WorkerSettings,
        recorder: Recorder,
        cache_log: CacheLog | None = None,
    ) -> None:
        self._card = card
        self._settings = settings
        self._recorder = recorder
        self._delay_s = settings.echo_delay_ms / 1000
        self._cache_log = cache_log
        self._cache: EchoCache | None = None
        if cache_log is not None:
            blocks = settings.echo_cache_blocks
            self._cache = EchoCache(blocks, card.block_size, card.revision, cache_log)
        self._adapters = {each.name: each.revision for each in card.adapters}
        self._waiting: deque[Sequence] = deque()
        self._waiting_tokens = 0
        self._running: list[Sequence] = []
        self._events: list[Event] = []
        self._due = 0.0
        """When the step goes on, or the next one may begin; 0: at once."""
        self._next = 0.0
        """When the step after this one may begin."""
        self._prefilling = 0
        """Tokens that the step under way computes before it gives any."""
        self._prompt_tokens = self._cached_tokens = 0
        """Of the sequences that the step under way has started."""
        self._tokens = 0
        """That the step has given out."""

    @property
    def idle(self) -> bool:
        return not (self._running or self._waiting)

    @property
    def stalled(self) -> bool:
        """Nothing is to be done before the next deadline."""
        return self._due > 0.0 and not self.idle

    @property
    def healthy(self) -> bool:
        return True

    @property
    def next_deadline(self) -> float:
        return self._due

    def on_ready(self, wake: Callable[[], None]) -> None:
        """Nothing is done outside."""

    def check(self) -> None:
        """It keeps no books."""

    def take_events(self) -> list[Event]:
        """The events since the last call, in order."""
        if self._cache_log is not None:
            self._cache_log.flush()
        events, self._events = self._events, []
        return events

    def load(self) -> Load:
        return Load(
            running=len(self._running),
            waiting=len(self._waiting),
            waiting_tokens=self._prefilling + self._waiting_tokens,
            kv_usage=len(self._running) / self._settings.max_num_seqs,
            prefill_rate=self._settings.echo_prefill_rate,
        )

    def submit(self, submit: Submit, arrived: float) -> None:
        """Queues a request, or answers Failed. Raises nothing."""
        try:
            sequences = self._admit(submit, arrived)
        except ForebayError as error:
            self._refuse(submit, error)
        except Exception:
            log.exception("intake of request %s failed", submit.request_id)
            self._refuse(submit, EngineError("The engine could not take this request."))
        else:
            self._waiting.extend(sequences)
            self._waiting_tokens += sum(len(one.prompt) for one in sequences)

    def cancel(self, request_id: str, attempt: int, index: int | None = None) -> None:
        key = (request_id, attempt)
        self._abort(lambda one: one.key == key and index in (None, one.index))

    def cancel_gateway(self, gateway: str) -> None:
        self._abort(lambda one: one.gateway == gateway)

    def fail_all(self, error: ForebayError) -> None:
        self._fail({one.key: one.gateway for one in (*self._running, *self._waiting)}, error)

    def step(self) -> None:
        """One token for every running sequence, once those that it starts have had their prefill.

        What a step computes first takes a call of its own: until it is done, nothing is given out.
        """
        now = monotonic()
        if now < self._due:
            return
        if not self._prefilling:
            self._drop_expired(now)
            self._start_waiting(now)
            self._next = now + self._delay_s if self._delay_s else 0.0
            rate = self._settings.echo_prefill_rate
            if rate and (computed := self._prompt_tokens - self._cached_tokens):
                self._prefilling, self._due = computed, now + computed / rate
                return
        self._prefilling, self._due = 0, self._next
        self._give_tokens(now)

    def _admit(self, submit: Submit, arrived: float) -> list[Sequence]:
        """The sequences of a request. Raises the ForebayError that the client is to see."""
        card = self._card
        if CAP_GENERATE not in card.capabilities:
            raise UnsupportedError("This model makes embeddings only.")
        submit.sampling.validate(card.vocab_size)
        prompt = checked_prompt(submit.prompt, card.vocab_size, card.max_model_len)
        if len(self._waiting) + len(submit.starts) > self._settings.max_num_queued_reqs:
            raise OverloadedError("The worker's queue is full. Please retry.")
        return [
            Sequence(submit, start, prompt, card.max_model_len, arrived) for start in submit.starts
        ]

    def _refuse(self, submit: Submit, error: ForebayError) -> None:
        key = (submit.request_id, submit.attempt)
        self._events.append((submit.gateway, replies.failed(key, error)))

    def _abort(self, wanted: Callable[[Sequence], bool]) -> None:
        now = monotonic()
        found = {one for one in (*self._running, *self._waiting) if wanted(one)}
        for sequence in found:
            self._end(sequence, "abort", None, now)
        if found:
            self._take_out(found.__contains__)

    def _fail(self, requests: dict[replies.Key, str], error: ForebayError) -> None:
        """Ends requests, each with its gateway, for the same reason."""
        self._events += [(at, replies.failed(key, error)) for key, at in requests.items()]
        self._take_out(lambda one: one.key in requests)

    def _take_out(self, gone: Callable[[Sequence], bool]) -> None:
        self._running = [one for one in self._running if not gone(one)]
        self._waiting = deque(one for one in self._waiting if not gone(one))
        self._waiting_tokens = sum(len(one.prompt) for one in self._waiting)
        if not self._running:
            self._prefilling = 0

    def _drop_expired(self, now: float) -> None:
        """Fails the requests of which something still waits after its deadline."""
        late = {one.key: one.gateway for one in self._waiting if one.latest_start < now}
        if late:
            self._fail(late, DeadlineError("The request waited too long for its first step."))

    def _start_waiting(self, now: float) -> None:
        self._prompt_tokens = self._cached_tokens = 0
        paced = self._settings.echo_prefill_rate > 0
        while self._waiting and len(self._running) < self._settings.max_num_seqs:
            if paced and self._prompt_tokens - self._cached_tokens >= PREFILL_TOKENS:
                break
            sequence = self._waiting.popleft()
            self._waiting_tokens -= len(sequence.prompt)
            sequence.started = now
            if self._cache is not None:
                adapter = self._adapters.get(sequence.adapter, "")
                sequence.cached = self._cache.take(sequence.prompt, sequence.cache_salt, adapter)
                self._cached_tokens += sequence.cached
            queued_ms = (now - sequence.arrived) * 1000
            started = Started(*sequence.key, sequence.index, sequence.cached, queued_ms)
            self._events.append((sequence.gateway, started))
            self._prompt_tokens += len(sequence.prompt)
            self._running.append(sequence)

    def _give_tokens(self, now: float) -> None:
        self._tokens = 0
        ended = {sequence for sequence in self._running if self._advance(sequence, now)}
        if ended:
            self._running = [one for one in self._running if one not in ended]
        self._recorder.step(
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._tokens,
            prefix_queries=self._prompt_tokens if self._cache is not None else 0,
            prefix_hits=self._cached_tokens,
            preemptions=0,
            host_s=monotonic() - now,
        )

    def _advance(self, sequence: Sequence, now: float) -> bool:
        """Emits the next token of a sequence; True when that ended it."""
        position, prompt = sequence.position, sequence.prompt
        if position >= sequence.limit:
            self._end(sequence, "length", None, now)
            return True
        token = prompt[(position + sequence.index) % len(prompt)]
        if sequence.adapter:
            token = CAPITALS.get(token, token)
        if token in sequence.enders:
            if position >= sequence.min_tokens:
                self._end(sequence, "stop", token, now)
                return True
            token = SPACE
        sequence.position = position + 1
        alternatives = sequence.alternatives
        delta = Delta(
            sequence.request_id, sequence.attempt, sequence.index, position, [token],
            None if alternatives is None else _logprobs(token, alternatives),
        )  # fmt: skip
        self._events.append((sequence.gateway, delta))
        self._tokens += 1
        self._record(sequence, now)
        if sequence.position >= sequence.limit:
            self._end(sequence, "length", None, now)
            return True
        return False

    def _record(self, sequence: Sequence, now: float) -> None:
        if sequence.first_token:
            self._recorder.inter_token(now - sequence.last_token)
        else:
            sequence.first_token = now
            self._recorder.first_token(now - sequence.arrived)
        sequence.last_token = now

    def _end(self, sequence: Sequence, reason: FinishReason, token: int | None, now: float) -> None:
        usage = sequence.usage(now)
        done = Done(*sequence.key, sequence.index, reason, token, usage)
        self._events.append((sequence.gateway, done))
        self._recorder.finished(
            reason=reason,
            e2e_s=now - sequence.arrived,
            queued_s=usage.queued_ms / 1000,
            prefill_s=usage.prefill_ms / 1000,
            decode_s=usage.decode_ms / 1000,
            prompt_tokens=usage.prompt_tokens,
            generation_tokens=usage.completion_tokens,
            max_tokens=sequence.limit,
        )


def _logprobs(token: int, alternatives: int) -> list[TokenLogprobs]:
    """The echo is certain of its token."""
    others = [(other, _FAR) for other in range(alternatives) if other != token]
    return [TokenLogprobs(0.0, [(token, 0.0), *others][:alternatives])]
