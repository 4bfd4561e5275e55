"""The requests of `side_by_side.py`, and the differences from vLLM that are meant, with why."""

import re
from typing import Any

MODEL = "smollm2"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"

Json = Any
Case = tuple[str, str, Json]

_TEXTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):\n",
    "1, 1, 2, 3, 5, 8,",
    "Water boils at",
    "The opposite of hot is",
    "To be, or not to be,",
    "import numpy as np\n",
    "Dear Sir or Madam,",
    "The three primary colours are",
    "Q: What is 2 + 2?\nA:",
    "Les sanglots longs des violons",
    "Die Würde des Menschen ist",
    "今日は天気が",
    "😀 means",
    "SELECT name FROM users WHERE",
    "<html><head><title>",
    "In 1969, the first man on the",
    "A B C D E F G",
    " leading space",
]
_CHATS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain gravity in one sentence.",
    "List three fruits.",
    "Translate 'good morning' to Spanish.",
    "What is 12 times 12?",
    "Who wrote Hamlet?",
    "Say hello in Japanese.",
]


def _text(prompt: Json = "One, two, three,", **fields: Json) -> Json:
    return {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 8} | fields


def _chat(content: str = "What is the capital of France?", **fields: Json) -> Json:
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 8} | fields


PROMPTS: list[Case] = [
    *((f"text {text!r}", TEXT, _text(text, max_tokens=24, logprobs=5)) for text in _TEXTS),
    *(
        (f"chat {text!r}", CHAT, _chat(text, max_tokens=24, logprobs=True, top_logprobs=5))
        for text in _CHATS
    ),
    ("token ids", TEXT, _text([504, 3575, 282, 4649, 314], max_tokens=24, logprobs=5)),
    ("four at once", TEXT, _text(_TEXTS[:4], max_tokens=12, logprobs=5)),
    ("long prompt", TEXT, _text(" ".join(map(str, range(300))), max_tokens=16, logprobs=5)),
    ("echo", TEXT, _text("The capital of France is", echo=True, logprobs=3)),
    ("bias", TEXT, _text(logit_bias={"504": 5, "28": -100}, logprobs=5)),
    ("penalties", TEXT, _text("A A A A", presence_penalty=1, frequency_penalty=1, logprobs=5)),
    ("repetition", TEXT, _text("A A A A", repetition_penalty=1.3, max_tokens=16, logprobs=5)),
    ("stop", TEXT, _text("1, 2, 3,", stop=[" 6"], max_tokens=24, logprobs=5)),
    (
        "min_tokens",
        CHAT,
        _chat("Say yes.", min_tokens=12, max_tokens=16, logprobs=True, top_logprobs=5),
    ),
]

_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
_FORCED = {"tools": [_WEATHER], "max_tokens": 60}
_NAMED = {"type": "function", "function": {"name": "get_weather"}}
_SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "answer", "schema": _WEATHER["function"]["parameters"]},
}

_VARIANTS: dict[str, Json] = {
    "plain": {},
    "n": {"n": 2, "temperature": 1, "seed": 1},
    "stop": {"stop": ["e"], "max_tokens": 20},
    "seed": {"seed": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.1},
    "json_schema": {"response_format": _SCHEMA, "max_tokens": 30},
    "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "regex": {"structured_outputs": {"regex": "[0-9]{3}"}},
    "return_token_ids": {"return_token_ids": True},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "length": {"max_tokens": 1},
}
_CHAT_VARIANTS: dict[str, Json] = {
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "logprobs of none": {"logprobs": True},
    "tools required": {**_FORCED, "tool_choice": "required"},
    "tools named": {**_FORCED, "tool_choice": _NAMED},
    "tools none": {**_FORCED, "tool_choice": "none", "max_tokens": 8},
}
_TEXT_VARIANTS: dict[str, Json] = {
    "logprobs": {"logprobs": 2},
    "echo": {"echo": True},
    "echo and logprobs": {"echo": True, "logprobs": 1},
}
_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
_CONTINUOUS = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}


def _both_ways(kind: str, path: str, variants: dict[str, Json], make: Any) -> list[Case]:
    cases: list[Case] = []
    for name, fields in variants.items():
        cases.append((f"{kind} {name}", path, make(**fields)))
        if "prompt_logprobs" not in fields:
            cases.append((f"{kind} {name}, streamed", path, make(**fields, **_USAGE)))
    cases.append((f"{kind} continuous usage", path, make(**_CONTINUOUS)))
    cases.append((f"{kind} streamed without usage", path, make(stream=True)))
    return cases


