"""The scenarios through the Anthropic SDK, which speaks to /v1/messages with an x-api-key."""

import asyncio

import anthropic
from harness import (
    ANSWER,
    ECHO_KEY,
    ECHO_URL,
    KEY,
    MODEL,
    PATIENCE_S,
    QUESTION,
    SCRIPTED_KEY,
    SCRIPTED_URL,
    URL,
    WEATHER,
    check,
    main,
    raising,
    scenario,
    until_idle,
)

BASE = URL.removesuffix("/v1")  # the SDK writes /v1/messages itself
client = anthropic.Anthropic(base_url=BASE, api_key=KEY, max_retries=0, timeout=PATIENCE_S)
# The newest SDK marks temperature as deprecated, but it is the field that is tested.
ASK = {
    "model": MODEL,
    "max_tokens": 24,
    "messages": [{"role": "user", "content": QUESTION}],
    "extra_body": {"temperature": 0},
}
TOOL = {"name": "get_weather", "description": "Temperature", "input_schema": WEATHER}
FORCED = {
    **ASK,
    "messages": [{"role": "user", "content": "How warm is it in Paris, in celsius?"}],
    "tools": [TOOL],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "max_tokens": 60,
}


@scenario
def messages_create() -> None:
    message = client.messages.create(**ASK)
    check([block.type for block in message.content] == ["text"], message)
    check(message.content[0].text == ANSWER, message)
    check((message.role, message.type) == ("assistant", "message"), message)
    check(message.stop_reason == "end_turn", message)
    check(message.usage.input_tokens > 0 < message.usage.output_tokens, message.usage)
    check(message.id.startswith("msg_"), message.id)
    short = client.messages.create(**{**ASK, "max_tokens": 3})
    check(short.stop_reason == "max_tokens", short)


@scenario
def messages_system() -> None:
    blocks = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    for system in ("Be brief.", blocks):
        message = client.messages.create(**ASK, system=system)
        check(message.content[0].text, message)


@scenario
def messages_stop() -> None:
    message = client.messages.create(**ASK, stop_sequences=[" Paris"])
    check(message.content[0].text == "The capital of France is", message)
    check((message.stop_reason, message.stop_sequence) == ("stop_sequence", " Paris"), message)


@scenario
def messages_streamed() -> None:
    events = list(client.messages.create(**ASK, stream=True))
    kinds = [event.type for event in events if event.type != "ping"]
    check(kinds[:2] == ["message_start", "content_block_start"], kinds)
    check(kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"], kinds)
    deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
    check("".join(deltas) == ANSWER, deltas)


@scenario
def messages_stream_helper() -> None:
    with client.messages.stream(**ASK) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    check(text == ANSWER == message.content[0].text, message)
    check(message.usage.output_tokens > 0, message.usage)


@scenario
def messages_tools() -> None:
    message = client.messages.create(**FORCED)
    (call,) = [block for block in message.content if block.type == "tool_use"]
    check(message.stop_reason == "tool_use", message)
    check(set(call.input) == {"city", "unit"}, call)
    with client.messages.stream(**FORCED) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    check(kinds.count("input_json") > 3, "the input came in one piece", kinds)
    (again,) = [block for block in streamed.content if block.type == "tool_use"]
    check(again.input == call.input, again)


@scenario
def messages_tool_result() -> None:
    message = client.messages.create(**FORCED)
    (call,) = [block for block in message.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "21 degrees"}
    turns = [
        *FORCED["messages"],
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    after = client.messages.create(
        **{**FORCED, "messages": turns, "tool_choice": {"type": "none"}, "max_tokens": 8}
    )
    check(after.content[0].text, after)


@scenario
def messages_tool_runner() -> None:
    """It asks for a thread first, hears that there is none, and sends the whole conversation."""
    scripted = anthropic.Anthropic(
        base_url=SCRIPTED_URL.removesuffix("/v1"), api_key=SCRIPTED_KEY, timeout=PATIENCE_S
    )

    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Adds two numbers."""
        return str(a + b)

    said = [{"role": "user", "content": 'CALL add {"a": 1, "b": 2}\nCALL add {"a": 3, "b": 4}'}]
    ask = {"model": "scripted", "max_tokens": 400, "messages": said, "tools": [add]}
    for stream in (False, True):
        runner = scripted.beta.messages.tool_runner(**ask, stream=stream)
        turns = [turn.get_final_message() if stream else turn for turn in runner]
        check([turn.stop_reason for turn in turns] == [*["tool_use"] * 2, "end_turn"], turns)
        check(turns[-1].content[0].text == "The last one gave: 7", turns)


@scenario
def messages_thinking() -> None:
    echo = anthropic.Anthropic(
        base_url=ECHO_URL.removesuffix("/v1"), api_key=ECHO_KEY, timeout=PATIENCE_S
    )
    said = [{"role": "user", "content": "<think>Easy.</think>Yes."}]
    message = echo.messages.create(model="echo", messages=said, max_tokens=30)
    kinds = [block.type for block in message.content]
    check(kinds == ["thinking", "text"], message)
    check("Easy." in message.content[0].thinking, message)


@scenario
def count_tokens() -> None:
    messages = ASK["messages"]
    count = client.messages.count_tokens(model=MODEL, messages=messages)
    usage = client.messages.create(**ASK).usage
    check(count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens, count, usage)


@scenario
def models() -> None:
    listed = [model.id for model in client.models.list(limit=1)]
    check(listed == [MODEL], listed)
    model = client.models.retrieve(MODEL)
    check((model.id, model.type) == (MODEL, "model"), model)
    check(model.max_input_tokens > 0, model)
    with raising(anthropic.NotFoundError) as caught:
        client.models.retrieve("claude-9")
    check(caught[0].body["error"]["type"] == "not_found_error", caught[0].body)
    check(caught[0].request_id, caught[0].body)
    with raising(anthropic.AuthenticationError) as caught:
        client.with_options(api_key="wrong").models.list()
    check(caught[0].body["error"]["type"] == "authentication_error", caught[0].body)


@scenario
def errors() -> None:
    with raising(anthropic.AuthenticationError) as caught:
        client.with_options(api_key="wrong").messages.create(**ASK)
    check(caught[0].body["type"] == "error", caught[0].body)
    check(caught[0].body["error"]["type"] == "authentication_error", caught[0].body)
    with raising(anthropic.NotFoundError) as caught:
        client.messages.create(**{**ASK, "model": "claude-9"})
    check(caught[0].body["error"]["type"] == "not_found_error", caught[0].body)
    with raising(anthropic.BadRequestError) as caught:
        client.messages.create(**{**ASK, "max_tokens": 0})
    check(caught[0].body["error"]["type"] == "invalid_request_error", caught[0].body)
    check("max_tokens" in caught[0].body["error"]["message"], caught[0].body)


@scenario
def leaving() -> None:
    long = {**ASK, "max_tokens": 1500, "extra_body": {"temperature": 1}}
    with client.messages.create(**long, stream=True) as stream:
        for number, _ in enumerate(stream):
            if number == 4:
                break
    until_idle()


@scenario
async def asynchronous() -> None:
    async with anthropic.AsyncAnthropic(base_url=BASE, api_key=KEY, timeout=PATIENCE_S) as patient:
        answers = await asyncio.gather(*(patient.messages.create(**ASK) for _ in range(4)))
        check({answer.content[0].text for answer in answers} == {ANSWER}, answers)
        async with patient.messages.stream(**ASK) as stream:
            text = "".join([piece async for piece in stream.text_stream])
    check(text == ANSWER, text)


main()
