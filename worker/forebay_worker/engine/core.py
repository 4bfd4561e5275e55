"""EngineCore: schedule, run, postprocess. Requests go in, each step's events come out.

It is synchronous and single-threaded: the loop drives it from the engine's thread, `LLM` from the
caller's. It knows messages, never how they travel. What goes wrong in a request ends only that.
"""

import logging
from collections.abc import Callable
from time import monotonic

from forebay_shared.errors import (
    DeadlineError,
    EngineError,
    ForebayError,
    InvalidRequestError,
)
from forebay_shared.settings import WorkerSettings
from forebay_shared.wire import FinishReason, Load, Submit, Usage

from forebay_worker.engine import replies
from forebay_worker.engine.batch import Sampled
from forebay_worker.engine.block_manager import BlockManager
from forebay_worker.engine.cache_log import CacheLog
from forebay_worker.engine.grammar import Grammars
from forebay_worker.engine.intake import Limits
from forebay_worker.engine.pipeline import Flight, Pipeline
from forebay_worker.engine.poison import Poison
from forebay_worker.engine.ports import Event, Recorder, Runner
from forebay_worker.engine.rates import Rates
from forebay_worker.engine.replies import Key
from forebay_worker.engine.requests import Request, Requests
from forebay_worker.engine.scheduler import Plan, Scheduler
from forebay_worker.engine.sequence import Sequence

