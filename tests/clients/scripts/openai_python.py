"""The scenarios through openai-python, any major version from 1 on."""

import json
import time

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
    UNICODE,
    URL,
    WEATHER,
    check,
    main,
    raising,
    scenario,
    until_idle,
)
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=PATIENCE_S)
ASK = {
    "model": MODEL,
    "messages": [{"role": "user", "content": QUESTION}],
    "temperature": 0,
    "max_tokens": 24,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}
WEATHER_QUESTION = {"role": "user", "content": "How warm is it in Paris, in celsius?"}
FORCED = {
    "model": MODEL,
    "messages": [WEATHER_QUESTION],
    "tools": [TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "temperature": 0,
    "max_tokens": 60,
}
LONG = {"model": MODEL, "max_tokens": 1500, "extra_body": {"ignore_eos": True}}


class Capital(BaseModel):
    city: str = Field(max_length=12)
    inhabitants: int = Field(ge=0, le=99)


def text_of(stream) -> str:
    return "".join(c.choices[0].delta.content or "" for c in stream if c.choices)


# --- chat


@scenario
def chat_plain() -> None:
    answer = client.chat.completions.create(**ASK)
    check(answer.choices[0].message.content == ANSWER, answer)
    check(answer.choices[0].message.role == "assistant")
    check(answer.choices[0].finish_reason == "stop")
    check(answer.object == "chat.completion", answer.object)
    check(answer.id.startswith("chatcmpl-"), answer.id)
    check(answer.model == MODEL, answer.model)
    check(abs(answer.created - time.time()) < 600, answer.created)
    usage = answer.usage
    check(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage)
    check(usage.prompt_tokens_details.cached_tokens >= 0, usage)


@scenario
def chat_streamed() -> None:
    chunks = list(client.chat.completions.create(**ASK, stream=True))
    check(text_of(chunks) == ANSWER, chunks)
    check(chunks[0].choices[0].delta.role == "assistant", chunks[0])
    check(len({(c.id, c.created, c.model) for c in chunks}) == 1, chunks)
    reasons = [c.choices[0].finish_reason for c in chunks]
    check(reasons == [None] * (len(chunks) - 1) + ["stop"], reasons)
    check(all(c.usage is None for c in chunks), chunks)


@scenario
def chat_stream_helper() -> None:
    """The SDK's own accumulator; in version 1 it was under `beta`."""
    chat = client.chat if hasattr(client.chat.completions, "stream") else client.beta.chat
    with chat.completions.stream(**ASK) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion()
    check({"chunk", "content.delta", "content.done"} <= kinds, kinds)
    check(answer.choices[0].message.content == ANSWER, answer)
    check(answer.choices[0].finish_reason == "stop", answer)


@scenario
def chat_usage() -> None:
    plain = client.chat.completions.create(**ASK).usage
    chunks = list(
        client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
    )
    check(chunks[-1].choices == [], chunks[-1])
    check(all(c.usage is None for c in chunks[:-1]), chunks)
    streamed = chunks[-1].usage
    check(streamed.prompt_tokens == plain.prompt_tokens, streamed, plain)
    check(streamed.completion_tokens == plain.completion_tokens, streamed, plain)


@scenario
def chat_n() -> None:
    answer = client.chat.completions.create(**ASK, n=3)
    check([c.index for c in answer.choices] == [0, 1, 2], answer)
    check({c.message.content for c in answer.choices} == {ANSWER}, answer)
    texts, ends = ["", "", ""], []
    for chunk in client.chat.completions.create(**ASK, n=3, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends += [choice.index] if choice.finish_reason else []
    check(texts == [ANSWER] * 3, texts)
    check(sorted(ends) == [0, 1, 2], ends)


@scenario
def chat_stop() -> None:
    for stop in (" Paris", ["nowhere", " Paris"]):
        answer = client.chat.completions.create(**ASK, stop=stop)
        check(answer.choices[0].message.content == "The capital of France is", answer)
        check(answer.choices[0].finish_reason == "stop", answer)
        streamed = text_of(client.chat.completions.create(**ASK, stop=stop, stream=True))
        check(streamed == "The capital of France is", streamed)


@scenario
def chat_length() -> None:
    answer = client.chat.completions.create(**{**ASK, "max_tokens": 3})
    check(answer.choices[0].finish_reason == "length", answer)
    check(answer.usage.completion_tokens == 3, answer.usage)
    newer = {k: v for k, v in ASK.items() if k != "max_tokens"}
    answer = client.chat.completions.create(**newer, max_completion_tokens=4)
    check(answer.usage.completion_tokens == 4, answer.usage)


@scenario
def chat_logprobs() -> None:
    answer = client.chat.completions.create(**ASK, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    check(b"".join(bytes(t.bytes) for t in content).decode() == ANSWER, content)
    check(all(len(t.top_logprobs) == 2 for t in content), content)
    check(all(t.logprob <= t.top_logprobs[0].logprob <= 0 for t in content), content)
    streamed = []
    for chunk in client.chat.completions.create(**ASK, logprobs=True, top_logprobs=2, stream=True):
        if chunk.choices[0].logprobs:
            streamed += chunk.choices[0].logprobs.content
    check([t.token for t in streamed] == [t.token for t in content], streamed)


@scenario
def chat_parts() -> None:
    """Content as parts, a system and a developer message, a name, an empty assistant turn."""
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "Hello", "name": "ann"},
            {"role": "assistant", "content": ""},
            {
                "role": "user",
                "content": [{"type": "text", "text": "Say"}, {"type": "text", "text": "yes"}],
            },
        ],
        max_tokens=4,
        seed=1,
        user="u1",
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
    )
    check(isinstance(answer.choices[0].message.content, str), answer)