_ASK = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
SHAPES: list[Case] = [
    *_both_ways("chat", CHAT, _VARIANTS | _CHAT_VARIANTS, _chat),
    *_both_ways("text", TEXT, _VARIANTS | _TEXT_VARIANTS, _text),
    ("models", "/v1/models", None),
    ("version", "/version", None),
    ("tokenize text", "/tokenize", {"model": MODEL, "prompt": "Hello", "return_token_strs": True}),
    ("tokenize chat", "/tokenize", {"model": MODEL, "messages": _ASK["messages"]}),
    ("detokenize", "/detokenize", {"model": MODEL, "tokens": [504, 3575]}),
    ("messages", "/v1/messages", _ASK),
    (
        "count_tokens",
        "/v1/messages/count_tokens",
        {k: v for k, v in _ASK.items() if k != "max_tokens"},
    ),
    ("responses", "/v1/responses", {"model": MODEL, "input": "Hi", "max_output_tokens": 8}),
]

_BAD_COMMON: dict[str, Json] = {
    "n 0": {"n": 0},
    "n of a million": {"n": 1_000_000},
    "n as text": {"n": "two"},
    "temperature -1": {"temperature": -1},
    "temperature 2.1": {"temperature": 2.1},
    "temperature as text": {"temperature": "hot"},
    "top_p 0": {"top_p": 0},
    "top_p 1.1": {"top_p": 1.1},
    "top_k -2": {"top_k": -2},
    "min_p 2": {"min_p": 2},
    "max_tokens -1": {"max_tokens": -1},
    "max_tokens 0": {"max_tokens": 0},
    "max_tokens as text": {"max_tokens": "many"},
    "presence_penalty 3": {"presence_penalty": 3},
    "frequency_penalty -3": {"frequency_penalty": -3},
    "repetition_penalty 0": {"repetition_penalty": 0},
    "seed 2^64": {"seed": 2**64},
    "seed as text": {"seed": "abc"},
    "stop as number": {"stop": 5},
    "five stops": {"stop": ["a", "b", "c", "d", "e"]},
    "empty stop": {"stop": [""]},
    "stop_token_ids out of vocabulary": {"stop_token_ids": [9_999_999]},
    "stop_token_ids -1": {"stop_token_ids": [-1]},
    "logit_bias out of vocabulary": {"logit_bias": {"9999999": 1}},
    "logit_bias of a word": {"logit_bias": {"word": 1}},
    "logit_bias 1000": {"logit_bias": {"5": 1000}},
    "min_tokens above max_tokens": {"min_tokens": 9, "max_tokens": 8},
    "min_tokens -1": {"min_tokens": -1},
    "stream_options without stream": {"stream_options": {"include_usage": True}},
    "stream as text": {"stream": "perhaps"},
    "response_format of nothing": {"response_format": {"type": "nope"}},
    "json_schema without schema": {"response_format": {"type": "json_schema"}},
    "broken regex": {"structured_outputs": {"regex": "[a-"}},
    "broken grammar": {"structured_outputs": {"grammar": "root ::= ("}},
    "empty choice": {"structured_outputs": {"choice": []}},
    "two structures": {"structured_outputs": {"regex": "a", "choice": ["a"]}},
    "unknown model": {"model": "gpt-9"},
    "max_tokens above the context": {"max_tokens": 2**31 - 1, "stop": ["e"]},
    "prompt_logprobs -2": {"prompt_logprobs": -2},
    "bad_words empty": {"bad_words": [""]},
    "allowed_token_ids empty": {"allowed_token_ids": []},
    "allowed_token_ids out of vocabulary": {"allowed_token_ids": [9_999_999]},
    "truncate_prompt_tokens -5": {"truncate_prompt_tokens": -5},
}
_BAD_CHAT: dict[str, Json] = {
    "no messages": {"messages": []},
    "messages as text": {"messages": "hi"},
    "unknown role": {"messages": [{"role": "wizard", "content": "x"}]},
    "content of a number": {"messages": [{"role": "user", "content": 5}]},
    "unknown part": {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
    "an image": {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y"}}]}
        ]
    },
    "top_logprobs without logprobs": {"top_logprobs": 2},
    "top_logprobs 100": {"logprobs": True, "top_logprobs": 100},
    "required without tools": {"tool_choice": "required"},
    "named tool that is not there": {
        "tools": [_WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "other"}},
    },
    "empty tools": {"tools": []},
    "tool of no type": {"tools": [{"function": {"name": "x"}}]},
    "too long": {"messages": [{"role": "user", "content": "word " * 3000}]},
    "reasoning_effort of nothing": {"reasoning_effort": "heroic"},
}
_BAD_TEXT: dict[str, Json] = {
    "empty prompt": {"prompt": ""},
    "no prompts": {"prompt": []},
    "prompt of a number": {"prompt": 5},
    "ids out of vocabulary": {"prompt": [9_999_999]},
    "id -1": {"prompt": [-1]},
    "logprobs 100": {"logprobs": 100},
    "suffix": {"suffix": "end"},
    "too long": {"prompt": [504] * 3000},
}
BAD: list[Case] = [
    *(
        (f"chat, {name}", CHAT, _chat(**fields))
        for name, fields in (_BAD_COMMON | _BAD_CHAT).items()
    ),
    *(
        (f"text, {name}", TEXT, _text(**fields))
        for name, fields in (_BAD_COMMON | _BAD_TEXT).items()
    ),
    *((f"body {raw[:12]!r}", CHAT, raw) for raw in (b"", b"{", b"[]", b"null", b"5", b'"x"')),
    ("deep body", CHAT, b"[" * 100_000),
    ("unknown path", "/v1/nothing", {}),
]

