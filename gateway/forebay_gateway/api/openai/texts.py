"""A request for a model whose engine speaks text: nothing is rendered, everything is checked.

It makes the text job, and names the first field that whatever is behind the engine does not take:
the model's card says which it takes. It knows no upstream.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from forebay_shared.asked import (
    Asked,
    AskedCall,
    AskedFunction,
    AskedMessage,
    Chat,
    Plain,
)
from forebay_shared.errors import UnsupportedError
from forebay_shared.models import ModelCard
from forebay_shared.sampling import SamplingParams
from forebay_shared.template import Json

from forebay_gateway.api.openai import params
from forebay_gateway.api.openai.messages import conversation
from forebay_gateway.api.openai.refused import Refused
from forebay_gateway.api.openai.schema import ChatRequest, CompletionRequest, GenerationRequest
from forebay_gateway.api.openai.structured import ResponseFormat
from forebay_gateway.jobs import TextJob
from forebay_gateway.output import OutputOptions
from forebay_gateway.prompt import Message
from forebay_gateway.relayed import Relayed, Words
from forebay_gateway.teams.caller import Caller
from forebay_gateway.tools.base import Tool, ToolUse

ROOM = 2**31 - 1
"""How much fits is the upstream's to say."""

_OURS = frozenset(
    {
        "model", "messages", "prompt", "n", "best_of", "stop", "stream", "stream_options",
        "include_stop_str_in_output", "include_reasoning", "priority", "modalities", "echo",
        "spaces_between_special_tokens", "truncation_side",
        *Refused.__struct_fields__,
    }
)  # fmt: skip
"""What the gateway does itself, whatever is behind the engine, or has refused already."""
_MEANT = {"functions": "tools", "function_call": "tool_choice"}
"""Older names for what is asked of the upstream by the newer ones."""
_ASK_NOTHING: dict[str, object] = {
    "add_generation_prompt": True,
    "continue_final_message": False,
    "functions": [],
    "function_call": "none",
    "ignore_eos": False,
    "logit_bias": {},
    "logprobs": False,
    "min_p": 0,
    "min_tokens": 0,
    "parallel_tool_calls": True,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "response_format": ResponseFormat("text"),
    "return_token_ids": False,
    "return_tokens_as_token_ids": False,
    "skip_special_tokens": True,
    "tools": [],
    "tool_choice": "none",
    "top_logprobs": 0,
}
"""Values that ask for what happens anyway."""
_SAMPLED = frozenset(SamplingParams.__struct_fields__) - {"grammar", "logprobs", "max_tokens"}


class TextReading(msgspec.Struct, frozen=True):
    """How the answers of one text job are read; see `interpret.Reading`."""

    vocabulary: Words
    one_call: bool = False

    def output(self, options: OutputOptions) -> Relayed:
        """The text side of one answer."""
        return Relayed(self.vocabulary, options, one_call=self.one_call)


class Told(NamedTuple):
    """A chat request as a text job, valid as a whole."""

    job: TextJob
    reading: TextReading
    logprobs: int | None


def check(request: GenerationRequest, card: ModelCard) -> None:
    """Raises UnsupportedError that names the first field which the upstream does not take."""
    for name in request.__struct_fields__:
        if name in _OURS or _MEANT.get(name, name) in card.parameters:
            continue
        value = getattr(request, name)
        if value is None or (name in _ASK_NOTHING and value == _ASK_NOTHING[name]):
            continue
        at = value.at if isinstance(value, ResponseFormat) else name
        raise UnsupportedError(
            f"{at} is not supported: what serves this model does not take it.", param=at
        )


def chat_job(request: ChatRequest, card: ModelCard, answer_id: str, caller: Caller) -> Told:
    """Raises ForebayError for what is wrong with the request."""
    check(request, card)
    use = params.use_of(request, card)
    logprobs = params.chat_logprobs(request, card)
    limit = params.chat_limit(request)
    job = text_job(
        answer_id,
        request,
        card,
        _chat(request, use),
        params.sampling_params(request, card, room=ROOM, limit=limit, logprobs=logprobs),
        caller,
        limited=limit is not None,
    )
    return Told(job, TextReading(Words(), use is not None and use.one_call), logprobs)


def prompts_of(request: CompletionRequest, card: ModelCard) -> list[str]:
    """The prompts of a text completion. Raises UnsupportedError for one in token ids."""
    check(request, card)
    given = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    texts = [item for item in given if isinstance(item, str)]
    if len(texts) < len(given):
        raise UnsupportedError(
            "prompt must be a string or strings: tokens of this model are not known here.",
            param="prompt",
        )
    return texts


def text_job(
    request_id: str,
    request: GenerationRequest,
    card: ModelCard,
    asked: Asked,
    sampling: SamplingParams,
    caller: Caller,
    *,
    limited: bool,
    n: int | None = None,
) -> TextJob:
    """`n` answers, or as many as the request asks for; `limited`: by its own max_tokens."""
    given = [name for name in _SAMPLED if getattr(request, name, None) is not None]
    given += ["max_tokens"] if limited else []
    return TextJob(
        request_id=request_id,
        card=card,
        asked=asked,
        sampling=sampling,
        given=tuple(sorted(given)),
        n=n or request.n or 1,
        cache_salt=caller.cache_salt + params.cache_salt(request),
        team=caller.team,
        weight=caller.weight,
        priority=caller.priority(request.priority or 0),
        toll=caller.toll(request.model, card.name),
    )


def _chat(request: ChatRequest, use: ToolUse | None) -> Chat:
    forced = use.forced if use is not None else ()
    return Chat(
        messages=tuple(map(_message, conversation(request.messages))),
        functions=_functions(use.tools if use is not None else ()),
        required=bool(forced),
        forced=forced[0].name if len(forced) == 1 else "",
        parallel=use is None or not use.one_call,
        reasoning_effort=request.reasoning_effort,
        verbosity=request.verbosity,
        template=_template(request),
        continues=bool(request.continue_final_message),
    )


def _template(request: ChatRequest) -> dict[str, Plain]:
    thinks = request.enable_thinking
    manner: dict[str, Plain] = {} if thinks is None else {"enable_thinking": thinks}
    return {**manner, **(request.chat_template_kwargs or {})}


def _functions(tools: Sequence[Tool]) -> tuple[AskedFunction, ...]:
    return tuple(
        AskedFunction(
            tool.name,
            msgspec.json.encode(tool.parameters).decode(),
            tool.description or "",
            tool.strict,
        )
        for tool in tools
    )


def _message(message: Message) -> AskedMessage:
    return AskedMessage(
        role=str(message["role"]),
        content=str(message["content"]),
        name=str(message.get("name", "")),
        reasoning=str(message.get("reasoning_content", "")),
        calls=tuple(map(_call, _listed(message.get("tool_calls")))),
        call_id=str(message.get("tool_call_id", "")),
    )


def _listed(value: Json) -> list[Json]:
    return value if isinstance(value, list) else []


def _call(call: Json) -> AskedCall:
    read = msgspec.convert(call, _Call)
    arguments = read.function.arguments
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return AskedCall(read.id, read.function.name, text)


class _Function(msgspec.Struct):
    name: str
    arguments: object


class _Call(msgspec.Struct):
    id: str
    function: _Function
