"""The scenarios through langchain-openai: what LangChain's classes make of the answers."""

import asyncio
import json

import openai
from harness import (
    ANSWER,
    ECHO_KEY,
    ECHO_URL,
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
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

WEATHER_QUESTION = "How warm is it in Paris, in celsius?"
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Temperature", "parameters": WEATHER},
}

FORCED = {"tool_choice": "required", "parallel_tool_calls": False}


class Capital(BaseModel):
    """A capital city."""

    city: str = Field(max_length=12)
    inhabitants: int = Field(ge=0, le=99)


def chat(**options) -> ChatOpenAI:
    options = {"model": MODEL, "base_url": URL, "api_key": KEY, "max_tokens": 24} | options
    return ChatOpenAI(temperature=0, max_retries=0, timeout=PATIENCE_S, **options)


@scenario
def chat_plain() -> None:
    answer = chat().invoke([SystemMessage("You are a helpful AI assistant."), ("user", QUESTION)])
    check(isinstance(answer.content, str), answer)
    answer = chat().invoke(QUESTION)
    check(answer.content == ANSWER, answer)
    check(answer.response_metadata["finish_reason"] == "stop", answer)
    usage = answer.usage_metadata
    check(usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"], usage)


@scenario
def chat_streamed() -> None:
    whole = None
    for chunk in chat(stream_usage=True).stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    check(whole.content == ANSWER, whole)
    check(whole.usage_metadata["output_tokens"] > 0, whole)
    check(whole.response_metadata["finish_reason"] == "stop", whole)


@scenario
def chat_stop() -> None:
    answer = chat(stop_sequences=[" Paris"]).invoke(QUESTION)
    check(answer.content == "The capital of France is", answer)


@scenario
def chat_logprobs() -> None:
    answer = chat(logprobs=True, top_logprobs=2).invoke(QUESTION)
    content = answer.response_metadata["logprobs"]["content"]
    check("".join(token["token"] for token in content) == ANSWER, content)


@scenario
def tools_forced() -> None:
    bound = chat(max_tokens=60).bind_tools([TOOL], **FORCED)
    (call,) = bound.invoke(WEATHER_QUESTION).tool_calls
    check(call["name"] == "get_weather", call)
    check(set(call["args"]) == {"city", "unit"}, call)


@scenario
def tools_streamed() -> None:
    bound = chat(max_tokens=60).bind_tools([TOOL], **FORCED)
    whole, pieces = None, 0
    for chunk in bound.stream(WEATHER_QUESTION):
        pieces += len(chunk.tool_call_chunks)
        whole = chunk if whole is None else whole + chunk
    check(pieces > 3, "the call came in one piece")
    (call,) = whole.tool_calls
    check(set(call["args"]) == {"city", "unit"}, whole)
    check(whole.invalid_tool_calls == [], whole)


@scenario
def tools_result() -> None:
    bound = chat(max_tokens=60).bind_tools([TOOL], tool_choice="get_weather")
    called = bound.invoke(WEATHER_QUESTION)
    result = ToolMessage("21 degrees", tool_call_id=called.tool_calls[0]["id"])
    after = chat(max_tokens=8).invoke([HumanMessage(WEATHER_QUESTION), called, result])
    check(after.content, after)


@scenario
def structured_parse() -> None:
    for method in ("json_schema", "function_calling"):
        model = chat(max_tokens=60).with_structured_output(Capital, method=method)
        check(isinstance(model.invoke(QUESTION), Capital), method)


@scenario
def structured_streamed() -> None:
    model = chat(max_tokens=60).with_structured_output(Capital, method="json_schema")
    *_, last = model.stream(QUESTION)
    check(isinstance(last, Capital), last)


@scenario
def completions() -> None:
    model = OpenAI(model=MODEL, base_url=URL, api_key=KEY, max_tokens=6, temperature=0)
    plain = model.invoke("One, two, three,")
    check("".join(model.stream("One, two, three,")) == plain, plain)
    both = model.generate(["One, two,", "A, B,"]).generations
    check(len(both) == 2, both)


@scenario
def embeddings() -> None:
    model = OpenAIEmbeddings(
        model=EMBEDDING_MODEL, base_url=URL, api_key=KEY, check_embedding_ctx_length=False
    )
    cat, law = model.embed_documents(["a cat", "tax law"])
    query = model.embed_query("a kitten")
    check(len(cat) == len(law) == len(query), len(query))
    check(sum(map(float.__mul__, cat, query)) > sum(map(float.__mul__, law, query)))


@scenario
def responses_create() -> None:
    answer = chat(use_responses_api=True).invoke(QUESTION)
    check(answer.text == ANSWER, answer)


@scenario
def responses_streamed() -> None:
    whole = None
    for chunk in chat(use_responses_api=True).stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    check(whole.text == ANSWER, whole)


@scenario
def responses_tools() -> None:
    model = chat(max_tokens=60, use_responses_api=True)
    (call,) = model.bind_tools([TOOL], **FORCED).invoke(WEATHER_QUESTION).tool_calls
    check(set(call["args"]) == {"city", "unit"}, call)


@scenario
def errors() -> None:
    with raising(openai.AuthenticationError):
        chat(api_key="wrong").invoke(QUESTION)
    with raising(openai.NotFoundError):
        chat(model="gpt-9").invoke(QUESTION)
    with raising(openai.BadRequestError) as caught:
        chat(max_tokens=-1).invoke(QUESTION)
    check("max_" in json.dumps(caught[0].body), caught[0].body)


@scenario
def leaving() -> None:
    for number, _ in enumerate(
        ChatOpenAI(
            model=MODEL, base_url=URL, api_key=KEY, extra_body={"ignore_eos": True}, max_tokens=1500
        ).stream("Count.")
    ):
        if number == 3:
            break
    until_idle()


@scenario
def chat_reasoning() -> None:
    """LangChain leaves out what OpenAI's API does not have; the answer itself must be whole."""
    model = ChatOpenAI(model="echo", base_url=ECHO_URL, api_key=ECHO_KEY, max_tokens=30)
    answer = model.invoke("<think>Easy.</think>Yes.")
    check("think" not in answer.content, answer)
    check("Yes." in answer.content, answer)


@scenario
async def asynchronous() -> None:
    answers = await chat().abatch([QUESTION] * 4)
    check({answer.content for answer in answers} == {ANSWER}, answers)
    text = ""
    async for chunk in chat().astream(QUESTION):
        text += chunk.content
    check(text == ANSWER, text)
    await asyncio.to_thread(until_idle)


main()
