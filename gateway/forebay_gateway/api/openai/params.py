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
    ModelCard,
)
from forebay_shared.sampling import SamplingParams

from forebay_gateway.api.openai.schema import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
)
from forebay_gateway.api.openai.structured import grammar_of
from forebay_gateway.output import OutputOptions

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
COMPLETION_MAX_TOKENS = 16

_SALT = re.compile(r"[\x21-\x7e]{1,128}")
_TOKEN_ID = re.compile(r"[0-9]{1,10}")


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
    if request.echo:
        raise UnsupportedError("logprobs together with echo is not supported.", param="logprobs")
    return request.logprobs


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
) -> SamplingParams:
    """What every engine must honour. `room` is what the context leaves behind the prompt.

    A limit above the room is an upper bound, not a reservation: it is clamped.
    Raises InvalidRequestError for ids outside the vocabulary and for what the engine cannot do.
    """
    penalties = (request.presence_penalty, request.frequency_penalty, request.repetition_penalty)
    for name, value in zip(_PENALTIES, penalties, strict=True):
        if value is not None and value != _PENALTIES[name]:
            need(card, CAP_PENALTIES, name)
    if request.logit_bias:
        need(card, CAP_LOGIT_BIAS, "logit_bias")
    grammar = grammar_of(request.response_format, request.structured_outputs)
    if grammar is not None:
        need(card, CAP_GRAMMAR, grammar.field)
    if limit is not None and (request.min_tokens or 0) > limit:
        raise InvalidRequestError("min_tokens must not exceed max_tokens.", param="min_tokens")
    defaults = card.generation_defaults
    most = int(_pick(limit, defaults, "max_tokens", room))
    max_tokens = max(1, min(most, room))
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
        stop_token_ids=tuple(dict.fromkeys(request.stop_token_ids or ())),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        grammar=grammar,
    )
    sampling.validate(card.vocab_size)
    return sampling


_PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}


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
    if not all(_TOKEN_ID.fullmatch(token) for token in bias):
        raise InvalidRequestError("logit_bias must have token ids as keys.", param="logit_bias")
    return {int(token): value for token, value in bias.items()}
