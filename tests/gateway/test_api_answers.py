"""Answers over real HTTP: every one is checked against the contract's golden transcript."""

from collections.abc import Iterator

import pytest
from forebay_shared.errors import EngineError, OverloadedError
from gateway_fakes import ANSWER, MODEL, Api, Play, ScriptedGeneration, running_api
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transcripts import Transcript, check_answer, check_error, check_stream

USAGE = {"include_usage": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Api]:
    with running_api() as api:
        yield api


@pytest.fixture
def api(server: Api) -> Api:
    server.reset()
    return server


def streamed(api: Api, *, chat: bool = True, n: int = 1, **fields: object) -> Transcript:
    send = api.chat if chat else api.complete
    response = send(stream=True, n=n, stream_options=USAGE, **fields)
    assert response.status_code == 200, response.text
    return check_stream(response.content, model=MODEL, n=n, include_usage=True, chat=chat)


def whole(api: Api, *, chat: bool = True, n: int = 1, **fields: object) -> Transcript:
    response = (api.chat if chat else api.complete)(n=n, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    return check_answer(response.content, model=MODEL, n=n, chat=chat)


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("group", range(1, 9))
def test_streamed_and_whole_answers_say_the_same_for_every_grouping(
    api: Api, group: int, n: int, chat: bool
) -> None:
    api.backend.script = lambda job, index: Play(api.backend.answer[index:], group=group)
    stream = streamed(api, chat=chat, n=n, max_tokens=100)
    answer = whole(api, chat=chat, n=n, max_tokens=100)
    assert stream.texts == answer.texts
    assert stream.texts[0] == ANSWER
    assert stream.reasons == answer.reasons == dict.fromkeys(range(n), "stop")
    assert stream.usage == answer.usage


@pytest.mark.parametrize("chat", [True, False])
@given(
    stops=st.lists(st.text("o wnfx:你好😀", min_size=1, max_size=4), min_size=1, max_size=4),
    group=st.integers(1, 8),
)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_character_of_a_stop_string_is_sent(
    api: Api, chat: bool, stops: list[str], group: int
) -> None:
    api.backend.script = lambda job, index: Play(api.backend.answer, group=group)
    stream = streamed(api, chat=chat, stop=stops, max_tokens=100)
    answer = whole(api, chat=chat, stop=stops, max_tokens=100)
    assert stream.texts == answer.texts
    assert stream.usage == answer.usage
    assert not any(stop in stream.texts[0] for stop in stops)
    assert ANSWER.startswith(stream.texts[0])


@given(
    stops=st.lists(st.text("o wnfx:你好😀", min_size=1, max_size=4), min_size=1, max_size=4),
    group=st.integers(1, 8),
    tools=st.booleans(),
)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_tokens_of_a_stop_string_are_not_listed(
    api: Api, stops: list[str], group: int, tools: bool
) -> None:
    api.backend.script = lambda job, index: Play(api.backend.answer, group=group)
    fields: dict = {"stop": stops, "max_tokens": 100, "logprobs": True, "return_token_ids": True}
    if tools:  # then text goes another way
        fields["tools"] = [{"type": "function", "function": {"name": "f"}}]
    answer = whole(api, **fields)
    (logprobs,) = answer.logprobs[0]
    bytes_ = [bytes(entry["bytes"]) for entry in logprobs["content"]]
    assert b"".join(bytes_).decode() == answer.texts[0]
    stream = streamed(api, **fields)
    assert [entry for each in stream.logprobs.get(0, ()) for entry in each["content"]] == (
        logprobs["content"]
    )
    ids = api.chat(**fields).json()["choices"][0]["token_ids"]
    assert ids[: len(bytes_)] == api.backend.answer[: len(bytes_)]
    assert len(ids) <= len(bytes_) + 1, "nothing but what ended the answer stands behind"


def test_a_token_waits_with_its_text_until_no_stop_string_can_come(api: Api) -> None:
    api.backend.script = lambda job, index: Play(api.backend.answer[:3])
    fields: dict = {"stop": "quick brown cat", "logprobs": 0}
    stream = streamed(api, chat=False, **fields)
    tokens = [token for each in stream.logprobs[0] for token in each["tokens"]]
    assert "".join(tokens) == stream.texts[0] == "The quick brown"
    kept = whole(api, chat=False, **{**fields, "stop": "quick", "include_stop_str_in_output": True})
    assert "".join(kept.logprobs[0][0]["tokens"]) == kept.texts[0] == "The quick"


def test_text_held_back_for_a_stop_string_comes_at_the_end(api: Api) -> None:
    assert streamed(api, stop=[ANSWER[-5:] + "x"], max_tokens=100).texts[0] == ANSWER


def test_a_stop_string_aborts_its_sequence_and_the_others_go_on(api: Api) -> None:
    def script(_: object, index: int) -> Play:
        return Play(api.backend.answer if index == 0 else api.backend.answer[4:])

    api.backend.script = script
    stream = streamed(api, n=2, stop="brown", max_tokens=100)
    assert stream.texts[0] == "The quick "
    assert stream.texts[1].endswith("dog. ")
    assert api.backend.stopped == 1
    assert not api.backend.cancelled


def test_stop_is_taken_as_string_or_list_and_an_empty_one_ends_nothing(api: Api) -> None:
    assert whole(api, stop="quick").texts == whole(api, stop=["quick"]).texts == {0: "The "}
    assert whole(api, stop=[""]).texts == whole(api, stop="").texts == {0: ANSWER}


def test_include_stop_str_in_output_keeps_the_stop_string(api: Api) -> None:
    assert whole(api, stop="quick", include_stop_str_in_output=True).texts[0] == "The quick"


def test_usage_counts_what_the_answer_consumed(api: Api) -> None:
    usage = whole(api, max_tokens=3).usage
    assert usage["completion_tokens"] == 3
    assert whole(api, n=3, max_tokens=3).usage["completion_tokens"] == 9
    assert whole(api, n=3, max_tokens=3).usage["prompt_tokens"] == usage["prompt_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


def test_usage_comes_only_when_asked_for(api: Api) -> None:
    for options in (None, {}, {"include_usage": False}, {"continuous_usage_stats": True}):
        raw = api.chat(stream=True, stream_options=options).content
        check_stream(raw, model=MODEL)


def test_continuous_usage_grows_with_the_tokens(api: Api) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = api.chat(stream=True, stream_options=options, max_tokens=3)
    chunks = [line for line in response.text.splitlines() if '"choices":[{' in line]
    counts = [int(line.split('"completion_tokens":')[1].split(",")[0]) for line in chunks]
    assert counts == sorted(counts)
    assert counts[0] <= 1
    assert counts[-1] == 3


def test_an_answer_of_nothing_is_a_valid_message(api: Api) -> None:
    api.backend.script = lambda job, index: Play([])
    assert streamed(api).texts == whole(api).texts == {0: ""}
    assert streamed(api, chat=False).texts == {0: ""}


def test_the_first_word_of_the_engine_may_be_its_last_one(api: Api) -> None:
    api.backend.script = lambda job, index: Play(api.backend.answer, group=1000)
    assert streamed(api).texts == {0: ANSWER}


def test_the_head_of_a_stream_forbids_buffering(api: Api) -> None:
    headers = api.chat(stream=True).headers
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"


def test_all_four_forms_of_prompt_are_taken_and_indexes_run_over_prompts_times_n(
    api: Api,
) -> None:
    for prompt, size in (("a b", 1), (["a", "b"], 2), ([40, 41], 1), ([[40, 41], [42]], 2)):
        for n in (1, 2):
            raw = api.complete(prompt=prompt, n=n).content
            check_answer(raw, model=MODEL, n=size * n, chat=False)
            raw = api.complete(prompt=prompt, n=n, stream=True).content
            check_stream(raw, model=MODEL, n=size * n, chat=False)
    assert [job.prompt for job in api.backend.jobs[-2:]] == [[40, 41], [42]]


def test_echo_puts_each_prompt_before_its_answer(api: Api) -> None:
    answer = check_answer(
        api.complete(prompt=["a b", "c"], n=2, echo=True, max_tokens=1).content,
        model=MODEL,
        n=4,
        chat=False,
    )
    assert answer.texts == {0: "a bThe", 1: "a bThe", 2: "cThe", 3: "cThe"}
    assert streamed(api, chat=False, prompt="a b", echo=True, max_tokens=1).texts == {0: "a bThe"}


def test_completions_stop_after_16_tokens_unless_told_otherwise(api: Api) -> None:
    assert whole(api, chat=False).usage["completion_tokens"] == 16
    assert whole(api).reasons == {0: "stop"}


def test_chat_logprobs_list_one_readable_entry_per_token(api: Api) -> None:
    for fields in ({"stream": True}, {}):
        raw = api.chat(logprobs=True, top_logprobs=2, **fields).content
        check = check_stream if fields else check_answer
        found = check(raw, model=MODEL).logprobs[0]
        entries = [entry for part in found for entry in part["content"]]
        assert len(entries) == len(api.backend.answer)
        assert bytes(b for entry in entries for b in entry["bytes"]).decode() == ANSWER
        assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
        assert all(entry["token"] and "Ġ" not in entry["token"] for entry in entries)
    raw = api.chat(logprobs=True, top_logprobs=0).content
    assert check_answer(raw, model=MODEL).logprobs[0][0]["content"][0]["top_logprobs"] == []


def test_completion_logprobs_join_to_the_text_with_rising_offsets(api: Api) -> None:
    raw = api.complete(logprobs=1, max_tokens=100).content
    (arrays,) = check_answer(raw, model=MODEL, chat=False).logprobs[0]
    assert "".join(arrays["tokens"]) == ANSWER
    assert arrays["text_offset"] == sorted(arrays["text_offset"])
    assert len({len(array) for array in arrays.values()}) == 1


def test_an_error_before_the_first_token_is_plain_json(api: Api) -> None:
    error = OverloadedError("The queue is full.", retry_after_s=2.2)
    api.backend.script = lambda job, index: Play([], error=error)
    for stream in (True, False):
        response = api.chat(stream=stream)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "3"
        assert check_error(response.content)["code"] == "overloaded"


@pytest.mark.parametrize("chat", [True, False])
def test_an_error_after_the_first_token_ends_the_stream_without_a_finish_reason(
    api: Api, chat: bool
) -> None:
    error = EngineError("The engine failed.")
    api.backend.script = lambda job, index: Play(api.backend.answer, error=error, error_after=3)
    response = (api.chat if chat else api.complete)(stream=True)
    found = check_stream(response.content, model=MODEL, chat=chat)
    assert found.error["code"] == "engine_error"
    assert found.reasons == {}
    response = (api.chat if chat else api.complete)()
    assert response.status_code == 500
    assert response.headers["x-should-retry"] == "false"
    assert check_error(response.content)["code"] == "engine_error"


def test_one_prompt_that_fails_fails_the_whole_request_and_cancels_the_rest(api: Api) -> None:
    def script(job: object, index: int) -> Play:
        failing = len(api.backend.jobs) == 2
        error = EngineError("The engine failed.") if failing else None
        return Play(api.backend.answer, error=error, hang_after=None if failing else 1)

    api.backend.script = script
    assert api.complete(prompt=["a", "b", "c"]).status_code == 500
    assert len(api.backend.cancelled) == 3


def test_a_seed_a_limit_and_sampling_fields_reach_the_engine(api: Api) -> None:
    whole(
        api,
        seed=-1,
        temperature=0,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        max_tokens=7,
        max_completion_tokens=5,
        presence_penalty=1,
        logit_bias={"5": -100},
        stop_token_ids=[7, 7],
        ignore_eos=True,
        cache_salt="s",
        priority=-3,
    )
    job = api.backend.jobs[-1]
    sampling = job.sampling
    assert (sampling.seed, sampling.max_tokens, sampling.top_k) == (2**64 - 1, 5, 0)
    assert sampling.logit_bias == {5: -100.0}
    assert sampling.stop_token_ids == (7,)
    assert (job.cache_salt, job.priority, sampling.ignore_eos) == ("s", -3, True)


def test_a_limit_above_the_room_is_clamped_to_it(api: Api) -> None:
    for fields in ({}, {"max_tokens": 2**31 - 1}, {"max_completion_tokens": 512}):
        whole(api, **fields)
        job = api.backend.jobs[-1]
        assert job.sampling.max_tokens == 512 - len(job.prompt)


def test_the_models_own_defaults_hold_when_a_field_is_absent() -> None:
    with running_api() as api:
        api.backend.generation_defaults = {"temperature": 0.2, "top_k": 20, "max_tokens": 9}
        whole(api, top_k=5, temperature=None)
        sampling = api.backend.jobs[-1].sampling
        assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.2, 5, 9)
        whole(api, max_tokens=11)
        assert api.backend.jobs[-1].sampling.max_tokens == 11


def test_every_form_of_message_history_is_rendered(api: Api) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    history = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "2"},
        {"role": "assistant", "content": ""},
        {"role": "user", "name": "bob", "content": "", "tool_calls": None, "refusal": None},
    ]
    whole(api, messages=history)
    text = api.backend.tokenizer.decode(api.backend.jobs[-1].prompt, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nab<|im_end|>")


def test_newer_and_null_fields_change_nothing(api: Api) -> None:
    harmless = {
        "user": "u1",
        "store": False,
        "metadata": {},
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "verbosity": "low",
        "reasoning_effort": "low",
        "modalities": ["text"],
        "tool_choice": "none",
        "tools": [],
        "response_format": {"type": "text"},
        "some_field_of_2030": [{}],
    }
    assert whole(api, **harmless).texts == {0: ANSWER}
    optional = ["stop", "tools", "stream_options", "logit_bias", "response_format", "seed"]
    optional += ["max_tokens", "temperature", "stream", "tool_choice", "audio", "logprobs"]
    assert whole(api, **dict.fromkeys(optional)).texts == {0: ANSWER}


def test_the_unforeseen_is_a_500_that_tells_nothing_of_itself(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "canary-of-a-prompt"
    api.backend.script = lambda job, index: Play([], error=RuntimeError(secret))
    for stream in (True, False):
        response = api.chat(stream=stream)
        assert response.status_code == 500
        assert check_error(response.content)["code"] == "internal_error"
        assert secret not in response.text
    error = RuntimeError(secret)
    api.backend.script = lambda job, index: Play(api.backend.answer, error=error, error_after=1)
    raw = api.chat(stream=True).content
    assert check_stream(raw, model=MODEL).error["code"] == "internal_error"
    assert "RuntimeError" in caplog.text
    assert secret not in caplog.text


@pytest.mark.parametrize("reason", ["abort", None])
def test_an_end_that_nobody_asked_for_is_an_error_and_no_finish_reason(
    api: Api, reason: str | None
) -> None:
    api.backend.script = lambda job, index: Play(api.backend.answer[:3], reason=reason)
    assert check_error(api.chat().content)["code"] == "engine_error"
    raw = api.chat(stream=True).content
    found = check_stream(raw, model=MODEL)
    assert (found.error["code"], found.reasons) == ("engine_error", {})


def test_a_stop_token_shows_only_when_it_is_asked_for(api: Api) -> None:
    token = api.backend.answer[3]
    api.backend.script = lambda job, index: Play(api.backend.answer[:3], stop_token=token)
    assert whole(api, stop_token_ids=[token]).texts == {0: "The quick brown"}
    shown = whole(api, stop_token_ids=[token], include_stop_str_in_output=True)
    assert shown.texts == {0: "The quick brown fox"}
    assert shown.usage["completion_tokens"] == 4


def test_what_ended_a_choice_is_told_when_the_client_named_it(api: Api) -> None:
    token = api.backend.answer[3]
    api.backend.script = lambda job, index: Play(api.backend.answer[:3], stop_token=token)
    cases = {
        token: {"stop_token_ids": [token]},
        "brown": {"stop": ["nothing", "brown"]},
        None: {},
    }
    for expected, fields in cases.items():
        assert whole(api, **fields).stops == streamed(api, **fields).stops == {0: expected}
        text = check_answer(api.complete(**fields).content, model=MODEL, chat=False)
        assert text.stops == {0: expected}
    cut = whole(api, max_tokens=2, stop_token_ids=[token])
    assert (cut.reasons, cut.stops) == ({0: "length"}, {0: None})


def test_a_job_that_cannot_be_entered_leaves_none_open(api: Api) -> None:
    enter = ScriptedGeneration.__aenter__
    entered: list[str] = []

    async def refuse_third(self: ScriptedGeneration) -> ScriptedGeneration:
        entered.append(self.job.request_id)
        if len(entered) == 3:
            raise OverloadedError("No place is left.")
        return await enter(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptedGeneration, "__aenter__", refuse_third)
        assert api.complete(prompt=["a", "b", "c", "d"]).status_code == 503
    assert not api.backend.running
    assert len(api.backend.cancelled) == 2


def test_history_may_hold_refusals_reasoning_and_arguments_that_are_no_json(api: Api) -> None:
    calls = [{"function": {"name": "f", "arguments": text}} for text in ("no json", "", "[1]")]
    history = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "refusal": "I will not."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "reasoning_content": "hm", "content": "ok", "tool_calls": calls},
    ]
    whole(api, messages=history)
    text = api.backend.tokenizer.decode(api.backend.jobs[-1].prompt)
    assert "I will not." in text
    assert "No." in text
    bare = {"role": "assistant", "content": [{"type": "refusal"}]}
    assert api.chat(messages=[bare]).status_code == 400


