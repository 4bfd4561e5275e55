"""A deterministic engine without a model: it answers a prompt with the prompt's own ids, over and
over.

The token at output position p of sequence i is prompt[(p + i) mod length], a pure function of the
prompt, so a resumed sequence goes on exactly where it was. An end-of-sequence or stop id in the
prompt ends the answer, as it would a model's; before min_tokens a space stands in for it. The
system tests and the load tests of the gateway run on it: it batches every running sequence into
each step and makes well over 50,000 tokens/s.
"""

import logging
import math
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from forebay_shared.errors import (
    ContextLengthError,
    DeadlineError,
    ForebayError,
    OverloadedError,
    UnsupportedError,
    WorkerLostError,
)
from forebay_shared.models import (
    CAP_DIGESTS,
    CAP_EMBED,
    CAP_GENERATE,
    CAP_LOGPROBS,
    CAP_RESUME,
    CAP_RESUME_SAMPLED,
    ModelCard,
    content_hash,
)
from forebay_shared.settings import WorkerSettings
from forebay_shared.wire import (
    Delta,
    Done,
    Encode,
    Failed,
    FinishReason,
    Load,
    Reply,
    SequenceStart,
    Started,
    Submit,
    TokenLogprobs,
    Usage,
)

from forebay_worker.engine.intake import checked_ids
from forebay_worker.engine.loop import EngineLoop
from forebay_worker.engines import echo_vectors
from forebay_worker.engines.base import CacheLog, Emit, Recorder
from forebay_worker.engines.echo_cache import EchoCache
from forebay_worker.engines.echo_model import CHAT_TEMPLATE, END, SPACE, SPECIALS, tokenizer_json
from forebay_worker.engines.echo_vectors import EchoVectors
from forebay_worker.pooling.core import EncodeCore

log = logging.getLogger(__name__)

DEFAULT_MODEL_LEN = 32_768
BLOCK_SIZE = 16
PREFILL_TOKENS = 8_192
"""A step with so many prompt tokens starts no further sequence, where prefill takes time."""
_GENERATES = frozenset({CAP_GENERATE, CAP_LOGPROBS, CAP_RESUME, CAP_RESUME_SAMPLED})
_CAPABILITIES = {
    "auto": _GENERATES | {CAP_EMBED},
    "generate": _GENERATES,
    "pooling": frozenset({CAP_EMBED}),
}
_FAR = -100.0


class _Sequence:
    """One generation. `position` counts its output ids, those of earlier attempts included.

    What each token needs stands in fields of its own: a step of 256 sequences takes half as long
    so.
    """

    __slots__ = (
        "alternatives", "arrived", "attempt", "cache_salt", "cached", "cancelled", "enders",
        "first_token", "gateway", "index", "last_token", "latest_start", "limit", "min_tokens",
        "position", "prompt", "request_id", "started",
    )  # fmt: skip

    def __init__(
        self, submit: Submit, start: SequenceStart, prompt: list[int], max_model_len: int
    ) -> None:
        sampling = submit.sampling
        self.request_id = submit.request_id
        self.attempt = submit.attempt
        self.gateway = submit.gateway
        self.index = start.index
        self.cache_salt = submit.cache_salt
        self.cached = 0
        self.prompt = prompt
        self.position = len(start.emitted) // 4
        self.limit = min(sampling.max_tokens, max_model_len - len(prompt))
        self.min_tokens = sampling.min_tokens
        self.alternatives = sampling.logprobs
        self.enders = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self.enders |= {END}
        self.cancelled = False
        self.arrived = time.monotonic()
        self.latest_start = self.arrived + (submit.queue_timeout_ms / 1000 or math.inf)
        self.started = 0.0
        self.first_token = 0.0
        self.last_token = 0.0

    @property
    def key(self) -> tuple[str, int]:
        return self.request_id, self.attempt


@dataclass(slots=True)
class _Step:
    """What one step gives out."""

    events: list[tuple[str, Reply]] = field(default_factory=list[tuple[str, Reply]])
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


