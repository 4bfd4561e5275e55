"""SamplingParams: what a client may ask of the sampler and every engine must honour or refuse.

It knows nothing of HTTP names: the gateway maps each dialect's fields to these. Stop strings, tools
and reasoning are text and stay in the gateway; an engine sees token ids only.
"""

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from forebay_shared.errors import InvalidRequestError

MAX_N = 128
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS = 256
"""Each is looked for after every token; so many take 0.1 ms."""
MAX_BAD_WORD_TOKENS = 64
MAX_GRAMMAR_BYTES = 128 * 1024
# Below this the softmax of float32 logits over / temperature overflows; such a request is greedy.
GREEDY_TEMPERATURE = 1e-4
# Scores are divided by the penalty: below 1e-37 float32 overflows, and none can be drawn.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-6, 100
RepetitionPenalty = Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)]
# Of fewer ids than ten million one always has more than this: no other is left. Clients send 0.
GREEDY_TOP_P = 1e-7


JSON_FORM: dict[str, str | bool] = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": r" ?|\r?\n(?: {0,40}|\t{0,10})",
    "coerce_one_of": False,
    "lenient": False,
}
"""How the JSON of a schema is written, in llguidance's words: at most one space, or a line break
with an indentation. Models that may write any white space fill their whole budget with it."""


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """A constraint on the text. `source` is a JSON schema, regex, Lark grammar or JSON list.

    `field` is the client's name for it, which errors carry.
    """

    kind: Literal["json_schema", "json_object", "regex", "choice", "lark"]
    source: str = ""
    field: str = "structured_outputs"


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One request's sampling. `validate` raises for values that no engine could honour.

    `seed` is always concrete on the wire (the gateway draws one when the client gave none), so that
    a request moved to another worker goes on with the same noise: that of the token at position p
    of sequence i is a pure function of (seed, i, p).
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Alternatives per token (0..20), or None for no log-probabilities at all."""
    prompt_logprobs: int | None = None
    """Alternatives per prompt token (0..20), or None for no log-probabilities of the prompt."""
    grammar: Grammar | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1 or self.top_p < GREEDY_TOP_P

    def validate(self, vocab_size: int) -> None:
        """Raises InvalidRequestError that names the first bad field.

        The dialects check ranges themselves with their own field names; this is the last wall in
        front of an engine, for every dialect and for a worker that reads a foreign message.
        """
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                raise InvalidRequestError(
                    f"{name} must be between {low:g} and {high:g}.", param=name
                )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_LOGPROBS:
                raise InvalidRequestError(
                    f"{name} must be between 0 and {MAX_LOGPROBS}.", param=name
                )
        grammar = self.grammar
        if grammar is not None and len(grammar.source.encode()) > MAX_GRAMMAR_BYTES:
            raise InvalidRequestError(
                f"A grammar may have at most {MAX_GRAMMAR_BYTES} bytes.", param=grammar.field
            )
        self._validate_ids(vocab_size)

    def _validate_ids(self, vocab_size: int) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                f"logit_bias may hold at most {MAX_LOGIT_BIAS} tokens.", param="logit_bias"
            )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"stop_token_ids may hold at most {MAX_STOP_TOKEN_IDS} ids.", param="stop_token_ids"
            )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequestError(
                "allowed_token_ids must not be empty.", param="allowed_token_ids"
            )
        if len(self.bad_words) > MAX_BAD_WORDS or any(
            not 0 < len(word) <= MAX_BAD_WORD_TOKENS for word in self.bad_words
        ):
            raise InvalidRequestError(
                f"bad_words may hold at most {MAX_BAD_WORDS} words of 1 to {MAX_BAD_WORD_TOKENS}"
                " tokens.",
                param="bad_words",
            )
        if not all(math.isfinite(bias) for bias in self.logit_bias.values()):
            raise InvalidRequestError("logit_bias must hold finite numbers.", param="logit_bias")
        fields = {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": self.logit_bias,
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_words": [token for word in self.bad_words for token in word],
        }
        for name, ids in fields.items():
            if not all(0 <= token < vocab_size for token in ids):
                raise InvalidRequestError(
                    f"{name} must hold token ids between 0 and {vocab_size - 1}.", param=name
                )


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 0, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("temperature", 0, 2),
    ("top_p", 0, 1),
    ("top_k", 0, 2**31 - 1),
    ("min_p", 0, 1),
    ("seed", 0, 2**64 - 1),
    ("repetition_penalty", MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
)
