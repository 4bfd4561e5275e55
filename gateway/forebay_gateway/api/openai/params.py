"""From a decoded request to what the engine and the text side need: SamplingParams, OutputOptions.

A field that is absent takes the model's own default (its generation_config), then OpenAI's. Values
are inside their ranges already; here they meet the model: its vocabulary, its room, its abilities.
It knows no Litestar and no Redis.
"""

import random
import re

from forebay_shared.errors import InvalidRequestError, UnsupportedError
from forebay_shared.models import (
    CAP_GRAMMAR,
    CAP_LOGIT_BIAS,
    CAP_LOGPROBS,
    CAP_PENALTIES,
    CAP_PROMPT_LOGPROBS,
    ModelCard,
)
from forebay_shared.sampling import MAX_LOGIT_BIAS, Grammar, SamplingParams

from forebay_gateway.api.openai.schema import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
)
from forebay_gateway.api.openai.structured import grammar_of
from forebay_gateway.api.openai.tools import function_use, tool_use
from forebay_gateway.output import OutputOptions
from forebay_gateway.prompt import Truncation
from forebay_gateway.tools.base import ToolUse

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
COMPLETION_MAX_TOKENS = 16

_SALT = re.compile(r"[\x21-\x7e]{1,128}")
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
"""One spelling for each id: of two in one object only one would count."""


def use_of(request: ChatRequest, card: ModelCard) -> ToolUse | None:
    """What may be called, by the new fields or by the old ones."""
    if request.functions and (request.tools or request.tool_choice is not None):
        raise InvalidRequestError(
            "functions excludes tools and tool_choice, which replace it.", param="functions"
        )
    if request.functions or request.function_call not in (None, "none", "auto"):
        field = "function_call"
        use = function_use(request.functions, request.function_call)
    else:
        field = "tool_choice"
        use = tool_use(
            request.tools, request.tool_choice, parallel=request.parallel_tool_calls is not False
        )
    if use is not None and use.forced and not card.speaks_text:
        need(card, CAP_GRAMMAR, field)
    return use


def stop_strings(request: GenerationRequest) -> tuple[str, ...]:
    """The stop strings, sent as one or as a list; empty ones cannot match and are left out."""
    stop = request.stop
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise InvalidRequestError(f"stop may hold at most {MAX_STOPS} strings.", param="stop")
    if any(len(text) > MAX_STOP_CHARS for text in stops):
        raise InvalidRequestError(
            f"A stop string may have at most {MAX_STOP_CHARS} characters.", param="stop"
        )
    return tuple(dict.fromkeys(text for text in stops if text))


def output_options(request: GenerationRequest) -> OutputOptions:
    return OutputOptions(
        stops=stop_strings(request),
        include_stop=bool(request.include_stop_str_in_output),
        skip_special=request.skip_special_tokens is not False,
        min_tokens=request.min_tokens or 0,
    )


def bad_words(request: GenerationRequest, card: ModelCard) -> list[str]:
    """The words that must not come, each with something in it."""
    words = request.bad_words or []
    if not words:
        return words
    need(card, CAP_LOGIT_BIAS, "bad_words")
    if len(words) > MAX_BAD_WORDS or any(len(word) > MAX_BAD_WORD_CHARS for word in words):
        raise InvalidRequestError(
            f"bad_words may hold at most {MAX_BAD_WORDS} words of {MAX_BAD_WORD_CHARS} characters.",
            param="bad_words",
        )
    if not all(word.strip() for word in words):
        raise InvalidRequestError("bad_words must not hold empty words.", param="bad_words")
    return words


def truncation(request: GenerationRequest, card: ModelCard) -> Truncation | None:
    """What of a longer prompt is kept; None for all of it.

    -1 leaves room for one token of output, as in vLLM.
    """
    most = request.truncate_prompt_tokens
    if most is None:
        return None
    if most == 0 or most > card.max_model_len:
        raise InvalidRequestError(
            f"truncate_prompt_tokens must be -1 or between 1 and {card.max_model_len}.",
            param="truncate_prompt_tokens",
        )
    if most < 0:
        most = card.max_model_len - 1
    return Truncation(most, keeps_end=request.truncation_side != "right")


def prompt_logprobs(request: GenerationRequest, card: ModelCard) -> int | None:
    """Alternatives per prompt token, or None when nothing is asked of the prompt."""
    if request.prompt_logprobs is None:
        return None
    need(card, CAP_PROMPT_LOGPROBS, "prompt_logprobs")
    if request.stream:
        raise InvalidRequestError(
            "prompt_logprobs is not available when stream is true.", param="prompt_logprobs"
        )
    return request.prompt_logprobs


def cache_salt(request: GenerationRequest) -> str:
    salt = request.cache_salt
    if salt is not None and not _SALT.fullmatch(salt):
        raise InvalidRequestError(
            "cache_salt must be 1 to 128 visible ASCII characters.", param="cache_salt"
        )
    return salt or ""


def chat_logprobs(request: ChatRequest, card: ModelCard) -> int | None:
    """Alternatives per token, or None when no log-probabilities are asked for."""
    if not request.logprobs:
        if request.top_logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs.", param="top_logprobs")
        return None
    need(card, CAP_LOGPROBS, "logprobs")
    return request.top_logprobs or 0


