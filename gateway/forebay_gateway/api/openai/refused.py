"""Fields that other servers know, that nothing here honours, and that would change the answer.

They are declared so that they are refused by name, never ignored. Null is always fine, and so is a
value that asks for nothing. It knows no model.
"""

from collections.abc import Mapping, Sequence
from operator import attrgetter

import msgspec
from forebay_shared.errors import UnsupportedError

from forebay_gateway.api.openai.structured import REMOVED

Flag = bool | None


class Foreign(msgspec.Struct, frozen=True, kw_only=True):
    """Of vLLM, SGLang, llama.cpp, Ollama, TGI and OpenAI, whatever the dialect. A flag may be
    false, but for those whose false says more."""

    audio: object = None
    custom_logit_processor: object = None
    custom_params: object = None
    ebnf: object = None
    ec_transfer_params: object = None
    extra_key: object = None
    format: object = None
    grammar: object = None
    guided_choice: object = None
    guided_decoding_backend: object = None
    guided_grammar: object = None
    guided_json: object = None
    guided_regex: object = None
    guided_whitespace_pattern: object = None
    images_config: object = None
    input_ids: object = None
    json_schema: object = None
    kv_transfer_params: object = None
    length_penalty: float | None = None
    logprob_token_ids: object = None
    lora_path: object = None
    max_new_tokens: object = None
    media_io_kwargs: object = None
    mm_payload: object = None
    mm_processor_kwargs: object = None
    moderation: object = None
    n_predict: int | None = None
    no_stop_trim: Flag = None
    prompt_embeds: object = None
    regex: object = None
    repeat_penalty: float | None = None
    repetition_detection: object = None
    return_cached_tokens_details: Flag = None
    return_hidden_states: Flag = None
    return_meta_info: Flag = None
    return_mm_kwargs: Flag = None
    return_prompt_text: Flag = None
    return_prompt_token_ids: Flag = None
    return_routed_experts: Flag = None
    return_sampling_mask: Flag = None
    return_spec_tokens_details: Flag = None
    return_token_offsets: Flag = None
    return_weight_versions: Flag = None
    routed_experts_prompt_start: object = None
    sampling_logprobs_mode: object = None
    separate_reasoning: Flag = None
    session_params: object = None
    stop_regex: object = None
    stream_reasoning: Flag = None
    suffix: str | None = None
    task: object = None
    thinking_token_budget: int | None = None
    use_audio_in_video: Flag = None
    use_beam_search: Flag = None
    video_config: object = None
    vllm_xargs: object = None
    watermark: object = None
    watermarking: Flag = None
    web_search_options: object = None


class Refused(Foreign, frozen=True, kw_only=True):
    """The same where `thinking` is not a field of the dialect itself."""

    thinking: object = None


class Borrowed(Refused, frozen=True, kw_only=True):
    """Beside these, fields of responses and of Anthropic's messages, sent where a chat or a text is
    asked for: an instruction or a limit that is dropped would go unnoticed."""

    container: object = None
    context_management: object = None
    conversation: object = None
    input: object = None
    instructions: object = None
    max_output_tokens: object = None
    max_tool_calls: object = None
    mcp_servers: object = None
    output_config: object = None
    output_format: object = None
    previous_response_id: object = None
    reasoning: object = None
    stop_sequences: object = None
    system: object = None
    text: object = None


HARMLESS: dict[str, object] = {
    "best_of": 1,
    "echo": False,
    "format": "",
    "grammar": "",
    "length_penalty": 1.0,
    "modalities": ["text"],
    "n": 1,
    "n_predict": -1,
    "repeat_penalty": 1.0,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "suffix": "",
    "thinking_token_budget": -1,
    "tool_choice": "none",
}
"""Values that ask for what happens anyway. A flag of `Foreign` that is not here may be false."""

_HINTS = {
    **{name: f"; use {new}" for name, new in REMOVED.items()},
    "ebnf": "; use structured_outputs.grammar",
    "extra_key": "; use cache_salt",
    "format": "; use response_format",
    "grammar": "; use structured_outputs.grammar",
    "guided_decoding_backend": "; there is one backend",
    "json_schema": "; use response_format",
    "lora_path": "; name the adapter as model",
    "max_new_tokens": "; use max_tokens",
    "n_predict": "; use max_tokens",
    "no_stop_trim": "; use include_stop_str_in_output",
    "regex": "; use structured_outputs.regex",
    "repeat_penalty": "; use repetition_penalty",
    "return_prompt_token_ids": "; use return_token_ids",
    "stop_regex": "; use stop",
    "thinking": "; use reasoning_effort or chat_template_kwargs",
    "use_beam_search": "; use n or best_of",
}

_READ = {kind: attrgetter(*kind.__struct_fields__) for kind in (Foreign, Refused)}


def refuse(request: Foreign) -> None:
    """Raises UnsupportedError that names the first field that cannot be honoured."""
    kind = Refused if isinstance(request, Refused) else Foreign
    names = kind.__struct_fields__
    found = _READ[kind](request)
    if found == (None,) * len(names):
        return
    for name, value in zip(names, found, strict=True):
        if value is not None and not _equal(value, HARMLESS.get(name, False)):
            hint = _HINTS.get(name, "")
            raise UnsupportedError(f"{name} is not supported{hint}.", param=name)


def own_fields(kind: type[Foreign], base: type[Foreign] = Refused) -> tuple[str, ...]:
    """The fields that a dialect refuses beside those of its base: of every dialect unless told."""
    return tuple(name for name in kind.__struct_fields__ if name not in base.__struct_fields__)


def refuse_own(request: Foreign, names: Sequence[str], hints: Mapping[str, str]) -> None:
    """Raises UnsupportedError that names the first of a dialect's own that is there, and says what
    to use instead."""
    for name in names:
        value = getattr(request, name)
        if value not in (None, [], {}) and not _equal(value, HARMLESS.get(name)):
            hint = hints.get(name, "")
            raise UnsupportedError(f"{name} is not supported here{hint}.", param=name)


def _equal(value: object, harmless: object) -> bool:
    return value == harmless and type(value) is type(harmless)