class EchoEngine:
    """Implements the Engine protocol. `echo_delay_ms` is the time of a step; one that starts
    sequences takes the time of their prefill besides, what is cached left out."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._delay_s = settings.echo_delay_ms / 1000
        self._prefill_rate = settings.echo_prefill_rate
        self._prefilling = 0
        """Tokens that the step under way computes."""
        self._tokenizer = tokenizer_json()
        self._card = self._make_card()
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._refusals: list[tuple[str, Reply]] = []
        self._stopping = False
        self._stepped_at = time.monotonic()
        self._thread: threading.Thread | None = None
        self._emit: Emit | None = None
        self._recorder: Recorder | None = None
        self._vectors: EngineLoop[Encode] | None = None
        self._cache_log, self._cache = self._make_cache()

    def _make_cache(self) -> tuple[CacheLog | None, EchoCache | None]:
        blocks, card = self._settings.echo_cache_blocks, self._card
        if not blocks:
            return None, None
        log = CacheLog()
        return log, EchoCache(blocks, card.block_size, card.revision, log)

    def _make_card(self) -> ModelCard:
        template = CHAT_TEMPLATE.encode()
        return ModelCard(
            names=self._settings.served_model_name or (self._settings.model or "echo",),
            revision="echo-1",
            family="echo",
            engine="echo",
            tokenizer=content_hash(self._tokenizer),
            vocab_size=256 + len(SPECIALS),
            max_model_len=self._settings.max_model_len or DEFAULT_MODEL_LEN,
            block_size=self._settings.block_size or BLOCK_SIZE,
            created=int(time.time()),
            eos_token_ids=(END,),
            chat_template=content_hash(template),
            template_tokens={"eos_token": SPECIALS[0]},
            capabilities=_CAPABILITIES[self._settings.runner]
            | ({CAP_DIGESTS} if self._settings.echo_cache_blocks else set[str]()),
            embedding=None if self._settings.runner == "generate" else echo_vectors.CARD,
        )

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def blobs(self) -> dict[str, bytes]:
        """The tokenizer and the chat template, by content hash."""
        contents = (self._tokenizer, CHAT_TEMPLATE.encode())
        return {content_hash(content): content for content in contents}

    @property
    def cache_log(self) -> CacheLog | None:
        return self._cache_log

    @property
    def healthy(self) -> bool:
        """The engine's threads run, or have not been started or were stopped."""
        if self._vectors is not None and not self._vectors.healthy:
            return False
        return self._thread is None or self._stopping or self._thread.is_alive()

    def start(self, emit: Emit, recorder: Recorder) -> None:
        self._emit = emit
        self._recorder = recorder
        self._thread = threading.Thread(target=self._loop, name="echo-engine", daemon=True)
        self._thread.start()
        if self._card.embedding is not None:
            vectors = EchoVectors(self._card.vocab_size, self._card.max_model_len, self._delay_s)
            core = EncodeCore(vectors, self._card.embedding, self._settings, recorder)
            self._vectors = EngineLoop(core, emit)
            self._vectors.start()

    def encode(self, encode: Encode) -> None:
        if self._vectors is not None:
            self._vectors.submit(encode)
        else:
            error = UnsupportedError("This model does not make embeddings.")
            self._refuse(encode, error)

    def submit(self, submit: Submit) -> None:
        try:
            with self._lock:
                self._waiting.extend(self._admit(submit))
                self._wake.notify()
        except ForebayError as error:
            self._refuse(submit, error)

    def _refuse(self, work: Submit | Encode, error: ForebayError) -> None:
        with self._lock:
            self._refusals.append((work.gateway, _failed(work, error)))
            self._wake.notify()

    def cancel(self, request_id: str, attempt: int, index: int | None = None) -> None:
        with self._lock:
            for sequence in (*self._waiting, *self._running):
                if sequence.key == (request_id, attempt) and index in (None, sequence.index):
                    sequence.cancelled = True
            self._wake.notify()
        if self._vectors is not None:
            self._vectors.cancel(request_id, attempt, index)

    def cancel_gateway(self, gateway: str) -> None:
        with self._lock:
            for sequence in (*self._waiting, *self._running):
                if sequence.gateway == gateway:
                    sequence.cancelled = True
            self._wake.notify()
        if self._vectors is not None:
            self._vectors.cancel_gateway(gateway)

    def load(self) -> Load:
        vectors = Load() if self._vectors is None else self._vectors.load()
        with self._lock:
            busy = bool(self._running or self._waiting)
            return Load(
                running=len(self._running) + vectors.running,
                waiting=len(self._waiting) + vectors.waiting,
                waiting_tokens=self._prefilling
                + sum(len(sequence.prompt) for sequence in self._waiting)
                + vectors.waiting_tokens,
                kv_usage=len(self._running) / self._settings.max_num_seqs,
                step_age_s=time.monotonic() - self._stepped_at if busy else 0.0,
                prefill_rate=self._prefill_rate,
            )

    def stop(self, timeout_s: float) -> None:
        with self._lock:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)
        if self._vectors is not None:
            self._vectors.stop(timeout_s)

    def _admit(self, submit: Submit) -> list[_Sequence]:
        """The sequences of a request. Raises the ForebayError that the client is to see."""
        if CAP_GENERATE not in self._card.capabilities:
            raise UnsupportedError("This model makes embeddings only.")
        submit.sampling.validate(self._card.vocab_size)
        prompt = checked_ids(submit.prompt, "prompt", self._card.vocab_size)
        if not prompt or len(prompt) >= self._card.max_model_len:
            raise ContextLengthError(
                f"The prompt must have between 1 and {self._card.max_model_len - 1} tokens.",
                param="prompt",
            )
        if len(self._waiting) + len(submit.starts) > self._settings.max_num_queued_reqs:
            raise OverloadedError("The worker's queue is full. Please retry.")
        limit = self._card.max_model_len
        return [_Sequence(submit, start, prompt, limit) for start in submit.starts]

    def _loop(self) -> None:
        assert self._emit is not None
        try:
            while self._wait():
                due = time.monotonic() + self._delay_s
                step = self._step()
                if step.events:
                    self._emit(step.events)
                if self._cache_log is not None:
                    self._cache_log.flush()
                if self._delay_s:
                    time.sleep(max(0.0, due - time.monotonic()))
        finally:
            with self._lock:
                left = [*self._running, *self._waiting]
                self._running, self._waiting = [], deque()
            self._emit([_lost(sequence) for sequence in left])

    def _wait(self) -> bool:
        """Waits for work; False when the engine is to stop."""
        with self._lock:
            while not (self._stopping or self._running or self._waiting or self._refusals):
                self._wake.wait()
            self._stepped_at = time.monotonic()
            return not self._stopping

    def _step(self) -> _Step:
        """One token for every running sequence."""
        assert self._recorder is not None
        step = _Step()
        now = time.monotonic()
        with self._lock:
            step.events, self._refusals = self._refusals, []
            self._drop_cancelled(step, now)
            self._drop_expired(step, now)
            self._start_waiting(step, now)
            running = self._running
            self._prefilling = step.computed_tokens
        if self._prefill_rate and step.computed_tokens:
            time.sleep(step.computed_tokens / self._prefill_rate)
            now = time.monotonic()
            self._prefilling = 0
        ended = [sequence for sequence in running if self._advance(sequence, step, now)]
        if ended:
            gone = set(map(id, ended))
            with self._lock:
                self._running = [one for one in running if id(one) not in gone]
        self._recorder.step(
            prompt_tokens=step.prompt_tokens,
            generation_tokens=step.tokens,
            prefix_queries=step.prompt_tokens if self._cache is not None else 0,
            prefix_hits=step.cached_tokens,
            preemptions=0,
            host_s=time.monotonic() - now,
        )
        return step

    def _drop_cancelled(self, step: _Step, now: float) -> None:
        for sequence in (*self._running, *self._waiting):
            if sequence.cancelled:
                self._end(sequence, "abort", None, step, now)
        self._running = [sequence for sequence in self._running if not sequence.cancelled]
        self._waiting = deque(one for one in self._waiting if not one.cancelled)

    def _drop_expired(self, step: _Step, now: float) -> None:
        """Fails the requests of which something still waits after its deadline."""
        late = {one.key: one for one in self._waiting if one.latest_start < now}
        if not late:
            return
        error = DeadlineError("The request waited too long for its first step.")
        step.events.extend((one.gateway, _failed(one, error)) for one in late.values())
        self._running = [one for one in self._running if one.key not in late]
        self._waiting = deque(one for one in self._waiting if one.key not in late)

    def _start_waiting(self, step: _Step, now: float) -> None:
        while self._waiting and len(self._running) < self._settings.max_num_seqs:
            if self._prefill_rate and step.computed_tokens >= PREFILL_TOKENS:
                break
            sequence = self._waiting.popleft()
            sequence.started = now
            if self._cache is not None:
                sequence.cached = self._cache.take(sequence.prompt, sequence.cache_salt)
                step.cached_tokens += sequence.cached
            queued_ms = (now - sequence.arrived) * 1000
            started = Started(
                sequence.request_id, sequence.attempt, sequence.index, sequence.cached, queued_ms
            )
            step.events.append((sequence.gateway, started))
            step.prompt_tokens += len(sequence.prompt)
            self._running.append(sequence)

    def _advance(self, sequence: _Sequence, step: _Step, now: float) -> bool:
        """Emits the next token of a sequence; True when that ended it."""
        position, prompt = sequence.position, sequence.prompt
        if position >= sequence.limit:
            self._end(sequence, "length", None, step, now)
            return True
        token = prompt[(position + sequence.index) % len(prompt)]
        if token in sequence.enders:
            if position >= sequence.min_tokens:
                self._end(sequence, "stop", token, step, now)
                return True
            token = SPACE
        sequence.position = position + 1
        alternatives = sequence.alternatives
        delta = Delta(
            sequence.request_id, sequence.attempt, sequence.index, position, [token],
            None if alternatives is None else _logprobs(token, alternatives),
        )  # fmt: skip
        step.events.append((sequence.gateway, delta))
        step.tokens += 1
        self._record(sequence, now)
        if sequence.position >= sequence.limit:
            self._end(sequence, "length", None, step, now)
            return True
        return False

    def _record(self, sequence: _Sequence, now: float) -> None:
        assert self._recorder is not None
        if sequence.first_token:
            self._recorder.inter_token(now - sequence.last_token)
        else:
            sequence.first_token = now
            self._recorder.first_token(now - sequence.arrived)
        sequence.last_token = now

    def _end(
        self, sequence: _Sequence, reason: FinishReason, token: int | None, step: _Step, now: float
    ) -> None:
        assert self._recorder is not None
        started = sequence.started or now
        first = sequence.first_token or now
        usage = Usage(
            len(sequence.prompt), sequence.cached, sequence.position,
            (started - sequence.arrived) * 1000, (first - started) * 1000, (now - first) * 1000,
        )  # fmt: skip
        done = Done(sequence.request_id, sequence.attempt, sequence.index, reason, token, usage)
        step.events.append((sequence.gateway, done))
        self._recorder.finished(
            reason=reason,
            e2e_s=now - sequence.arrived,
            queued_s=started - sequence.arrived,
            prefill_s=first - started,
            decode_s=now - first,
            prompt_tokens=len(sequence.prompt),
            generation_tokens=sequence.position,
            max_tokens=sequence.limit,
        )


def _logprobs(token: int, alternatives: int) -> list[TokenLogprobs]:
    """The echo is certain of its token."""
    others = [(other, _FAR) for other in range(alternatives) if other != token]
    return [TokenLogprobs(0.0, [(token, 0.0), *others][:alternatives])]


def _failed(request: Submit | Encode | _Sequence, error: ForebayError) -> Failed:
    return Failed(
        request.request_id, request.attempt, error.code, error.message, error.retryable, error.param
    )


def _lost(sequence: _Sequence) -> tuple[str, Reply]:
    return sequence.gateway, _failed(sequence, WorkerLostError("The worker stopped."))