@scenario
def chat_unicode() -> None:
    """A forced answer whose letters take several tokens each."""
    forced = {**ASK, "extra_body": {"structured_outputs": {"choice": [UNICODE]}}}
    plain = client.chat.completions.create(**forced)
    check(plain.choices[0].message.content == UNICODE, plain)
    chunks = list(client.chat.completions.create(**forced, stream=True))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    check("".join(pieces) == UNICODE, pieces)
    check(not any("\ufffd" in piece for piece in pieces), pieces)


@scenario
def chat_reasoning() -> None:
    """Both names that clients look for; the SDK keeps fields that it does not know."""
    echo = openai.OpenAI(base_url=ECHO_URL, api_key=ECHO_KEY, timeout=PATIENCE_S)
    said = [{"role": "user", "content": "<think>It is easy.</think>Yes."}]
    ask = {"model": "echo", "messages": said, "max_tokens": 40}
    message = echo.chat.completions.create(**ask).choices[0].message
    check("It is easy." in message.reasoning, message)
    check(message.reasoning == message.reasoning_content, message)
    check("think" not in message.content, message)
    thought = content = ""
    for chunk in echo.chat.completions.create(**ask, stream=True):
        delta = chunk.choices[0].delta
        thought += getattr(delta, "reasoning", None) or ""
        content += delta.content or ""
    check((thought, content) == (message.reasoning, message.content), thought, content)


# --- tools and structured output


@scenario
def tools_forced() -> None:
    answer = client.chat.completions.create(**FORCED)
    check(answer.choices[0].finish_reason == "tool_calls", answer)
    (call,) = answer.choices[0].message.tool_calls
    check(call.function.name == "get_weather", call)
    check(set(json.loads(call.function.arguments)) == {"city", "unit"}, call)
    named = {"type": "function", "function": {"name": "get_weather"}}
    answer = client.chat.completions.create(**{**FORCED, "tool_choice": named})
    check(answer.choices[0].message.tool_calls[0].function.name == "get_weather", answer)


@scenario
def tools_streamed() -> None:
    plain = client.chat.completions.create(**FORCED).choices[0].message.tool_calls[0].function
    pieces, heads, reason = [], [], None
    for chunk in client.chat.completions.create(**FORCED, stream=True):
        reason = chunk.choices[0].finish_reason or reason
        for call in chunk.choices[0].delta.tool_calls or ():
            check(call.index == 0, call)
            heads += [call.function.name] if call.id else []
            pieces.append(call.function.arguments)
    check(heads == ["get_weather"], heads)
    check("".join(pieces) == plain.arguments, pieces, plain)
    check(len(pieces) > 3, "the arguments came in one piece", pieces)
    check(reason == "tool_calls", reason)


