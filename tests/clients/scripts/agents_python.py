"""The scenarios through OpenAI's agents SDK, over chats and over responses: whole runs, in which
the SDK calls tools, hands over and sends back what it was given."""

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
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
from pydantic import BaseModel, Field

set_tracing_disabled(True)
CLASSES = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
FORCED = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 60}
WEATHER_QUESTION = "How warm is it in Paris?"


class Capital(BaseModel):
    """A capital city."""

    city: str = Field(max_length=12)
    inhabitants: int = Field(ge=0, le=99)


def agent(kind: str, name: str = "one", settings: dict | None = None, **options) -> Agent:
    client = openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=PATIENCE_S)
    given = ModelSettings(**{"temperature": 0, "max_tokens": 40, **(settings or {})})
    return Agent(name, model=CLASSES[kind](MODEL, client), model_settings=given, **options)


def thermometer(asked: list[str]):
    @function_tool
    def get_temperature(city: str) -> str:
        """The temperature of a city."""
        asked.append(city)
        return "21 degrees"

    return get_temperature


@scenario
async def runs_plain() -> None:
    for kind in CLASSES:
        run = await Runner.run(agent(kind), QUESTION)
        check(run.final_output == ANSWER, kind, run)
        usage = run.context_wrapper.usage
        check(usage.total_tokens == usage.input_tokens + usage.output_tokens > 0, kind, usage)


@scenario
async def runs_typed() -> None:
    for kind in CLASSES:
        run = await Runner.run(agent(kind, output_type=Capital), QUESTION)
        check(isinstance(run.final_output, Capital), kind, run)


@scenario
async def runs_with_tools() -> None:
    """The call and its result go back with the second request."""
    for kind in CLASSES:
        asked: list[str] = []
        one = agent(kind, settings=FORCED, tools=[thermometer(asked)])
        run = await Runner.run(one, WEATHER_QUESTION)
        check(len(asked) == 1, kind, asked)
        check(run.final_output, kind, run)
        check(len(run.raw_responses) == 2, kind, run.raw_responses)


@scenario
async def runs_streamed() -> None:
    for kind in CLASSES:
        asked: list[str] = []
        settings = {**FORCED, "include_usage": True}
        one = agent(kind, settings=settings, tools=[thermometer(asked)])
        run = Runner.run_streamed(one, WEATHER_QUESTION)
        kinds = [getattr(event.data, "type", "") async for event in run.stream_events()
                 if event.type == "raw_response_event"]  # fmt: skip
        check(kinds.count("response.completed") == 2, kind, kinds)
        check("response.function_call_arguments.delta" in kinds, kind, kinds)
        check("response.output_text.delta" in kinds, kind, kinds)
        check(run.context_wrapper.usage.output_tokens > 0, kind)
        check(len(asked) == 1 and run.final_output, kind, asked)


@scenario
async def runs_handed_over() -> None:
    for kind in CLASSES:
        other = agent(kind, "other", instructions="Answer in one sentence.")
        first = agent(kind, "first", settings=FORCED, handoffs=[other])
        run = await Runner.run(first, QUESTION)
        check(run.last_agent.name == "other", kind, run)


@scenario
async def runs_on_stored_responses() -> None:
    """Each request holds what is new alone: the server knows the rest."""
    asked: list[str] = []
    one = agent("responses", settings=FORCED, tools=[thermometer(asked)])
    run = await Runner.run(one, WEATHER_QUESTION, auto_previous_response_id=True)
    check(len(asked) == 1 and run.final_output, asked)


@scenario
async def errors() -> None:
    for kind in CLASSES:
        with raising(openai.BadRequestError) as caught:
            await Runner.run(agent(kind, settings={"temperature": 3}), QUESTION)
        check(caught[0].param == "temperature", kind, caught[0].body)
        with raising(openai.BadRequestError) as caught:
            await Runner.run(agent(kind), "x " * 9000)
        check(caught[0].code == "context_length_exceeded", kind, caught[0].body)


main()