def completion_logprobs(request: CompletionRequest, card: ModelCard) -> int | None:
    if request.logprobs is None:
        return None
    need(card, CAP_LOGPROBS, "logprobs")
    if request.echo and CAP_PROMPT_LOGPROBS not in card.capabilities:
        raise UnsupportedError(
            "This model's engine does not support logprobs together with echo.", param="logprobs"
        )
    return request.logprobs


def completion_limit(request: CompletionRequest) -> int:
    """The most tokens that a client wants; none at all only when it wants its prompt back."""
    if request.max_tokens == 0 and not request.echo:
        raise InvalidRequestError(
            "max_tokens must be at least 1, or 0 with echo.", param="max_tokens"
        )
    return COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens


def candidates(request: CompletionRequest, card: ModelCard) -> int:
    """How many sequences are generated per prompt, of which the best n are the answer."""
    n = request.n or 1
    if request.best_of is None or request.best_of == n:
        return n
    if request.best_of < n:
        raise InvalidRequestError("best_of must not be below n.", param="best_of")
    if request.stream:
        raise InvalidRequestError(
            "best_of above n is not available when stream is true.", param="best_of"
        )
    need(card, CAP_LOGPROBS, "best_of")
    return request.best_of


def chat_limit(request: ChatRequest) -> int | None:
    """The most tokens that a chat client wants; the newer of the two fields wins."""
    return request.max_completion_tokens or request.max_tokens


def sampling_params(
    request: GenerationRequest,
    card: ModelCard,
    *,
    room: int,
    limit: int | None,
    logprobs: int | None,
    bad_words: tuple[tuple[int, ...], ...] = (),
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """What every engine must honour. `room` is what the context leaves behind the prompt.

    A limit above the room is an upper bound, not a reservation: it is clamped.
    Raises InvalidRequestError for ids outside the vocabulary and for what the engine cannot do.
    """
    grammar = grammar_of(request.response_format, request.structured_outputs)
    _check_abilities(request, card, grammar)
    if limit is not None and (request.min_tokens or 0) > limit:
        raise InvalidRequestError("min_tokens must not exceed max_tokens.", param="min_tokens")
    defaults = card.generation_defaults
    most = int(_pick(limit, defaults, "max_tokens", room))
    max_tokens = min(most, room) if limit == 0 else max(1, min(most, room))
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(request.min_tokens or 0, max_tokens),
        temperature=_pick(request.temperature, defaults, "temperature", 1.0),
        top_p=_pick(request.top_p, defaults, "top_p", 1.0),
        top_k=max(0, int(_pick(request.top_k, defaults, "top_k", 0))),
        min_p=_pick(request.min_p, defaults, "min_p", 0.0),
        seed=_seed(request.seed),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_pick(
            request.repetition_penalty,
            defaults if CAP_PENALTIES in card.capabilities else {},
            "repetition_penalty",
            1.0,
        ),
        logit_bias=_logit_bias(request.logit_bias or {}),
        allowed_token_ids=None
        if request.allowed_token_ids is None
        else tuple(dict.fromkeys(request.allowed_token_ids)),
        bad_words=bad_words,
        stop_token_ids=tuple(dict.fromkeys(request.stop_token_ids or ())),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
    )
    sampling.validate(card.vocab_size)
    return sampling


_PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
"""With the values that do nothing."""


def _check_abilities(request: GenerationRequest, card: ModelCard, grammar: Grammar | None) -> None:
    """Raises UnsupportedError for what the engine cannot do."""
    for name, idle in _PENALTIES.items():
        if getattr(request, name) not in (None, idle):
            need(card, CAP_PENALTIES, name)
    if request.allowed_token_ids is not None:
        need(card, CAP_LOGIT_BIAS, "allowed_token_ids")
    if request.logit_bias:
        need(card, CAP_LOGIT_BIAS, "logit_bias")
    if grammar is not None:
        need(card, CAP_GRAMMAR, grammar.field)


def need(card: ModelCard, capability: str, field: str) -> None:
    """Raises UnsupportedError when the model's engine cannot do what a field asks for."""
    if capability not in card.capabilities:
        raise UnsupportedError(f"This model's engine does not support {field}.", param=field)


def _pick(asked: float | None, defaults: dict[str, object], name: str, otherwise: float) -> float:
    if asked is not None:
        return asked
    default = defaults.get(name)
    return default if isinstance(default, int | float) else otherwise


def _seed(seed: int | None) -> int:
    """Any 64-bit integer, signed or not. None is drawn here: a moved request keeps its noise."""
    if seed is None:
        return random.getrandbits(63)
    if not -(2**63) <= seed < 2**64:
        raise InvalidRequestError("seed must fit into 64 bits.", param="seed")
    return seed % 2**64


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidRequestError(
            f"logit_bias may hold at most {MAX_LOGIT_BIAS} tokens.", param="logit_bias"
        )
    if not all(_TOKEN_ID.fullmatch(token) for token in bias):
        raise InvalidRequestError("logit_bias must have token ids as keys.", param="logit_bias")
    return {int(token): value for token, value in bias.items()}