@scenario
def tools_stream_helper() -> None:
    chat = client.chat if hasattr(client.chat.completions, "stream") else client.beta.chat
    with chat.completions.stream(**FORCED) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion()
    check("tool_calls.function.arguments.delta" in kinds, kinds)
    check("tool_calls.function.arguments.done" in kinds, kinds)
    (call,) = answer.choices[0].message.tool_calls
    check(set(json.loads(call.function.arguments)) == {"city", "unit"}, call)


@scenario
def tools_result() -> None:
    message = client.chat.completions.create(**FORCED).choices[0].message
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[
            WEATHER_QUESTION,
            message,
            {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "21 degrees"},
        ],
        tools=[TOOL],
        tool_choice="none",
        max_tokens=8,
    )
    check(answer.choices[0].message.content, answer)
    check(answer.choices[0].message.tool_calls is None, answer)


@scenario
def structured_parse() -> None:
    chat = client.chat if hasattr(client.chat.completions, "parse") else client.beta.chat
    answer = chat.completions.parse(**{**ASK, "max_tokens": 60}, response_format=Capital)
    capital = answer.choices[0].message.parsed
    check(isinstance(capital, Capital), answer)
    with raising(openai.LengthFinishReasonError):
        chat.completions.parse(**{**ASK, "max_tokens": 3}, response_format=Capital)


@scenario
def structured_streamed() -> None:
    chat = client.chat if hasattr(client.chat.completions, "stream") else client.beta.chat
    ask = {**ASK, "max_tokens": 60}
    with chat.completions.stream(**ask, response_format=Capital) as stream:
        for _ in stream:
            pass
        answer = stream.get_final_completion()
    check(isinstance(answer.choices[0].message.parsed, Capital), answer)
    answer = client.chat.completions.create(**ask, response_format={"type": "json_object"})
    if answer.choices[0].finish_reason == "stop":
        check(isinstance(json.loads(answer.choices[0].message.content), dict), answer)


# --- completions, models, embeddings


@scenario
def completions() -> None:
    ask = {"model": MODEL, "prompt": "One, two, three,", "max_tokens": 6, "temperature": 0}
    plain = client.completions.create(**ask)
    check(plain.id.startswith("cmpl-"), plain.id)
    check(plain.object == "text_completion", plain)
    streamed = "".join(c.choices[0].text for c in client.completions.create(**ask, stream=True))
    check(streamed == plain.choices[0].text, streamed, plain)
    logprobs = client.completions.create(**ask, logprobs=2).choices[0].logprobs
    check("".join(logprobs.tokens) == plain.choices[0].text, logprobs)
    check(len(logprobs.token_logprobs) == len(logprobs.tokens) == len(logprobs.text_offset))
    check(all(len(top) >= 2 for top in logprobs.top_logprobs), logprobs)


@scenario
def completions_many() -> None:
    ask = {"model": MODEL, "max_tokens": 2, "temperature": 0}
    for prompt in (["a", "b"], [[1, 2, 3], [4, 5]]):
        answer = client.completions.create(**ask, prompt=prompt, n=2)
        check([c.index for c in answer.choices] == [0, 1, 2, 3], answer)
    echoed = client.completions.create(**ask, prompt="Once upon", echo=True)
    check(echoed.choices[0].text.startswith("Once upon"), echoed)


@scenario
def models() -> None:
    found = client.models.list()
    check(MODEL in [model.id for model in found], found)
    model = client.models.retrieve(MODEL)
    check((model.id, model.object) == (MODEL, "model"), model)
    check(isinstance(model.created, int), model)
    check(isinstance(model.owned_by, str), model)
    with raising(openai.NotFoundError) as caught:
        client.models.retrieve("org/no-such-model")
    check(caught[0].code == "model_not_found", caught[0].body)


