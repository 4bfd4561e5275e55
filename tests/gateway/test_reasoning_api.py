"""Thinking over real HTTP: told from the answer, counted, and never touched by stop strings."""

from collections.abc import Iterator

import pytest
from forebay_shared.models import CAP_GRAMMAR
from forebay_shared.sampling import Grammar
from gateway_fakes import MODEL, TEMPLATE, Api, Play, ScriptedBackend, running_api
from transcripts import Transcript, check_answer, check_stream

THINKING_TEMPLATE = TEMPLATE.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n{% if open_tag %}<think>\n{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}",
)
TOOL = {"type": "function", "function": {"name": "time"}}
CALL = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
OPEN = {"chat_template_kwargs": {"open_tag": True}}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def server() -> Iterator[Api]:
    backend = ScriptedBackend(template=THINKING_TEMPLATE, max_model_len=2048)
    backend.capabilities |= {CAP_GRAMMAR}
    with running_api(backend) as api:
        yield api


@pytest.fixture
def api(server: Api) -> Api:
    server.reset()
    return server


def says(api: Api, text: str, group: int = 1) -> None:
    ids = api.backend.tokenizer.encode(text, add_special_tokens=False).ids
    api.backend.script = lambda job, index: Play(ids, group=group)


def both(api: Api, **fields: object) -> Transcript:
    """The answer, whole and streamed: they must say the same."""
    response = api.chat(stream=True, stream_options={"include_usage": True}, **fields)
    stream = check_stream(response.content, model=MODEL, include_usage=True)
    answer = check_answer(api.chat(**fields).content, model=MODEL)
    assert stream.texts == answer.texts
    assert stream.thoughts == answer.thoughts
    assert stream.reasons == answer.reasons
    assert stream.usage == answer.usage
    return answer


@pytest.mark.parametrize("group", range(1, 9))
def test_thinking_and_answer_are_told_apart_for_every_grouping(api: Api, group: int) -> None:
    says(api, "<think>\nIs 你好 a greeting?\n</think>\n\nYes.", group)
    answer = both(api)
    assert answer.thoughts == {0: "Is 你好 a greeting?"}
    assert answer.texts == {0: "Yes."}
    details = answer.usage["completion_tokens_details"]
    assert 0 < details["reasoning_tokens"] < answer.usage["completion_tokens"]
    assert api.backend.reasoned == details["reasoning_tokens"], "the books know it too"


def test_a_tag_that_the_template_opened_is_open(api: Api) -> None:
    says(api, "hm</think>Yes.")
    answer = both(api, **OPEN)
    assert (answer.thoughts, answer.texts) == ({0: "hm"}, {0: "Yes."})


def test_with_thinking_off_all_text_is_the_answer(api: Api) -> None:
    says(api, "Yes. <think> is a tag.")
    for fields in (OFF, {"reasoning_effort": "none"}):
        answer = both(api, **fields)
        assert (answer.thoughts, answer.texts) == ({}, {0: "Yes. <think> is a tag."})


def test_an_answer_by_a_schema_may_be_thought_about(api: Api) -> None:
    asked = {"response_format": {"type": "json_object"}}
    for text, fields in (("<think>hm</think>{}", {}), ("hm\n</think>\n\n{}", OPEN)):
        says(api, text)
        answer = both(api, **asked, **fields)
        assert (answer.thoughts, answer.texts) == ({0: "hm"}, {0: "{}"})
        assert "thought" in api.backend.jobs[-1].sampling.grammar.source
    for fields in (OFF, {"reasoning_effort": "none"}):
        says(api, "{}")
        answer = both(api, **asked, **fields)
        assert (answer.thoughts, answer.texts) == ({}, {0: "{}"})
        plain = Grammar("json_object", field="response_format")
        assert api.backend.jobs[-1].sampling.grammar == plain
    says(api, "<think>")
    answer = both(api, structured_outputs={"choice": ["<think>", "b"]})
    assert (answer.thoughts, answer.texts) == ({}, {0: "<think>"})


def test_tags_in_what_the_client_wrote_change_nothing(api: Api) -> None:
    says(api, "Yes.")
    answer = both(api, messages=[{"role": "user", "content": "What is <think>?</think> <think>"}])
    assert (answer.thoughts, answer.texts) == ({}, {0: "Yes."})


def test_stop_strings_act_on_the_answer_only(api: Api) -> None:
    says(api, "<think>a stop here</think>b stop c")
    answer = both(api, stop="stop")
    assert (answer.thoughts, answer.texts) == ({0: "a stop here"}, {0: "b "})


def test_thinking_that_is_cut_off_stays_thinking(api: Api) -> None:
    says(api, "<think>long thoughts that never end")
    answer = both(api, max_tokens=12)
    assert answer.reasons == {0: "length"}
    assert answer.texts == {0: ""}
    assert "long thoughts that never end".startswith(answer.thoughts[0])
    assert answer.usage["completion_tokens_details"]["reasoning_tokens"] > 0


def test_calls_behind_the_thinking_are_calls(api: Api) -> None:
    says(api, f"<think>\nWhat time? {CALL}</think>\n\n{CALL}")
    answer = both(api, tools=[TOOL])
    assert answer.thoughts[0].startswith("What time? <tool_call>")
    assert [call["name"] for call in answer.calls[0]] == ["time"]
    assert answer.reasons == {0: "tool_calls"}
