"""What a sequence asks of its next token, in numbers for `kernels.sampling` and in words for
`kernels.adjust`.

What stays the same is made once, and what has been said is counted on from where it stood, so a
step costs what is new and not the whole context. It knows numbers, no tensor and no step.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from forebay_shared.sampling import SamplingParams

from forebay_worker.engine.batch import IntArray, SequenceState
from forebay_worker.engine.sampler import MOST_BIAS
from forebay_worker.engine.staging import Fields

_NO_WORDS: IntArray = np.zeros(0, np.int64)
_ONCE = 1 << 32


def bits_size(vocab: int) -> int:
    """Words of a bit for each id."""
    return -(-vocab // 64)


def most_words(vocab: int) -> int:
    """Of one row: each id banned, biased and said, and the bits."""
    return 3 * vocab + bits_size(vocab)


def param_fields(rows: int) -> Fields:
    """The sampling kernel's parameters, as arrays of a packet."""
    return {
        "temperature": ("f4", rows),
        "top_k": ("i4", rows),
        "top_p": ("f4", rows),
        "min_p": ("f4", rows),
        "seeds": ("i8", rows),
    }


def fill_params(arrays: Mapping[str, Any], at: int, params: SamplingParams, seed: int) -> None:
    """All of a row's parameters."""
    arrays["temperature"][at] = 0.0 if params.greedy else params.temperature
    arrays["top_k"][at] = params.top_k
    arrays["top_p"][at] = params.top_p
    arrays["min_p"][at] = params.min_p
    arrays["seeds"][at] = seed - (seed >> 63 << 64)  # the 64 bits, as an int64 has them


def is_adjusted(params: SamplingParams) -> bool:
    """Whether every token of such a sequence is chosen from other logits than the model's.
    `banned_ids` may add some while `min_tokens` holds."""
    return bool(
        params.logit_bias
        or params.allowed_token_ids
        or params.bad_words
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
        or params.grammar is not None
    )


def needs_host(params: SamplingParams) -> bool:
    """Whether the host must know every token before it can say what may come next."""
    return bool(params.bad_words) or params.grammar is not None


class Words(NamedTuple):
    """A row's words of each kind, in the order of `Adjustments.edges`."""

    banned: IntArray
    biased: IntArray
    said: IntArray
    bits: IntArray


class Tally:
    """The ids of a sequence, each once, in the order of their first coming, and how many times it
    was said."""

    def __init__(self, asked: Iterable[int], num_prompt: int) -> None:
        """`asked`: those that count before one is said. `num_prompt`: where output begins."""
        self._places = {token: at for at, token in enumerate(dict.fromkeys(asked))}
        self._words: IntArray = np.array(list(self._places), np.int64)
        self._counted = num_prompt

    def words(self, token_ids: list[int]) -> IntArray:
        """Of all tokens until now; the array changes with the next call."""
        for token in token_ids[self._counted :]:
            known = self._places.get(token)
            at = self._add(token) if known is None else known
            self._words[at] += _ONCE
        self._counted = len(token_ids)
        return self._words[: len(self._places)]

    def _add(self, token: int) -> int:
        at = self._places[token] = len(self._places)
        if at == len(self._words):
            self._words = np.concatenate((self._words, np.zeros(at + 16, np.int64)))
        self._words[at] = token
        return at


class Rules:
    """Of one sequence, whose tokens may become more but not others."""

    def __init__(self, sequence: SequenceState, vocab: int) -> None:
        params = sequence.sampling
        self._vocab = vocab
        self._biased = _biases(params.logit_bias)
        allowed = sequence.allowed_ids()
        self._allowed = None if allowed is None else _bits(allowed, vocab)
        self._tally: Tally | None = None
        if params.repetition_penalty != 1:
            self._tally = Tally(sequence.token_ids[: sequence.num_prompt], sequence.num_prompt)
        elif params.presence_penalty or params.frequency_penalty:
            self._tally = Tally((), sequence.num_prompt)

    def words(self, sequence: SequenceState, pending: int) -> Words:
        """For the next token but the `pending` ones that the host does not know yet."""
        banned = sequence.banned_ids(pending)
        return Words(
            np.array(list(set(banned)), np.int64) if banned else _NO_WORDS,
            self._biased,
            _NO_WORDS if self._tally is None else self._tally.words(sequence.token_ids),
            self._bits(sequence.allowed_mask()),
        )

    def _bits(self, mask: bytes | None) -> IntArray:
        """Of the ids that both the client and the grammar's mask allow; none where all are."""
        if mask is None:
            return _NO_WORDS if self._allowed is None else self._allowed
        size = bits_size(self._vocab)
        bits = np.frombuffer(mask.ljust(8 * size, b"\0"), np.int64, size)
        return bits if self._allowed is None else bits & self._allowed


def _bits(ids: IntArray, vocab: int) -> IntArray:
    flags = np.zeros(64 * bits_size(vocab), np.uint8)
    flags[ids] = 1
    return np.packbits(flags, bitorder="little").view(np.int64)


def _biases(asked: Mapping[int, float]) -> IntArray:
    if not asked:
        return _NO_WORDS
    ids = np.array(list(asked), np.int64)
    values = np.array(list(asked.values())).clip(-MOST_BIAS, MOST_BIAS).astype(np.float32)
    return ids + (values.view(np.int32).astype(np.int64) << 32)
