"""A text request as the JSON of an upstream's API.

Only what the client asked for is in it: for the rest the upstream's own defaults hold. It knows no
HTTP.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
from forebay_shared.asked import AskedMessage, Chat
from forebay_shared.sampling import GREEDY_TOP_P, Grammar
from forebay_shared.wire import SubmitText

from forebay_worker.engines.http.kinds import PARAMETERS, RUNNING_USAGE, Kind

Body = dict[str, Any]

_RENAMED: dict[Kind, dict[str, str]] = {
    "llama-cpp": {"repetition_penalty": "repeat_penalty"},
    "openai": {"max_tokens": "max_completion_tokens"},
}
_GREATEST_SEED = 2**63


def body_of(submit: SubmitText, index: int, model: str, kind: Kind) -> bytes:
    """The body of one streamed call, for answer `index`: an upstream makes one answer per call."""
    asked, body = submit.asked, dict[str, Any](model=model, stream=True)
    options: Body = {"include_usage": True}
    if kind in RUNNING_USAGE:
        options["continuous_usage_stats"] = True
    body["stream_options"] = options
    body |= _sampled(submit, index, kind)
    if isinstance(asked, Chat):
        body["messages"] = [_message(message) for message in asked.messages]
        body |= _chat(asked)
    else:
        body["prompt"] = asked.text
        body.pop("max_completion_tokens", None)
        body["max_tokens"] = submit.sampling.max_tokens
    body |= _logprobs(submit)
    if submit.sampling.grammar is not None:
        body |= _grammar(submit.sampling.grammar)
    if submit.cache_salt and "cache_salt" in PARAMETERS[kind]:
        body["cache_salt"] = submit.cache_salt
    return msgspec.json.encode(body)


def embedding_body(texts: tuple[str, ...], model: str, dimensions: int) -> bytes:
    body: Body = {"model": model, "input": list(texts), "encoding_format": "float"}
    if dimensions:
        body["dimensions"] = dimensions
    return msgspec.json.encode(body)


def _sampled(submit: SubmitText, index: int, kind: Kind) -> Body:
    """The client's own values. Answers differ by their seeds where the client gave one."""
    names = _RENAMED.get(kind, {})
    values: Body = {}
    for name in submit.given:
        value = getattr(submit.sampling, name)
        if name == "seed":
            value = (value + index) % _GREATEST_SEED
        elif name == "logit_bias":
            value = {str(token): bias for token, bias in value.items()}
        elif name == "top_p":
            value = max(value, GREEDY_TOP_P)  # 0 is no value for most servers
        values[names.get(name, name)] = value
    return values


def _chat(asked: Chat) -> Body:
    body: Body = {}
    if asked.functions:
        body["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": each.name,
                    **({"description": each.description} if each.description else {}),
                    "parameters": msgspec.Raw(each.parameters.encode()),
                    **({"strict": True} if each.strict else {}),
                },
            }
            for each in asked.functions
        ]
        if asked.forced:
            body["tool_choice"] = {"type": "function", "function": {"name": asked.forced}}
        elif asked.required:
            body["tool_choice"] = "required"
        if not asked.parallel and not asked.forced:
            body["parallel_tool_calls"] = False
    for name in ("reasoning_effort", "verbosity"):
        if (value := getattr(asked, name)) is not None:
            body[name] = value
    if asked.template:
        body["chat_template_kwargs"] = asked.template
    if asked.continues:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    return body


def _message(message: AskedMessage) -> Body:
    return dict(_members(message))


def _members(message: AskedMessage) -> Iterator[tuple[str, Any]]:
    yield "role", message.role
    yield "content", None if message.calls and not message.content else message.content
    if message.name:
        yield "name", message.name
    if message.reasoning:
        yield "reasoning_content", message.reasoning
    if message.call_id:
        yield "tool_call_id", message.call_id
    if message.calls:
        yield (
            "tool_calls",
            [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in message.calls
            ],
        )


def _logprobs(submit: SubmitText) -> Body:
    wanted = submit.sampling.logprobs
    if wanted is None:
        return {}
    if isinstance(submit.asked, Chat):
        return {"logprobs": True, "top_logprobs": wanted}
    return {"logprobs": wanted}


def _grammar(grammar: Grammar) -> Body:
    """As `response_format` where that can say it, which everybody knows; else in vLLM's words."""
    match grammar.kind:
        case "json_object":
            return {"response_format": {"type": "json_object"}}
        case "json_schema":
            schema = {"name": "answer", "strict": True, "schema": _raw(grammar.source)}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
        case "choice":
            return {"structured_outputs": {"choice": _raw(grammar.source)}}
        case "regex":
            return {"structured_outputs": {"regex": grammar.source}}
        case "lark":
            return {"structured_outputs": {"grammar": grammar.source}}


def _raw(source: str) -> msgspec.Raw:
    return msgspec.Raw(source.encode())