@scenario
def embeddings() -> None:
    """The SDK asks for base64 by itself; floats say the same."""
    ask = {"model": EMBEDDING_MODEL, "input": ["a cat", "a kitten", "tax law"]}
    packed = client.embeddings.create(**ask)
    plain = client.embeddings.create(**ask, encoding_format="float")
    cat, kitten, law = (each.embedding for each in packed.data)
    check([each.index for each in packed.data] == [0, 1, 2], packed.usage)
    for one, other in zip(packed.data, plain.data, strict=True):
        pairs = zip(one.embedding, other.embedding, strict=True)
        check(all(abs(a - b) < 1e-5 for a, b in pairs), "base64 and floats differ")

    def similar(one: list[float], other: list[float]) -> float:
        return sum(a * b for a, b in zip(one, other, strict=True))

    check(abs(similar(cat, cat) - 1) < 1e-3, "not normalised")
    check(similar(cat, kitten) > similar(cat, law) + 0.1, "no sense in it")
    check(packed.usage.total_tokens == packed.usage.prompt_tokens > 0, packed.usage)


# --- responses


ANSWERED = {"model": MODEL, "input": QUESTION, "temperature": 0, "max_output_tokens": 24}
FLAT_TOOL = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}


@scenario
def responses_create() -> None:
    response = client.responses.create(**ANSWERED)
    check(response.output_text == ANSWER, response)
    check(response.status == "completed", response)
    check(response.usage.input_tokens > 0, response.usage)
    check(response.usage.output_tokens_details.reasoning_tokens == 0, response.usage)
    again = client.responses.retrieve(response.id)
    check(again.output_text == ANSWER, again)
    items = client.responses.input_items.list(response.id)
    check([item.type for item in items.data] == ["message"], items)
    client.responses.delete(response.id)
    with raising(openai.NotFoundError):
        client.responses.retrieve(response.id)


@scenario
def responses_streamed() -> None:
    events = list(client.responses.create(**ANSWERED, stream=True))
    check([e.sequence_number for e in events] == list(range(len(events))), events)
    kinds = [e.type for e in events]
    check(kinds[:2] == ["response.created", "response.in_progress"], kinds)
    check(kinds[-1] == "response.completed", kinds)
    deltas = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    check(deltas == ANSWER, deltas)
    check(events[-1].response.output_text == ANSWER, events[-1])


@scenario
def responses_stream_helper() -> None:
    with client.responses.stream(**ANSWERED) as stream:
        for _ in stream:
            pass
        response = stream.get_final_response()
    check(response.output_text == ANSWER, response)


@scenario
def responses_tools() -> None:
    ask = {"model": MODEL, "input": WEATHER_QUESTION["content"], "tools": [FLAT_TOOL]}
    ask |= {"tool_choice": "required", "parallel_tool_calls": False}
    ask |= {"temperature": 0, "max_output_tokens": 60}
    response = client.responses.create(**ask)
    (call,) = [item for item in response.output if item.type == "function_call"]
    check(call.name == "get_weather", call)
    check(set(json.loads(call.arguments)) == {"city", "unit"}, call)
    events = list(client.responses.create(**ask, stream=True))
    pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    check("".join(pieces) == call.arguments, pieces)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
    after = client.responses.create(
        model=MODEL,
        previous_response_id=response.id,
        input=[result],
        tools=[FLAT_TOOL],
        tool_choice="none",
        max_output_tokens=16,
    )
    check(after.output_text, after)


@scenario
def responses_previous() -> None:
    first = client.responses.create(**ANSWERED)
    second = client.responses.create(
        model=MODEL, input="And of Italy?", previous_response_id=first.id, max_output_tokens=16
    )
    check(second.previous_response_id == first.id, second)
    check(second.usage.input_tokens > first.usage.input_tokens, second.usage)
    with raising(openai.NotFoundError, openai.BadRequestError):
        client.responses.create(**ANSWERED, previous_response_id="resp_none")


@scenario
def responses_parse() -> None:
    response = client.responses.parse(**{**ANSWERED, "max_output_tokens": 60}, text_format=Capital)
    check(isinstance(response.output_parsed, Capital), response)


# --- errors, retries, leaving


