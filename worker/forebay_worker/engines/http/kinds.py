"""What each kind of OpenAI-compatible server takes, and how to tell which it is.

Names are those of a request's fields at the gateway, which refuses the rest by name. Facts are from
the servers' own documents, of late 2026. It knows no HTTP.
"""

from collections.abc import Collection
from typing import Literal

from forebay_shared.models import (
    CAP_GENERATE,
    CAP_GRAMMAR,
    CAP_LOGIT_BIAS,
    CAP_LOGPROBS,
    CAP_PENALTIES,
    CAP_TEXT,
)

Kind = Literal["compatible", "openai", "vllm", "sglang", "llama-cpp", "ollama", "forebay"]

_BASE = frozenset(
    {"max_tokens", "max_completion_tokens", "temperature", "top_p", "response_format", "tools",
     "tool_choice", "functions", "function_call"}
)  # fmt: skip
_COMPATIBLE = _BASE | {"seed", "presence_penalty", "frequency_penalty"}
_OPENAI = _COMPATIBLE | {
    "logprobs", "top_logprobs", "logit_bias", "parallel_tool_calls", "reasoning_effort",
    "verbosity",
}  # fmt: skip
_LLAMA_CPP = _COMPATIBLE | {
    "top_k", "min_p", "repetition_penalty", "logprobs", "top_logprobs", "logit_bias",
    "parallel_tool_calls", "ignore_eos", "chat_template_kwargs", "enable_thinking",
}  # fmt: skip
_SGLANG = _COMPATIBLE | {
    "top_k", "min_p", "repetition_penalty", "logprobs", "top_logprobs", "logit_bias", "min_tokens",
    "stop_token_ids", "ignore_eos", "skip_special_tokens", "parallel_tool_calls",
    "chat_template_kwargs", "enable_thinking", "reasoning_effort", "continue_final_message",
}  # fmt: skip
_VLLM = _SGLANG | {
    "allowed_token_ids", "structured_outputs", "add_generation_prompt", "cache_salt",
}  # fmt: skip

PARAMETERS: dict[Kind, frozenset[str]] = {
    "compatible": _COMPATIBLE,
    "openai": _OPENAI,
    "vllm": _VLLM,
    "sglang": _SGLANG,
    "llama-cpp": _LLAMA_CPP,
    "ollama": _COMPATIBLE | {"reasoning_effort"},
    "forebay": _VLLM | {"verbosity"},
}
_CAPABILITIES: dict[str, frozenset[str]] = {
    CAP_LOGPROBS: frozenset({"logprobs", "top_logprobs"}),
    CAP_GRAMMAR: frozenset({"response_format", "structured_outputs"}),
    CAP_PENALTIES: frozenset({"presence_penalty", "frequency_penalty", "repetition_penalty"}),
    CAP_LOGIT_BIAS: frozenset({"logit_bias", "allowed_token_ids"}),
}
"""What an engine must be able to do for these fields."""
_OWNERS: dict[str, Kind] = {
    "vllm": "vllm",
    "sglang": "sglang",
    "llamacpp": "llama-cpp",
    "library": "ollama",
    "openai": "openai",
    "system": "openai",
    "openai-internal": "openai",
    "forebay": "forebay",
}

RUNNING_USAGE = frozenset[Kind]({"vllm", "sglang", "forebay"})
"""They tell the usage so far with every chunk, when asked."""


def kind_of(owner: str) -> Kind:
    """The kind of a server by what it calls the owner of a model."""
    return _OWNERS.get(owner, "compatible")


def parameters(kind: Kind, said: Collection[str] | None) -> frozenset[str]:
    """What a model of this kind takes; `said` are the capabilities that it lists itself."""
    takes = PARAMETERS[kind]
    if said is None:
        return takes
    missing = [fields for name, fields in _CAPABILITIES.items() if name not in said]
    return takes.difference(*missing)


def capabilities(takes: Collection[str]) -> frozenset[str]:
    """What the card of a model declares that generates and takes these fields."""
    able = {name for name, fields in _CAPABILITIES.items() if not fields.isdisjoint(takes)}
    return frozenset({CAP_GENERATE, CAP_TEXT, *able})
