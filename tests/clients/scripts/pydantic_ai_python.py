"""The scenarios through Pydantic AI, over chats and over responses: it writes schemas in its own
way and validates every answer."""

from harness import (
    ANSWER,
    KEY,
    MODEL,
    PATIENCE_S,
    QUESTION,
    URL,
    check,
    main,
    raising,
    scenario,
)
from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from pydantic_ai import Agent, ModelSettings, NativeOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import (
    ModelRequest,
    ModelResponse,
    RetryPromptPart,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

CLASSES = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}


class Place(BaseModel):
    """Where a city is."""

    country: str = Field(max_length=12)


class Capital(BaseModel):
    """A capital city."""

    city: str = Field(max_length=12)
    inhabitants: int = Field(ge=0, le=99)
    place: Place


def agent(kind: str, **options) -> Agent:
    client = AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=PATIENCE_S)
    settings = ModelSettings(**{"temperature": 0, "max_tokens": 80, **options.pop("settings", {})})
    model = CLASSES[kind](MODEL, provider=OpenAIProvider(openai_client=client))
    return Agent(model, model_settings=settings, retries=0, **options)


@scenario
async def runs_plain() -> None:
    for kind in CLASSES:
        run = await agent(kind).run(QUESTION)
        check(run.output == ANSWER, kind, run)
        again = await agent(kind).run(QUESTION, message_history=run.all_messages())
        check(again.output, kind, again)


@scenario
async def runs_streamed() -> None:
    for kind in CLASSES:
        async with agent(kind).run_stream(QUESTION) as run:
            pieces = [piece async for piece in run.stream_text(delta=True, debounce_by=None)]
        check("".join(pieces) == ANSWER, kind, pieces)
        check(run.usage.output_tokens > 0, kind, run.usage)


@scenario
async def runs_typed() -> None:
    for kind in CLASSES:
        for form in (ToolOutput, NativeOutput) if kind == "chat" else (NativeOutput,):
            run = await agent(kind, output_type=form(Capital)).run(QUESTION)
            check(isinstance(run.output, Capital), kind, form, run)


@scenario
async def runs_typed_streamed() -> None:
    for kind in CLASSES:
        async with agent(kind, output_type=ToolOutput(Capital)).run_stream(QUESTION) as run:
            *_, last = [each async for each in run.stream_output(debounce_by=None)]
        check(isinstance(last, Capital), kind, last)


@scenario
async def runs_with_a_history_of_tools() -> None:
    """What one call gave and another failed with, both in one turn."""
    history = [
        ModelRequest(parts=[UserPromptPart("How warm is it in Paris and in Rome?")]),
        ModelResponse(
            parts=[
                TextPart("Let me see."),
                ToolCallPart("temperature", {"city": "Paris"}, "a"),
                ToolCallPart("temperature", '{"city": "Rome"}', "b"),
            ]
        ),
        ModelRequest(
            parts=[
                ToolReturnPart("temperature", "21 degrees", "a"),
                RetryPromptPart("try again", tool_name="temperature", tool_call_id="b"),
            ]
        ),
    ]
    for kind in CLASSES:
        one = agent(kind, settings={"max_tokens": 12})

        @one.tool_plain
        def temperature(city: str) -> str:
            """The temperature of a city."""
            return f"21 degrees in {city}"

        run = await one.run("So?", message_history=history)
        check(run.output, kind, run)


@scenario
async def errors() -> None:
    for kind in CLASSES:
        with raising(ModelHTTPError) as caught:
            await agent(kind, settings={"temperature": 3}).run(QUESTION)
        check(caught[0].status_code == 400, kind, caught[0])
        check(caught[0].body["param"] == "temperature", kind, caught[0].body)


main()
