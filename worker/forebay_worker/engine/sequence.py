"""Sequence: one generation in the engine: its tokens, where its KV lies, how it ends.

It knows no queue, no ref count and no message of the wire; the scheduler, the block manager and the
core each change the part that is theirs.
"""

from dataclasses import dataclass, field

import numpy as np
from forebay_shared.sampling import SamplingParams
from forebay_shared.wire import FinishReason

from forebay_worker.engine.batch import IntArray
from forebay_worker.engine.grammar import Matcher

Origin = tuple[str, str]
"""The revision of an adapter and a cache salt, each empty where there is none."""

_MASK = 2**64 - 1


def mix(seed: int, index: int) -> int:
    """A 64-bit seed for sequence `index` of a request: neighbours share no pattern.

    Each round is the finaliser of SplitMix64 (Steele, Lea, Flood 2014), a bijection of 64 bits.
    """
    return _finalise(_finalise(seed) + index)


def _finalise(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@dataclass(slots=True, eq=False)
class Sequence:
    """One generation. Two are equal only when they are the same object.

    Attributes:
        token_ids: the prompt, then the output so far; a token that only ends it is never in here.
        num_prompt: tokens of the prompt; a resumed sequence's emitted ids already count as output.
        limit: length of `token_ids` at which the sequence ends with "length".
        stop_ids: ids that end the sequence.
        seed: 64 bits, already mixed with the index.
        serial: place in the order of arrival, unique in one engine.
        arrived: seconds on the monotonic clock, as all times here.
        block_table, block_hashes, num_computed, num_published, chain: the block manager's.
        num_pending: tokens that launched steps sample and that are not in `token_ids` yet.
        num_served: positions that its team has been charged for; the waiting queue's.
        queued_tokens: tokens that it would have to prefill, for the load report.
        allowed: its sampling's allowed_token_ids as an array, once it was asked for.
        matcher: where its output is in its grammar, if it has one.
        scores_prompt: whether its request's prompt_logprobs are for this sequence to compute.
        num_scored: positions after which the prompt's next token has been scored.
        adapter: the number of its adapter in the runner, -1 without one.
        adapter_revision: what its blocks are told apart by, beside `cache_salt`.
    """

    request_id: str
    attempt: int
    gateway: str
    index: int
    token_ids: list[int]
    num_prompt: int
    sampling: SamplingParams
    seed: int
    limit: int
    stop_ids: frozenset[int]
    cache_salt: str = ""
    adapter: int = -1
    adapter_revision: str = ""
    team: str = ""
    weight: float = 1.0
    priority: int = 0
    serial: int = 0
    arrived: float = 0.0

    block_table: list[int] = field(default_factory=list[int])
    block_hashes: list[bytes] = field(default_factory=list[bytes])
    num_computed: int = 0
    num_pending: int = 0
    num_published: int = 0
    chain: int | Origin = ("", "")
    num_served: int = 0
    queued_tokens: int = 0
    allowed: IntArray | None = None
    matcher: Matcher | None = None
    scores_prompt: bool = False
    num_scored: int = 0

    cached_tokens: int = 0
    started_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    ended: bool = False
    finish_reason: FinishReason | None = None
    stop_token: int | None = None

    @property
    def origin(self) -> Origin:
        """What its first block begins with, in place of a block before it."""
        return self.adapter_revision, self.cache_salt

    @property
    def length(self) -> int:
        """Of `token_ids`, once all that has been launched is in."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def completion_tokens(self) -> int:
        """Tokens generated, with the one that ended the sequence, as OpenAI counts them."""
        return self.num_output + (self.stop_token is not None)

    @property
    def is_scoring(self) -> bool:
        """Whether prompt tokens are still to be scored; till then no cached block will do."""
        return self.scores_prompt and self.num_scored < self.num_prompt - 1

    @property
    def is_full(self) -> bool:
        """Whether it has all the tokens that it may have; `complete` without a call, as every row
        of a step asks."""
        return len(self.token_ids) >= self.limit or (
            self.matcher is not None and self.matcher.stopped
        )

    @property
    def rank(self) -> tuple[int, int]:
        """The smaller, the later it is preempted."""
        return (self.priority, self.serial)

    def own(self) -> None:
        """Ends the sharing of the prompt with its siblings, before anything is appended."""
        self.token_ids = list(self.token_ids)
        self.block_hashes = list(self.block_hashes)

    def to_score(self, num_new: int) -> range:
        """Of the next `num_new` positions those after which a prompt token is to be scored."""
        if not self.scores_prompt:
            return range(0)
        first = max(self.num_computed, self.num_scored)
        return range(first, min(self.num_computed + num_new, self.num_prompt - 1))

    def banned_ids(self, pending: int = 0) -> tuple[int, ...]:
        """Ids that must not be sampled now: what would end it before min_tokens, and bad words.
        `pending` tokens are on their way, which bad words know nothing of."""
        sampling = self.sampling
        early = self.num_output + pending < sampling.min_tokens
        if not early and not sampling.bad_words:
            return ()
        ends = self.stop_ids if early else ()
        return (*ends, *(word[-1] for word in sampling.bad_words if self._nearly_said(word)))

    def _nearly_said(self, word: tuple[int, ...]) -> bool:
        """Whether the output ends with all of `word` but its last token."""
        head = len(word) - 1
        return (
            head <= self.num_output
            and tuple(self.token_ids[len(self.token_ids) - head :]) == (word[:-1])
        )

    def allowed_ids(self) -> IntArray | None:
        """The only ids that may be sampled, whatever else is asked; None: all. Made once, for they
        may be as many as the vocabulary."""
        asked = self.sampling.allowed_token_ids
        if self.allowed is None and asked is not None:
            self.allowed = np.array(asked, np.int64)
        return self.allowed

    def allowed_mask(self) -> bytes | None:
        """What its grammar allows now, as `Matcher.mask` says it; None without a grammar."""
        return None if self.matcher is None else self.matcher.mask()

    @property
    def complete(self) -> bool:
        """Whether its grammar lets nothing follow, not even an end token."""
        return self.matcher is not None and self.matcher.stopped

    def accept(self, token_id: int) -> bool:
        """Takes a sampled token; True when it is output, False when it only ends the sequence."""
        if token_id in self.stop_ids and self.num_output >= self.sampling.min_tokens:
            self.finish_reason = "stop"
            self.stop_token = token_id
            return False
        self.token_ids.append(token_id)
        if self.matcher is not None:
            self.matcher.advance((token_id,))
        if self.is_full:
            self.finish_reason = "stop" if self.complete else "length"
        return True
