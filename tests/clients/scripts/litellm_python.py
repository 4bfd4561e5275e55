"""The scenarios through LiteLLM, which speaks both dialects and reads every answer by rules of its
own: many people's clients and proxies stand behind it."""

import asyncio
import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the internet for prices
import litellm
from harness import (
    ANSWER,
    EMBEDDING_MODEL,
    KEY,
    MODEL,
    PATIENCE_S,
    QUESTION,
    URL,
    WEATHER,
    check,
    main,
    raising,
    scenario,
    until_idle,
)
from pydantic import BaseModel, Field

litellm.suppress_debug_info = True
BASE = URL.removesuffix("/v1")
PROVIDERS = {
    "openai": {"model": f"openai/{MODEL}", "api_base": URL},
    "hosted_vllm": {"model": f"hosted_vllm/{MODEL}", "api_base": URL},
    "anthropic": {"model": f"anthropic/{MODEL}", "api_base": BASE},
}
COMMON = {"api_key": KEY, "temperature": 0, "max_tokens": 24, "timeout": PATIENCE_S}
SAID = [{"role": "user", "content": QUESTION}]
WEATHER_SAID = [{"role": "user", "content": "How warm is it in Paris, in celsius?"}]
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Temperature", "parameters": WEATHER},
}
FORCED = {
    "messages": WEATHER_SAID,
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
    "max_tokens": 60,
}


class Capital(BaseModel):
    """A capital city."""

    city: str = Field(max_length=12)
    inhabitants: int = Field(ge=0, le=99)


def ask(provider: str, **fields):
    options = {**PROVIDERS[provider], **COMMON, "messages": SAID, "num_retries": 0, **fields}
    return litellm.completion(**options)


def together(provider: str, **fields):
    """The chunks of a stream as LiteLLM itself puts them together."""
    return litellm.stream_chunk_builder(list(ask(provider, stream=True, **fields)))


@scenario
def chat_plain() -> None:
    for provider in PROVIDERS:
        answer = ask(provider)
        check(answer.choices[0].message.content == ANSWER, provider, answer)
        check(answer.choices[0].finish_reason == "stop", provider, answer)
        check(ask(provider, max_tokens=3).choices[0].finish_reason == "length", provider)


@scenario
def chat_streamed() -> None:
    for provider in PROVIDERS:
        answer = together(provider, stream_options={"include_usage": True})
        check(answer.choices[0].message.content == ANSWER, provider, answer)
        check(answer.choices[0].finish_reason == "stop", provider, answer)
        plain = ask(provider).usage
        check(answer.usage.completion_tokens == plain.completion_tokens, provider, answer.usage)
        check(answer.usage.prompt_tokens == plain.prompt_tokens, provider, answer.usage)


@scenario
def tools_forced() -> None:
    for provider in PROVIDERS:
        (call,) = ask(provider, **FORCED).choices[0].message.tool_calls
        check(call.function.name == "get_weather", provider, call)
        check(set(json.loads(call.function.arguments)) == {"city", "unit"}, provider, call)


@scenario
def tools_streamed() -> None:
    for provider in PROVIDERS:
        answer = together(provider, **FORCED)
        (call,) = answer.choices[0].message.tool_calls
        check(call.id, provider, call)
        check(set(json.loads(call.function.arguments)) == {"city", "unit"}, provider, call)
        check(answer.choices[0].finish_reason == "tool_calls", provider, answer)


@scenario
def tools_result() -> None:
    for provider in ("openai", "anthropic"):
        called = ask(provider, **FORCED).choices[0].message
        result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "21 degrees"}
        after = ask(provider, messages=[*WEATHER_SAID, called, result], tools=[TOOL])
        check(after.choices[0].message.content, provider, after)


@scenario
def structured_parse() -> None:
    for provider in PROVIDERS:
        answer = ask(provider, response_format=Capital, max_tokens=60)
        Capital.model_validate_json(answer.choices[0].message.content)


@scenario
def completions() -> None:
    fields = {**COMMON, "model": f"text-completion-openai/{MODEL}", "api_base": URL}
    fields |= {"prompt": "One, two, three,", "max_tokens": 6}
    plain = litellm.text_completion(**fields).choices[0].text
    chunks = litellm.text_completion(**fields, stream=True)
    check("".join(chunk.choices[0].text or "" for chunk in chunks) == plain, plain)


@scenario
def embeddings() -> None:
    for provider in ("openai", "hosted_vllm"):
        options = {"model": f"{provider}/{EMBEDDING_MODEL}", "api_base": URL, "api_key": KEY}
        found = litellm.embedding(**options, input=["a cat", "a kitten"]).data
        check([len(one["embedding"]) for one in found] == [384, 384], provider)
    for provider in ("hosted_vllm", "cohere", "jina_ai"):
        options = {"model": f"{provider}/{EMBEDDING_MODEL}", "api_base": BASE, "api_key": KEY}
        ranked = litellm.rerank(**options, query="cat", documents=["tax law", "kitten"]).results
        check([one["index"] for one in ranked] == [1, 0], provider, ranked)


@scenario
def responses_create() -> None:
    options = {**PROVIDERS["openai"], "api_key": KEY, "temperature": 0, "timeout": PATIENCE_S}
    options |= {"input": QUESTION, "max_output_tokens": 24}
    answer = litellm.responses(**options)
    check(answer.output[0].content[0].text == ANSWER, answer)
    *_, last = litellm.responses(**options, stream=True)
    check(last.response.output[0].content[0].text == ANSWER, last)


@scenario
def errors() -> None:
    for provider in PROVIDERS:
        with raising(litellm.AuthenticationError):
            ask(provider, api_key="wrong")
        with raising(litellm.NotFoundError):
            ask(provider, model=f"{provider}/gpt-9")
        with raising(litellm.ContextWindowExceededError):
            ask(provider, messages=[{"role": "user", "content": "x " * 9000}])
        with raising(litellm.BadRequestError):
            ask(provider, top_p=7)


@scenario
async def leaving() -> None:
    """A stream that is given up takes its work with it."""
    for provider in PROVIDERS:
        options = {**PROVIDERS[provider], **COMMON, "messages": SAID, "max_tokens": 4000}
        stream = await litellm.acompletion(**options, stream=True, stop=["\0"])
        await anext(stream)
        await stream.aclose()
        await asyncio.to_thread(until_idle)


main()
