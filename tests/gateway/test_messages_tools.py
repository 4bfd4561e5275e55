"""Tools in the Anthropic dialect over real HTTP: shown, chosen, called, cut off."""

import json
from collections.abc import Iterator

import anthropic
import pytest
from forebay_gateway.jobs import Job
from gateway_fakes import MODEL, TEMPLATE, Api, Play, ScriptedBackend, running_api
from messages import check_message_error
from messages_house import (
    CALL,
    HI,
    LATER,
    NOW,
    TIME,
    TOOLS,
    WEATHER,
    both,
    called,
    messaging,
    post,
    prompt_text,
    refused,
    says,
)


@pytest.fixture(scope="module")
def server() -> Iterator[Api]:
    with messaging() as api:
        yield api


@pytest.fixture
def api(server: Api) -> Api:
    server.reset()
    return server


@pytest.mark.parametrize(
    ("type_", "name", "given"),
    [
        ("bash_20250124", "bash", {"command": "ls"}),
        ("text_editor_20250728", "str_replace_based_edit_tool", {"command": "view", "path": "/x"}),
        ("memory_20250818", "memory", {"command": "delete", "path": "/memories/x"}),
    ],
)
def test_a_tool_that_the_client_runs_may_be_named_by_its_type_alone(
    api: Api, type_: str, name: str, given: dict
) -> None:
    says(api, f"<tool_call>{json.dumps({'name': name, 'arguments': given})}</tool_call>")
    tools = [{"type": type_, "name": name, "max_characters": 100}, WEATHER]
    message = both(api, tools=tools, tool_choice={"type": "tool", "name": name})
    assert (message["content"][0]["name"], message["content"][0]["input"]) == (name, given)
    assert '"command"' in prompt_text(api)
    for other in ("bash", "bash_code_execution_20250825", "code_execution_20250825", "bash_x"):
        refused(post(api, tools=[{"type": other, "name": name}]), "tools[0].type")


@pytest.mark.parametrize("choice", [{"type": "auto"}, {"type": "tool", "name": "weather"}])
@pytest.mark.parametrize("alone", [False, True])
def test_a_call_that_was_cut_has_no_input_and_says_max_tokens(
    api: Api, choice: dict, alone: bool
) -> None:
    says(api, CALL)
    choice = choice | {"disable_parallel_tool_use": alone}
    message = both(api, tools=TOOLS, max_tokens=55, tool_choice=choice)
    assert message["stop_reason"] == "max_tokens"
    assert message["content"][0]["input"] == {}


def test_arguments_come_in_increments(api: Api) -> None:
    says(api, f'<tool_call>{{"name": "weather", "arguments": {{"city": "{"x" * 300}"}}}}')
    raw = post(api, stream=True, tools=TOOLS).content
    assert raw.count(b"input_json_delta") > 50


def test_one_call_at_most_when_parallel_use_is_off(api: Api) -> None:
    says(api, f"{CALL}\n{NOW}")
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = both(api, tools=TOOLS, tool_choice=choice)
    assert [block["name"] for block in message["content"]] == ["weather"]


@pytest.mark.parametrize(
    ("choice", "forced"),
    [({"type": "any"}, True), ({"type": "tool", "name": "time"}, True), ({"type": "auto"}, False)],
)
def test_a_forced_call_is_held_to_a_grammar(api: Api, choice: dict, forced: bool) -> None:
    says(api, NOW)
    both(api, tools=TOOLS, tool_choice=choice)
    grammar = api.backend.jobs[-1].sampling.grammar
    assert (grammar is not None) == forced
    assert "time" in prompt_text(api)


def test_no_tool_is_shown_when_none_may_be_used(api: Api) -> None:
    both(api, tools=TOOLS, tool_choice={"type": "none"})
    assert "weather" not in prompt_text(api)


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"tools": [LATER, TIME]}, False),
        ({"tools": [LATER]}, False),
        ({"tools": [LATER, TIME], "tool_choice": {"type": "tool", "name": "weather"}}, True),
        (
            {
                "tools": [LATER, TIME],
                "messages": called([{"type": "tool_reference", "tool_name": "weather"}]),
            },
            True,
        ),
        (
            {
                "tools": [
                    {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
                    LATER,
                ]
            },
            True,
        ),
    ],
)
def test_a_deferred_tool_is_shown_once_it_is_referred_to_or_nobody_could(
    api: Api, fields: dict, shown: bool
) -> None:
    assert post(api, **fields).status_code == 200
    assert ('"name": "weather"' in prompt_text(api)) is shown


def test_a_template_without_turns_for_tools_still_tells_the_model_of_them() -> None:
    with running_api(ScriptedBackend(template=TEMPLATE, max_model_len=2048)) as api:
        both(api, tools=TOOLS)
        assert "weather" in prompt_text(api)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_runner_that_hears_of_no_threads_sends_the_whole_conversation(
    api: Api, stream: bool
) -> None:
    """It begins with a thread, in which it would send no more than the results."""

    def time() -> str:
        """Says the time."""
        return "noon"

    def play(job: Job, index: int) -> Play:
        prompt = api.backend.tokenizer.decode(job.prompt)
        text = "It is noon." if "noon(" in prompt else NOW
        return Play(api.backend.tokenizer.encode(text, add_special_tokens=False).ids)

    api.backend.script = play
    client = anthropic.Anthropic(base_url=api.url, api_key="k", max_retries=0)
    runner = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=200, messages=HI, tools=[anthropic.beta_tool(time)], stream=stream
    )
    said = [turn.get_final_message() if stream else turn for turn in runner]
    assert [message.stop_reason for message in said] == ["tool_use", "end_turn"]
    assert "user\nhi<|im_end|>" in prompt_text(api)
    error = check_message_error(post(api, thread={"type": "create"}).content)
    assert error["details"] == {"error_code": "thread_unsupported_request"}
