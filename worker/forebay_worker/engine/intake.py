"""Intake: a Submit from the wire becomes sequences, or an error that names what is wrong with it.

The gateway has checked all this before; here is the last wall in front of the engine. It knows the
model's limits, and nothing of load or blocks.
"""

import math
from dataclasses import dataclass
from typing import Self

from forebay_shared.errors import (
    ContextLengthError,
    InvalidRequestError,
    ModelNotFoundError,
    UnsupportedError,
)
from forebay_shared.models import Adapter
from forebay_shared.sampling import MAX_N, SamplingParams
from forebay_shared.wire import Submit, unpack_ids

from forebay_worker.engine.ports import Runner
from forebay_worker.engine.sequence import Sequence, mix


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model can take: ids below `vocab_size`, prompt plus output up to `max_model_len`,
    and `adapters`, as the runner numbers them."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    scores_prompts: bool = False
    adapters: tuple[Adapter, ...] = ()

    @classmethod
    def of(
        cls,
        runner: Runner,
        eos_token_ids: tuple[int, ...] = (),
        adapters: tuple[Adapter, ...] = (),
    ) -> Self:
        """A runner's limits. The pool bounds the context, so one sequence alone always fits."""
        room = min(runner.max_model_len, runner.num_blocks * runner.block_size)
        return cls(runner.vocab_size, room, eos_token_ids, runner.scores_prompts, adapters)

    def adapter(self, name: str) -> tuple[int, str]:
        """The number and revision of an adapter; -1 and nothing for the model itself.

        Raises ModelNotFoundError for one that is not here.
        """
        if not name:
            return -1, ""
        for number, adapter in enumerate(self.adapters):
            if adapter.name == name:
                return number, adapter.revision
        raise ModelNotFoundError("This worker has no adapter of that name.", param="model")


def sequences_of(submit: Submit, limits: Limits, arrived: float) -> list[Sequence]:
    """The sequences that `submit` asks for. Raises InvalidRequestError or one of its leaves.

    They share the prompt and its hashes until they start: 128 of 8,000 tokens cost as much as one.
    The first of them scores the prompt, when that is asked for.
    """
    sampling = submit.sampling
    sampling.validate(limits.vocab_size)
    _check_support(sampling, limits)
    _check_terms(submit)
    prompt = checked_prompt(submit.prompt, limits.vocab_size, limits.max_model_len)
    # A grammar's end is told by an end token, which then cannot be ignored.
    eos = () if sampling.ignore_eos and not sampling.grammar else limits.eos_token_ids
    stop_ids = frozenset(eos).union(sampling.stop_token_ids)
    _check_choice(sampling, stop_ids)
    adapter, adapter_revision = limits.adapter(submit.adapter)
    hashes: list[bytes] = []
    sequences = [
        Sequence(
            request_id=submit.request_id,
            attempt=submit.attempt,
            gateway=submit.gateway,
            index=start.index,
            token_ids=prompt,
            num_prompt=len(prompt),
            sampling=sampling,
            seed=mix(sampling.seed, start.index),
            limit=min(len(prompt) + sampling.max_tokens, limits.max_model_len),
            stop_ids=stop_ids,
            cache_salt=submit.cache_salt,
            adapter=adapter,
            adapter_revision=adapter_revision,
            team=submit.team,
            weight=submit.weight,
            priority=submit.priority,
            arrived=arrived,
            block_hashes=hashes,
            scores_prompt=sampling.prompt_logprobs is not None and at == 0,
        )
        for at, start in enumerate(submit.starts)
    ]
    allowed = sequences[0].allowed_ids()
    for sequence, start in zip(sequences, submit.starts, strict=True):
        sequence.allowed = allowed
        if start.emitted:
            sequence.own()
            sequence.token_ids += checked_ids(start.emitted, "emitted", limits.vocab_size)
    return sequences


def _check_support(sampling: SamplingParams, limits: Limits) -> None:
    if sampling.prompt_logprobs is not None and not limits.scores_prompts:
        raise UnsupportedError(
            "This engine does not support prompt_logprobs.", param="prompt_logprobs"
        )


def _check_terms(submit: Submit) -> None:
    if not (math.isfinite(submit.weight) and submit.weight > 0):
        raise InvalidRequestError("weight must be a number above 0.", param="weight")
    indexes = [start.index for start in submit.starts]
    if not indexes or len(set(indexes)) < len(indexes) or not all(0 <= i < MAX_N for i in indexes):
        raise InvalidRequestError(
            f"starts must hold distinct indexes between 0 and {MAX_N - 1}.", param="n"
        )


def _check_choice(sampling: SamplingParams, stop_ids: frozenset[int]) -> None:
    """With nothing left to choose from, every logit would be -inf."""
    allowed = sampling.allowed_token_ids
    if allowed is not None and sampling.min_tokens and stop_ids.issuperset(allowed):
        raise InvalidRequestError(
            "min_tokens needs an allowed token that does not end the output.",
            param="allowed_token_ids",
        )


def checked_prompt(packed: bytes, vocab_size: int, max_model_len: int) -> list[int]:
    """A prompt's ids off the wire. Raises InvalidRequestError for none, and ContextLengthError for
    more than leave room for an answer."""
    prompt = checked_ids(packed, "prompt", vocab_size)
    if not prompt:
        raise InvalidRequestError("The prompt must hold at least one token.", param="prompt")
    if len(prompt) >= max_model_len:
        raise ContextLengthError(
            f"This model's context holds {max_model_len} tokens, prompt and output "
            f"together; the prompt has {len(prompt)}.",
            param="prompt",
        )
    return prompt


def checked_ids(packed: bytes, name: str, vocab_size: int) -> list[int]:
    """Ids off the wire. Raises InvalidRequestError that names the field for foreign ones."""
    try:
        ids = unpack_ids(packed)
    except ValueError:
        raise InvalidRequestError(f"{name} must be packed 32-bit ids.", param=name) from None
    if ids and max(ids) >= vocab_size:
        raise InvalidRequestError(
            f"{name} must hold token ids between 0 and {vocab_size - 1}.", param=name
        )
    return ids