_log = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""After this many failed steps in a row the engine calls itself dead."""


class EngineCore:
    """One model's requests. Every method returns at once but `step`, which runs the model."""

    def __init__(
        self,
        runner: Runner,
        limits: Limits,
        settings: WorkerSettings,
        recorder: Recorder,
        *,
        revision: str = "",
        grammars: Grammars | None = None,
        cache_log: CacheLog | None = None,
    ) -> None:
        self._poison = Poison(runner) if settings.debug_poison_freed_blocks else None
        self.blocks = BlockManager(
            runner.num_blocks,
            runner.block_size,
            revision=revision,
            caching=settings.enable_prefix_caching,
            changed=None if cache_log is None else cache_log.note,
            freed=None if self._poison is None else self._poison.note,
        )
        if cache_log is not None:
            cache_log.everything = self.blocks.published
        self._cache_log = cache_log
        self._rates = Rates()
        self.scheduler = Scheduler(
            self.blocks,
            max_num_seqs=settings.max_num_seqs,
            token_budget=settings.max_num_batched_tokens or runner.token_budget,
            prefill_budget=settings.max_num_prefill_tokens or runner.prefill_budget,
        )
        self._pipeline = Pipeline(runner, recorder.step_failed)
        self._recorder = recorder
        self._grammars = grammars
        self._requests = Requests(limits, grammars, settings.max_num_queued_reqs)
        self._serial = 0
        self._events: list[Event] = []
        self._failed_steps = 0

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and not self._requests.num_preparing and not self._pipeline

    @property
    def stalled(self) -> bool:
        """Whether all that is left waits for its grammar."""
        return self.scheduler.idle and self._requests.num_preparing > 0 and not self._pipeline

    @property
    def healthy(self) -> bool:
        return self._failed_steps < MAX_FAILED_STEPS

    @property
    def next_deadline(self) -> float | None:
        """When the next waiting request expires, if none of it is served by then."""
        return self._requests.next_deadline

    def on_ready(self, wake: Callable[[], None]) -> None:
        """Has `wake` called, on another thread, when a grammar is ready for the next step."""
        if self._grammars is not None:
            self._grammars.wake = wake

    def wait_for_grammar(self, timeout_s: float) -> None:
        """Queues what has its grammar by now; waits for the first one at most so long."""
        for request, preparation in self._requests.prepared(timeout_s):
            if preparation.error is not None:
                self._fail(request, preparation.error)
            else:
                self._enqueue_all(request)

    def check(self) -> None:
        """Raises when an idle engine's books do not balance."""
        self.blocks.check_integrity()

    def take_events(self) -> list[Event]:
        """The events since the last call, in order; changes of the cache go on their own way."""
        if self._cache_log is not None:
            self._cache_log.flush()
        events, self._events = self._events, []
        return events

    def load(self) -> Load:
        return Load(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting) + self._requests.num_preparing,
            waiting_tokens=self.scheduler.tokens_to_prefill,
            kv_usage=self.blocks.usage,
            prefill_rate=self._rates.prefill,
            decode_rate=self._rates.decode,
        )

    def submit(self, submit: Submit, arrived: float) -> None:
        """Queues a request, or answers Failed; a duplicate is dropped. Raises nothing.

        Accepted is the service's to say, which does not wait for a step.
        """
        key = (submit.request_id, submit.attempt)
        if key in self._requests:
            return
        try:
            request = self._requests.open(submit, key, arrived)
        except ForebayError as error:
            self._refuse(key, submit.gateway, error)
        except Exception:
            _log.exception("intake of request %s failed", submit.request_id)
            self._refuse(
                key, submit.gateway, EngineError("The engine could not take this request.")
            )
        else:
            if request.preparation is None:
                self._enqueue_all(request)

    def cancel(self, request_id: str, attempt: int, index: int | None = None) -> None:
        """Aborts one sequence or all of a request; blocks are back when this returns."""
        request = self._requests.get((request_id, attempt))
        if request is None:
            return
        for sequence in list(request.sequences.values()):
            if index is None or sequence.index == index:
                self._finish(sequence, "abort", monotonic())

    def cancel_gateway(self, gateway: str) -> None:
        for request in self._requests:
            if request.gateway == gateway:
                self.cancel(*request.key)

    def fail_all(self, error: ForebayError) -> None:
        """Ends every request with the same error."""
        for request in self._requests:
            self._fail(request, error)

    def step(self) -> None:
        """One round: plans and launches a step, and lands those that are due: the last one, which
        ran meanwhile, or this very one. A failed step fails its requests; the engine is ready for
        the next one."""
        began, waited = monotonic(), self._pipeline.runner_s
        self.wait_for_grammar(0)
        for request in self._requests.expired(began):
            self._fail(request, DeadlineError("The request waited too long for its turn."))
        if self._pipeline and self.scheduler.is_tight:
            self._land(began, waited)  # only what has landed can be preempted
            began, waited = monotonic(), self._pipeline.runner_s
        plan = self.scheduler.schedule()
        if plan.rows:
            self._announce(plan, began)
            if self._poison is not None:
                self._poison.apply()
            self._pipeline.launch(plan)
        elif self._pipeline:
            self._land(began, waited)
        while self._pipeline.due:
            self._land(began, waited)

    def _land(self, began: float, waited: float) -> None:
        """Takes in the oldest step. The host's time in it: since `began`, less the runner's, which
        then stood at `waited`."""
        plan = self._pipeline.oldest()
        try:
            flight, results = self._pipeline.land()
            counted = self._settle_all(flight, results, monotonic())
        except Exception:
            _log.exception("a step of %d rows failed", len(plan.rows))
            self._failed_steps += 1
            self._fail_rows(plan, retryable=len(plan.rows) > 1)
            return
        self._failed_steps = 0
        prefilled = sum(row.num_new for row in plan.rows[plan.num_single :])
        self._rates.step(prefilled=prefilled, decoded=plan.num_single, seconds=flight.seconds)
        host_s = monotonic() - began - (self._pipeline.runner_s - waited)
        self._record(plan, counted, host_s)

    def _enqueue_all(self, request: Request) -> None:
        for at, sequence in enumerate(list(request.sequences.values())):
            self._enqueue(sequence, follows=at > 0)

    def _enqueue(self, sequence: Sequence, *, follows: bool) -> None:
        """Queues one sequence; a resumed one that had all its tokens ends here, without a step."""
        self._serial += 1
        sequence.serial = self._serial
        self.scheduler.add(sequence, follows=follows)
        if sequence.is_full and not sequence.is_scoring:
            self._start(sequence, sequence.arrived)
            self._finish_full(sequence, sequence.arrived)

    def _refuse(self, key: Key, gateway: str, error: ForebayError) -> None:
        self._requests.remember(key)
        self._events.append((gateway, replies.failed(key, error)))

    def _announce(self, plan: Plan, now: float) -> None:
        for sequence in plan.started:
            self._start(sequence, now)

    def _start(self, sequence: Sequence, now: float) -> None:
        sequence.started_at = now
        self._requests.start(self._requests.of(sequence))
        self._events.append((sequence.gateway, replies.started(sequence, now)))

    def _settle_all(
        self, flight: Flight, results: list[Sampled | None], now: float
    ) -> tuple[int, int]:
        """Applies a step's results; prompt tokens of finished prefills and tokens generated."""
        prompt_tokens = generated = 0
        plan = flight.plan
        for sequence, row, end, sampled in zip(
            plan.sequences, plan.rows, flight.ends, results, strict=True
        ):
            if sequence.ended:
                continue  # by a cancel, a sibling's failure, or a stop that the launch foresaw not
            if sampled is not None and sampled.corrupt:
                self._fail(self._requests.of(sequence), _fault(sequence, sampled))
                continue
            self.blocks.publish(sequence, end)  # not at its launch: see decision 0018
            if sampled is not None and row.scored:
                self._take_scores(sequence, row.scored, sampled)
            if end < len(sequence.token_ids):
                continue
            if sequence.first_token_at is None:
                prompt_tokens += sequence.num_prompt
            if sampled is not None and row.samples:
                generated += 1
                self._take_token(sequence, sampled, now)
            else:
                self._finish_full(sequence, now)
        return prompt_tokens, generated

    def _take_scores(self, sequence: Sequence, scored: range, sampled: Sampled) -> None:
        sequence.num_scored = scored.stop
        event = replies.prompt_logprobs(sequence, scored, sampled)
        self._events.append((sequence.gateway, event))

    def _take_token(self, sequence: Sequence, sampled: Sampled, now: float) -> None:
        if sequence.last_token_at is None:
            sequence.first_token_at = now
            self._recorder.first_token(now - sequence.arrived)
        else:
            self._recorder.inter_token(now - sequence.last_token_at)
        sequence.last_token_at = now
        offset = sequence.num_output
        if sequence.accept(sampled.token_id):
            self._events.append((sequence.gateway, replies.delta(sequence, offset, sampled)))
        if sequence.finish_reason is not None:
            self._finish(sequence, sequence.finish_reason, now)

    def _finish_full(self, sequence: Sequence, now: float) -> None:
        """Ends a sequence that came with all its tokens: resumed at its end, or of none at all."""
        self._finish(sequence, "stop" if sequence.complete else "length", now)

    def _finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        self._remove(sequence)
        usage = replies.usage(sequence, now)
        self._events.append((sequence.gateway, replies.done(sequence, reason, usage)))
        self._count_end(sequence, reason, usage, now)

    def _fail(
        self, request: Request, error: ForebayError, *, retryable: bool | None = None
    ) -> None:
        """Ends what is left of a request. After an engine error none of its blocks is trusted."""
        now = monotonic()
        for sequence in list(request.sequences.values()):
            self._remove(sequence, poisoned=isinstance(error, EngineError))
            self._count_end(sequence, "error", replies.usage(sequence, now), now)
        self._events.append((request.gateway, replies.failed(request.key, error, retryable)))

    def _fail_rows(self, plan: Plan, *, retryable: bool) -> None:
        error = EngineError("The engine failed in a step of this request.")
        for sequence in plan.sequences:
            if not sequence.ended:
                self._fail(self._requests.of(sequence), error, retryable=retryable)

    def _remove(self, sequence: Sequence, *, poisoned: bool = False) -> None:
        sequence.ended = True
        if self._requests.of(sequence).preparation is None:
            self.scheduler.remove(sequence, poisoned=poisoned)
        self._requests.remove(sequence)

    def _count_end(self, sequence: Sequence, reason: str, usage: Usage, now: float) -> None:
        self._recorder.finished(
            reason=reason,
            e2e_s=now - sequence.arrived,
            queued_s=usage.queued_ms / 1000,
            prefill_s=usage.prefill_ms / 1000,
            decode_s=usage.decode_ms / 1000,
            prompt_tokens=usage.prompt_tokens,
            generation_tokens=usage.completion_tokens,
            max_tokens=sequence.sampling.max_tokens,
        )

    def _record(self, plan: Plan, counted: tuple[int, int], host_s: float) -> None:
        self._recorder.step(
            prompt_tokens=counted[0],
            generation_tokens=counted[1],
            prefix_queries=plan.prefix_queries,
            prefix_hits=plan.prefix_hits,
            preemptions=plan.preemptions,
            host_s=host_s,
        )


def _fault(sequence: Sequence, sampled: Sampled) -> ForebayError:
    """Why a row without a usable token failed: its grammar, its settings, or the model."""
    if sequence.matcher is not None and sequence.matcher.error is not None:
        return sequence.matcher.error
    if sampled.starved:
        return InvalidRequestError("The request's own settings leave no token to choose.")
    return EngineError("The model gave no usable result for this request.")