@scenario
def errors() -> None:
    with raising(openai.AuthenticationError) as caught:
        client.with_options(api_key="wrong").chat.completions.create(**ASK)
    check(caught[0].request_id, "no request id")
    check(caught[0].code, caught[0].body)
    with raising(openai.NotFoundError) as caught:
        client.chat.completions.create(**{**ASK, "model": "gpt-9"})
    check(caught[0].code == "model_not_found", caught[0].body)
    for bad, field in (
        ({"temperature": 3}, "temperature"),
        ({"n": 0}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x " * 9000}]}, "messages"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ):
        for stream in (False, True):
            if stream and field == "stream_options":
                continue
            with raising(openai.BadRequestError) as caught:
                client.chat.completions.create(**{**ASK, **bad}, stream=stream)
            check(caught[0].param == field, field, caught[0].body)
            check(caught[0].type == "invalid_request_error", caught[0].body)


@scenario
def retries() -> None:
    """A server that is full says when to come back, and the SDK does. What is final stays so."""
    echo = openai.OpenAI(base_url=ECHO_URL, api_key=ECHO_KEY, timeout=PATIENCE_S)
    said = [{"role": "user", "content": "word " * 50}]
    ask = {"model": "echo", "messages": said, "extra_body": {"ignore_eos": True}}
    holders = [
        echo.chat.completions.create(**ask, max_tokens=3000, stream=True) for _ in range(2)
    ]  # one is at work, one waits: that is all that this server takes
    with raising(openai.RateLimitError, openai.InternalServerError) as caught:
        echo.with_options(max_retries=0).chat.completions.create(**ask, max_tokens=1)
    check(int(caught[0].response.headers["retry-after"]) >= 1, caught[0])

    def leave(response) -> None:
        """Whoever was refused once finds room the next time."""
        if response.status_code in (429, 503):
            for holder in holders:
                holder.close()

    http = openai.DefaultHttpxClient(event_hooks={"response": [leave]})
    patient = echo.with_options(max_retries=8, http_client=http)
    raw = patient.chat.completions.with_raw_response.create(**ask, max_tokens=1)
    check(raw.retries_taken >= 1, raw.retries_taken)
    check(raw.parse().choices[0].finish_reason == "length")
    with raising(openai.BadRequestError) as caught:
        echo.chat.completions.create(**ask, max_tokens=-1)
    check(caught[0].response.headers["x-should-retry"] == "false", caught[0])
    check(caught[0].request.headers["x-stainless-retry-count"] == "0", caught[0])


@scenario
def leaving() -> None:
    """A client that breaks off, or whose patience ends, takes its work with it."""
    said = [{"role": "user", "content": "Count."}]
    stream = client.chat.completions.create(**LONG, messages=said, stream=True)
    for number, _ in enumerate(stream):
        if number == 3:
            break
    stream.close()
    until_idle()
    hasty = client.with_options(timeout=1.0)
    with raising(openai.APITimeoutError):
        hasty.chat.completions.create(**LONG, messages=said)
    until_idle()


@scenario
def raw_headers() -> None:
    raw = client.chat.completions.with_raw_response.create(**ASK)
    check(raw.headers["x-request-id"], raw.headers)
    check(raw.headers["content-type"].startswith("application/json"), raw.headers)
    check(raw.parse()._request_id == raw.headers["x-request-id"])
    named = client.chat.completions.with_raw_response.create(
        **ASK, extra_headers={"X-Request-Id": "mine-1"}
    )
    check(named.headers["x-request-id"] == "mine-1", named.headers)
    with client.chat.completions.with_streaming_response.create(**ASK, stream=True) as streamed:
        check(streamed.headers["content-type"].startswith("text/event-stream"), streamed.headers)
        lines = [line for line in streamed.iter_lines() if line]
    check(lines[-1] == "data: [DONE]", lines[-1])


# --- asynchronous


@scenario
async def asynchronous() -> None:
    import asyncio

    async with openai.AsyncOpenAI(base_url=URL, api_key=KEY, timeout=PATIENCE_S) as patient:
        plain = await asyncio.gather(
            *(patient.chat.completions.create(**ASK) for _ in range(4)),
        )
        check({a.choices[0].message.content for a in plain} == {ANSWER}, plain)
        text = ""
        async for chunk in await patient.chat.completions.create(**ASK, stream=True):
            text += chunk.choices[0].delta.content or ""
        check(text == ANSWER, text)
        said = [{"role": "user", "content": "Count."}]
        with raising(TimeoutError, asyncio.TimeoutError):
            async with asyncio.timeout(1):
                await patient.chat.completions.create(**LONG, messages=said)
    await asyncio.to_thread(until_idle)


main()
