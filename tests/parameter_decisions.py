"""Every parameter of chat and completions that the best servers know, and what becomes of it.

docs/compatibility.md tells of them; `gateway/test_parameters.py` shows that it is so.
"""

from typing import Literal, NamedTuple

from tiny_checkpoint import MAX_LEN

Where = Literal["chat", "text", "both"]


class Decision(NamedTuple):
    """`right` is a value that is taken; `wrong` one that is refused by the field's name."""

    how: Literal["honoured", "refused", "ignored"]
    where: Where = "both"
    right: object = None
    wrong: object = None
    why: str = ""


def honoured(right: object, wrong: object, where: Where = "both") -> Decision:
    return Decision("honoured", where, right, wrong)


def refused(wrong: object, right: object = None, where: Where = "both") -> Decision:
    return Decision("refused", where, right, wrong)


def ignored(value: object, why: str, where: Where = "both") -> Decision:
    return Decision("ignored", where, value, None, why)


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
USER = [{"role": "user", "content": "What is the capital of France?"}]
ANY = {"a": 1}
DECISIONS = {
    "add_generation_prompt": honoured(False, "yes", "chat"),
    "add_special_tokens": honoured(False, "no"),
    "allowed_token_ids": honoured([40, 41], []),
    "audio": refused({}),
    "bad_words": honoured(["brown"], [""]),
    "best_of": honoured(1, 0),
    "cache_salt": honoured("mine", ""),
    "chat_template": refused("{{ messages }}", None, "chat"),
    "chat_template_kwargs": honoured({"enable_thinking": False}, {"a": [1]}, "chat"),
    "container": refused("x"),
    "context_management": refused(ANY),
    "continue_final_message": honoured(False, 1, "chat"),
    "conversation": refused("x"),
    "custom_logit_processor": refused("x"),
    "custom_params": refused({}),
    "documents": honoured([{"text": "a fox"}], [1], "chat"),
    "ebnf": refused('root ::= "a"'),
    "ec_transfer_params": refused({}),
    "echo": honoured(False, 1),
    "enable_thinking": honoured(False, "no", "chat"),
    "extra_key": refused("x"),
    "format": refused("json", ""),
    "grammar": refused("root ::= 'a'", ""),
    "frequency_penalty": honoured(0.5, 3),
    "function_call": honoured("auto", {"name": "f"}, "chat"),
    "functions": honoured([{"name": "f"}], [{"name": "a b"}], "chat"),
    "guided_choice": refused(["a"]),
    "guided_decoding_backend": refused("x"),
    "guided_grammar": refused("x"),
    "guided_json": refused({}),
    "guided_regex": refused("a"),
    "guided_whitespace_pattern": refused(" "),
    "ignore_eos": honoured(True, 1),
    "images_config": refused({}),
    "include_reasoning": honoured(False, "no", "chat"),
    "include_stop_str_in_output": honoured(True, 1),
    "input": refused("hi"),
    "input_ids": refused([1]),
    "instructions": refused("x"),
    "json_schema": refused("{}"),
    "kv_transfer_params": refused({}),
    "length_penalty": refused(2, 1),
    "logit_bias": honoured({"40": 5}, {"x": 1}),
    "logprob_token_ids": refused([1]),
    "logprobs": honoured(True, "x", "chat"),
    "lora_path": refused("x"),
    "max_new_tokens": refused(5),
    "max_completion_tokens": honoured(3, 0, "chat"),
    "max_output_tokens": refused(5),
    "max_tokens": honoured(3, -1),
    "max_tool_calls": refused(1),
    "mcp_servers": refused(["x"]),
    "media_io_kwargs": refused({}),
    "messages": honoured(USER, [], "chat"),
    "min_p": honoured(0.1, 2),
    "min_tokens": honoured(2, -1),
    "mm_payload": refused("none"),
    "mm_processor_kwargs": refused({}),
    "modalities": honoured(["text"], ["audio"], "chat"),
    "model": honoured("tiny", 5),
    "moderation": refused({}),
    "n_predict": refused(5, -1),
    "n": honoured(2, 0),
    "no_stop_trim": refused(True, False),
    "output_config": refused(ANY),
    "output_format": refused(ANY),
    "parallel_tool_calls": honoured(False, 1, "chat"),
    "presence_penalty": honoured(0.5, -3),
    "previous_response_id": refused("x"),
    "priority": honoured(-1, "x"),
    "prompt": honoured("The", 1, "text"),
    "prompt_embeds": refused("AAAA"),
    "prompt_logprobs": honoured(2, 21),
    "reasoning": refused(ANY),
    "reasoning_effort": honoured("low", "much", "chat"),
    "regex": refused("a"),
    "repeat_penalty": refused(1.1, 1.0),
    "repetition_detection": refused({}),
    "repetition_penalty": honoured(1.1, 0),
    "response_format": honoured({"type": "text"}, {"type": "x"}),
    "return_cached_tokens_details": refused(True, False),
    "return_hidden_states": refused(True, False),
    "return_meta_info": refused(True, False),
    "return_mm_kwargs": refused(True, False),
    "return_prompt_text": refused(True, False),
    "return_prompt_token_ids": refused(True, False),
    "return_routed_experts": refused(True, False),
    "return_sampling_mask": refused(True, False),
    "return_spec_tokens_details": refused(True, False),
    "return_token_ids": honoured(True, 1),
    "return_token_offsets": refused(True, False),
    "return_tokens_as_token_ids": honoured(True, 1),
    "return_weight_versions": refused(True, False),
    "routed_experts_prompt_start": refused(0),
    "sampling_logprobs_mode": refused("x"),
    "seed": honoured(5, "x"),
    "separate_reasoning": refused(False, True),
    "session_params": refused({}),
    "skip_special_tokens": honoured(False, 1),
    "spaces_between_special_tokens": ignored(False, "no tokenizer here puts any between them"),
    "stop": honoured(["x"], [1]),
    "stop_regex": refused("a"),
    "stop_sequences": refused(["x"]),
    "stop_token_ids": honoured([40], [-1]),
    "stream": honoured(False, 1),
    "stream_options": honoured(None, {"include_usage": True}),
    "stream_reasoning": refused(False, True),
    "structured_outputs": honoured({"regex": "ab"}, {}),
    "suffix": refused("x", ""),
    "system": refused("x"),
    "task": refused("x"),
    "temperature": honoured(0, 3),
    "text": refused(ANY),
    "thinking": refused({"type": "enabled"}),
    "thinking_token_budget": refused(5, -1),
    "tool_choice": honoured("none", "sometimes", "chat"),
    "tools": honoured([TOOL], [{"type": "custom"}], "chat"),
    "top_k": honoured(5, -2),
    "top_logprobs": honoured(0, 21, "chat"),
    "top_p": honoured(0, 1.1),
    "truncate_prompt_tokens": honoured(-1, MAX_LEN + 1),
    "truncation_side": honoured("right", "top"),
    "use_audio_in_video": refused(True, False),
    "use_beam_search": refused(True, False),
    "verbosity": honoured("low", "mute", "chat"),
    "video_config": refused({}),
    "vllm_xargs": refused({"a": 1}),
    "watermark": refused({}),
    "watermarking": refused(True, False),
    "web_search_options": refused({}),
    # Not declared: any value will do.
    "metadata": ignored({"a": "b"}, "nothing is stored"),
    "prediction": ignored({"type": "content", "content": "x"}, "it only saves time"),
    "prompt_cache_key": ignored("k", "prefixes are found by their tokens"),
    "prompt_cache_options": ignored({}, "prefixes are found by their tokens"),
    "prompt_cache_retention": ignored("24h", "the cache keeps what it has room for"),
    "request_id": ignored("mine", "X-Request-Id is the client's name for a request"),
    "rid": ignored("mine", "X-Request-Id is the client's name for a request"),
    "safety_identifier": ignored("u", "nobody is told"),
    "service_tier": ignored("auto", "there is one; see priority"),
    "session_id": ignored("s", "workers are chosen by cached prefix"),
    "store": ignored(True, "chats are not stored; responses are"),
    "stream_interval": ignored(4, "what is ready goes out, in one write"),
    "user": ignored("u", "teams and keys say who asks"),
}
NOT_OF_TEXTS = {
    name for name, each in DECISIONS.items() if each.where == "chat" and name != "logprobs"
}
"""What only chats have is refused where a text is asked for; its `logprobs` is a number."""