def test_a_prompt_of_ids_is_echoed_as_its_text(api: Api) -> None:
    ids = [1, *api.backend.tokenizer.encode("é b", add_special_tokens=False).ids]
    answer = whole(api, chat=False, prompt=ids, echo=True, max_tokens=1)
    assert answer.texts == {0: "<|im_start|>é bThe"}


def test_a_whole_number_may_be_written_with_a_fraction_of_nothing(api: Api) -> None:
    said = 'is "1.0" 1.0 \\"2.0'
    messages = [{"role": "user", "content": said}]
    numbers = {"max_tokens": 3.0, "n": 2.00, "seed": -7.0, "top_k": 5.0, "stop_token_ids": [9.0]}
    check_answer(api.chat(messages=messages, **numbers).content, model=MODEL, n=2)
    job = api.backend.jobs[-1]
    sampling = job.sampling
    assert (sampling.max_tokens, job.n, sampling.top_k) == (3, 2, 5)
    assert (sampling.seed, sampling.stop_token_ids) == (2**64 - 7, (9,))
    assert said in api.backend.tokenizer.decode(job.prompt)
    for name, value in {"max_tokens": 3.5, "n": 1e300, "top_k": 0.1}.items():
        response = api.chat(**{"seed": 1.0, name: value})
        assert response.status_code == 400
        assert check_error(response.content)["param"] == name