_NULLS = "fields of vLLM's own that are null are left out, as OpenAI does not have them"
_MEANT_SHAPES: list[tuple[str, str]] = [
    (
        r"(\[\]\.)?(choices\[\]\.)?(token_ids|prompt_token_ids|prompt_text|prompt_logprobs|"
        r"routed_experts|metrics|kv_transfer_params|ec_transfer_params)",
        _NULLS,
    ),
    (r"service_tier", _NULLS),
    (r"choices\[\]\.message\.(reasoning|function_call|audio|annotations)", _NULLS),
    (
        r"(\[\]\.)?usage\.prompt_tokens_details(\.cached_tokens)?",
        "always there, in vLLM with --enable-prompt-tokens-details only",
    ),
    (r"(\[\]\.)?usage\.completion_tokens_details", "there when the model thinks; vLLM: null"),
    (r"\[\]\.usage", "null in the chunks before the last, as OpenAI; vLLM leaves it out"),
    (
        r"\[\]\.choices\[\]\.finish_reason",
        "a chunk of its own, as OpenAI; vLLM: with the last text",
    ),
    (r"\[\]\.choices\[\]\.logprobs", "the chunk with the finish reason has null"),
    (r"\[\]\.choices\[\]\.delta\.content", "no null inside a delta"),
    (r"(\[\]\.)?system_fingerprint", "OpenAI's field is optional and says nothing of our engine"),
    (r"(\[\]\.)?choices\[\]\.logprobs\.refusal", "OpenAI has it; vLLM does not"),
    (r"choices\[\]\.message\.content", "null beside a call, as OpenAI; vLLM: an empty string"),
    (
        r"\[\]\.choices\[\]\.stop_reason",
        "in a choice's last chunk; vLLM's text completions have it in all",
    ),
    (r"data\[\]\.(root|parent|permission)", "relics; a path of the server is nobody's business"),
    (r"data\[\]\.capabilities", "what the model can do; an addition"),
    (r"messages: .*", "Anthropic's own types have it; vLLM leaves it out"),
    (r"count_tokens: context_management", "for an edit of the context, which is refused here"),
    (r"responses: (in|out)put_messages", _NULLS),
    (
        r"responses: usage\..*(_per_turn|tool_output_tokens)",
        "vLLM's own; its tools run in the server",
    ),
    (r"responses: .*", "as OpenAI's Response object has it"),
]
_MEANT_STATUS: list[tuple[str, str]] = [
    (r".*, five stops", "16 stop strings are allowed; vLLM allows 4"),
    (r".*, empty stop", "an empty stop string cannot match and is left out"),
    (r".*, logit_bias 1000", "OpenAI's range is -100 to 100; vLLM clamps in silence"),
    (r".*, max_tokens above the context", "the limit is an upper bound; what fits is generated"),
    (r"chat, unknown role", "OpenAI's roles only; vLLM hands any to the template"),
    (r"chat, empty tools", "an empty list is no tools at all"),
    (r"chat, tool of no type", "required, as OpenAI; vLLM assumes a function"),
]


def reason_for_shape(label: str, where: str) -> str:
    """Why the types at a path differ on purpose, or nothing."""
    places = (where, f"{label}: {where}")
    found = (why for path, why in _MEANT_SHAPES if any(re.fullmatch(path, p) for p in places))
    return next(found, "")


def reason_for_status(label: str) -> str:
    """Why two status codes differ on purpose, or nothing."""
    return next((why for name, why in _MEANT_STATUS if re.fullmatch(name, label)), "")
