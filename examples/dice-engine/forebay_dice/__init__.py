"""An example engine: every token is a roll of dice, a pure function of (seed, sequence, position).

That one property makes it resumable: a sequence that another worker had begun goes on as if it had
been here from the start. One thread makes a step for all sequences, then emits what came of it.
"""

import threading
import time
from hashlib import blake2b

from forebay_shared.errors import ForebayError, InvalidRequestError
from forebay_shared.models import (
    CAP_GENERATE,
    CAP_RESUME,
    CAP_RESUME_SAMPLED,
    ModelCard,
    content_hash,
)
from forebay_shared.settings import WorkerSettings
from forebay_shared.wire import Delta, Done, Failed, FinishReason, Load, Started, Submit, Usage
from forebay_worker.engine.intake import checked_ids
from forebay_worker.engines.base import Emit, Recorder
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = ["<unk>", "<end>", "one", "two", "three", "four", "five", "six"]
END = 1
CONTEXT = 4096
STEP_S = 0.002


class DiceEngine:
    """See forebay_worker.engines.base.Engine for what each method must do."""

    def __init__(self, settings: WorkerSettings) -> None:
        vocabulary = {word: number for number, word in enumerate(WORDS)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=WORDS[0]))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        data = tokenizer.to_str().encode()
        self.blobs = {content_hash(data): data}
        self.card = ModelCard(
            names=settings.served_model_name or ("dice",),
            revision="dice-1",
            family="dice",
            engine="dice",
            tokenizer=content_hash(data),
            vocab_size=len(WORDS),
            max_model_len=CONTEXT,
            block_size=16,
            created=int(time.time()),
            eos_token_ids=(END,),
            capabilities=frozenset({CAP_GENERATE, CAP_RESUME, CAP_RESUME_SAMPLED}),
        )
        self._running: list[_Sequence] = []
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._stopping = False
        self._thread: threading.Thread | None = None

    @property
    def healthy(self) -> bool:
        return self._thread is None or self._stopping or self._thread.is_alive()

    def start(self, emit: Emit, recorder: Recorder) -> None:
        self._thread = threading.Thread(target=self._loop, args=(emit,), name="dice", daemon=True)
        self._emit = emit
        self._thread.start()

    def submit(self, submit: Submit) -> None:
        try:
            sequences = _sequences(submit)
        except ForebayError as error:
            failed = Failed(submit.request_id, submit.attempt, error.code, error.message)
            self._emit([(submit.gateway, failed)])
            return
        with self._work:
            self._running += sequences
            self._work.notify()

    def cancel(self, request_id: str, attempt: int, index: int | None = None) -> None:
        with self._lock:
            for each in self._running:
                if (each.submit.request_id, each.submit.attempt) == (request_id, attempt):
                    each.cancelled = each.cancelled or index in (None, each.index)

    def cancel_gateway(self, gateway: str) -> None:
        with self._lock:
            for each in self._running:
                each.cancelled = each.cancelled or each.submit.gateway == gateway

    def load(self) -> Load:
        with self._lock:
            return Load(running=len(self._running))

    def stop(self, timeout_s: float) -> None:
        with self._work:
            self._stopping = True
            self._work.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _loop(self, emit: Emit) -> None:
        while True:
            with self._work:
                self._work.wait_for(lambda: self._running or self._stopping)
                if self._stopping:
                    break
                batch = list(self._running)
            emit([(each.submit.gateway, event) for each in batch for event in each.step()])
            with self._lock:
                self._running = [each for each in self._running if not each.ended]
            time.sleep(STEP_S)
        lost = {(s.request_id, s.attempt): s.gateway for s in (x.submit for x in self._running)}
        message = "The worker is leaving."
        emit([(who, Failed(*key, "worker_lost", message, True)) for key, who in lost.items()])
        self._running.clear()


class _Sequence:
    """One generation. `position` counts its tokens, those of earlier attempts included."""

    def __init__(self, submit: Submit, prompt_tokens: int, index: int, emitted: int) -> None:
        self.submit = submit
        self.index = index
        self.position = emitted
        self.cancelled = self.ended = False
        self._prompt_tokens = prompt_tokens
        self._limit = min(submit.sampling.max_tokens, CONTEXT - prompt_tokens)
        self._fresh = True

    def step(self) -> list[Started | Delta | Done]:
        """What this step adds: the start, then a token or the end."""
        key = (self.submit.request_id, self.submit.attempt, self.index)
        events: list[Started | Delta | Done] = [Started(*key, 0, 0.0)] if self._fresh else []
        self._fresh = False
        token = _roll(self.submit.sampling.seed, self.index, self.position)
        stops = self.submit.sampling.stop_token_ids
        if self.cancelled:
            events.append(self._done("abort", None))
        elif self.position >= self._limit:
            events.append(self._done("length", None))
        elif token in stops and self.position >= self.submit.sampling.min_tokens:
            events.append(self._done("stop", token))
        else:
            events.append(Delta(*key, self.position, [token]))
            self.position += 1
        return events

    def _done(self, reason: FinishReason, stop_token: int | None) -> Done:
        self.ended = True
        usage = Usage(prompt_tokens=self._prompt_tokens, completion_tokens=self.position)
        submit = self.submit
        return Done(submit.request_id, submit.attempt, self.index, reason, stop_token, usage)


def _sequences(submit: Submit) -> list[_Sequence]:
    """Raises the ForebayError that the client is to see."""
    submit.sampling.validate(len(WORDS))
    prompt = checked_ids(submit.prompt, "prompt", len(WORDS))
    if not 0 < len(prompt) < CONTEXT:
        raise InvalidRequestError(
            f"The prompt must have 1 to {CONTEXT - 1} tokens.", param="prompt"
        )
    return [
        _Sequence(submit, len(prompt), start.index, len(start.emitted) // 4)
        for start in submit.starts
    ]


def _roll(seed: int, index: int, position: int) -> int:
    """A number of one die: the same for ever for the same throw."""
    throw = blake2b(f"{seed} {index} {position}".encode(), digest_size=8).digest()
    return 2 + int.from_bytes(throw) % 6
