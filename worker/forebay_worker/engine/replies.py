"""What the engine says of a sequence, as messages of the wire."""

from forebay_shared.errors import ForebayError
from forebay_shared.wire import Delta, Done, Failed, FinishReason, PromptLogprobs, Started, Usage

from forebay_worker.engine.batch import Sampled
from forebay_worker.engine.sequence import Sequence

Key = tuple[str, int]
"""(request_id, attempt)"""


def started(sequence: Sequence, now: float) -> Started:
    return Started(
        sequence.request_id,
        sequence.attempt,
        sequence.index,
        sequence.cached_tokens,
        (now - sequence.arrived) * 1000,
    )


def delta(sequence: Sequence, offset: int, sampled: Sampled) -> Delta:
    return Delta(
        sequence.request_id,
        sequence.attempt,
        sequence.index,
        offset,
        [sampled.token_id],
        None if sampled.logprobs is None else [sampled.logprobs],
    )


def prompt_logprobs(sequence: Sequence, scored: range, sampled: Sampled) -> PromptLogprobs:
    return PromptLogprobs(sequence.request_id, sequence.attempt, scored.start + 1, sampled.scores)


def done(sequence: Sequence, reason: FinishReason, spent: Usage) -> Done:
    return Done(
        sequence.request_id,
        sequence.attempt,
        sequence.index,
        reason,
        sequence.stop_token,
        spent,
    )


def failed(key: Key, error: ForebayError, retryable: bool | None = None) -> Failed:
    """`retryable` is the error's own unless it is given."""
    return Failed(
        *key,
        code=error.code,
        message=error.message,
        retryable=error.retryable if retryable is None else retryable,
        param=error.param,
        retry_after_s=error.retry_after_s,
    )


def usage(sequence: Sequence, now: float) -> Usage:
    """What it cost so far; a resumed sequence counts what it had emitted elsewhere, too."""
    start = now if sequence.started_at is None else sequence.started_at
    first_token = now if sequence.first_token_at is None else sequence.first_token_at
    return Usage(
        prompt_tokens=sequence.num_prompt,
        cached_tokens=sequence.cached_tokens,
        completion_tokens=sequence.completion_tokens,
        queued_ms=(start - sequence.arrived) * 1000,
        prefill_ms=(first_token - start) * 1000,
        decode_ms=(now - first_token) * 1000,
    )
