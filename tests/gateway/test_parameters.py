"""Every parameter that the best servers know: honoured, refused by name, or harmlessly ignored.

The list is `parameter_decisions`. Of an honoured one the effect is shown on a real engine with a
small random model.
"""

import json

import pytest
from forebay_gateway.api.openai.refused import Refused
from forebay_gateway.api.openai.schema import ChatRequest, CompletionRequest
from parameter_decisions import DECISIONS, NOT_OF_TEXTS, Decision
from tiny_checkpoint import MAX_LEN, VOCAB
from tiny_house import Tiny, mean

FIELDS = {"chat": ChatRequest.__struct_fields__, "text": CompletionRequest.__struct_fields__}
CASES = [
    pytest.param(where, name, decision, id=f"{where}-{name}")
    for name, decision in DECISIONS.items()
    for where in (("chat", "text") if decision.where == "both" else (decision.where,))
]


def ask(tiny: Tiny, where: str, **fields: object):
    return (tiny.chat if where == "chat" else tiny.complete)(**fields)


def test_every_field_is_decided_and_every_refused_one_is_refused() -> None:
    fields = set(FIELDS["chat"]) | set(FIELDS["text"])
    undeclared = {name for name, each in DECISIONS.items() if each.how == "ignored"}
    assert fields <= DECISIONS.keys()
    assert DECISIONS.keys() - fields <= undeclared
    decided = {name for name, each in DECISIONS.items() if each.how == "refused"}
    assert set(Refused.__struct_fields__) <= decided


@pytest.mark.parametrize(("where", "name", "decision"), CASES)
def test_a_parameter_is_honoured_refused_or_ignored_as_decided(
    tiny: Tiny, where: str, name: str, decision: Decision
) -> None:
    taken = ask(tiny, where, **{name: decision.right})
    assert taken.status_code == 200, taken.text
    assert ask(tiny, where, **{name: None}).status_code == (400 if name in NEEDED else 200)
    if decision.how == "ignored":
        assert text(taken, where) == text(ask(tiny, where), where)
        return
    answer = ask(tiny, where, **{name: decision.wrong})
    assert answer.status_code == 400, answer.text
    assert (answer.json()["error"]["param"] or "").split(".")[0].split("[")[0] == name


NEEDED = {"messages", "prompt", "model"}


@pytest.mark.parametrize("name", sorted(NOT_OF_TEXTS))
def test_what_only_a_chat_has_is_refused_for_a_text(tiny: Tiny, name: str) -> None:
    for value in (DECISIONS[name].wrong or 5, "x", {"a": 1}):
        answer = tiny.complete(**{name: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert tiny.complete(**{name: None}).status_code == 200


def test_what_only_a_text_has_is_refused_for_a_chat(tiny: Tiny) -> None:
    answer = tiny.chat(prompt="The")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


def test_what_asks_for_nothing_is_fine(tiny: Tiny) -> None:
    asks = {"tool_choice": "none", "tools": [], "modalities": ["text"], "chat_template_kwargs": {}}
    assert tiny.complete(**asks).status_code == 200
    assert tiny.complete(tool_choice="auto").status_code == 400


def choice(answer) -> dict:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def text(answer, where: str = "chat") -> str:
    found = choice(answer)
    return found["message"]["content"] if where == "chat" else found["text"]


def events(answer) -> list[dict]:
    lines = answer.text.split("\n\n")
    assert lines[-2] == "data: [DONE]", answer.text
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


BOTH = pytest.mark.parametrize("where", ["chat", "text"])


@BOTH
def test_only_allowed_tokens_come(tiny: Tiny, where: str) -> None:
    allowed = tiny.encode("fox dog")
    answer = ask(tiny, where, allowed_token_ids=allowed * 2, return_token_ids=True, temperature=1)
    assert set(choice(answer)["token_ids"]) <= set(allowed)


@BOTH
def test_a_bad_word_does_not_come_at_the_beginning_or_behind_a_space(
    tiny: Tiny, where: str
) -> None:
    spaced, pieces = tiny.encode(" dog"), tiny.encode("dog")
    assert (len(spaced), len(pieces)) == (1, 2)
    fields = {"temperature": 1, "max_tokens": 100, "seed": 1, "logit_bias": {}}
    fields["logit_bias"] = {str(token): 60 for token in pieces} | {str(spaced[0]): 60}
    said = text(ask(tiny, where, **fields, allowed_token_ids=pieces), where)
    assert "dog" in said
    assert " dog" in text(ask(tiny, where, **fields, allowed_token_ids=spaced), where)
    for word in ("dog", " dog"):
        answer = ask(tiny, where, **fields, allowed_token_ids=pieces + spaced, bad_words=[word])
        assert "dog" not in text(answer, where)


@BOTH
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_long_prompt_keeps_its_end_or_its_beginning(tiny: Tiny, where: str, side: str) -> None:
    words = " brown fox" * 3000
    fields: dict = {"prompt": "The" + words + " jumps"}
    if where == "chat":
        fields = {"messages": [{"role": "user", "content": "The" + words + " jumps"}]}
    assert ask(tiny, where, **fields).json()["error"]["code"] == "context_length_exceeded"
    answer = ask(
        tiny,
        where,
        truncate_prompt_tokens=5,
        truncation_side=side,
        return_token_ids=True,
        **fields,
    )
    whole = answer.json()
    ids = whole["prompt_token_ids"] if where == "chat" else choice(answer)["prompt_token_ids"]
    assert len(ids) == 5
    if where == "text":
        kept = "The brown fox brown fox" if side == "right" else " brown fox brown fox jumps"
        assert tiny.decode(ids) in (kept, kept.removeprefix(" brown"), kept.removesuffix(" fox"))
    assert whole["usage"]["prompt_tokens"] == 5
    full = ask(tiny, where, truncate_prompt_tokens=-1, max_tokens=8, **fields).json()
    assert full["usage"]["prompt_tokens"] == MAX_LEN - 1
    assert full["usage"]["completion_tokens"] == 1


def test_token_ids_of_a_prompt_are_cut_too(tiny: Tiny) -> None:
    ids = tiny.encode("The quick brown fox jumps")
    cut = tiny.complete(prompt=ids, truncate_prompt_tokens=2)
    assert text(cut, "text") == text(tiny.complete(prompt=ids[-2:]), "text")


@BOTH
def test_log_probabilities_of_the_prompt_have_vllms_shape(tiny: Tiny, where: str) -> None:
    answer = ask(tiny, where, prompt_logprobs=2, return_token_ids=True, n=2)
    whole = answer.json()
    holders = [whole] if where == "chat" else whole["choices"]
    for holder in holders:
        ids, first, *others = holder["prompt_token_ids"], *holder["prompt_logprobs"]
        assert first is None
        assert len(others) == len(ids) - 1
        for token, entry in zip(ids[1:], others, strict=True):
            assert entry[str(token)]["logprob"] <= 0
            assert entry[str(token)]["decoded_token"] or token == 0
            assert {each["rank"] for each in entry.values()} >= {1, 2}
            assert 2 <= len(entry) <= 3
            best = sorted(entry.values(), key=lambda each: each["rank"])
            assert [each["logprob"] for each in best] == sorted(
                (each["logprob"] for each in best), reverse=True
            )
    assert ask(tiny, where, prompt_logprobs=0, n=2).status_code == 200
    streamed = ask(tiny, where, prompt_logprobs=0, stream=True)
    assert streamed.json()["error"]["param"] == "prompt_logprobs"


@pytest.mark.parametrize("prompt", ["The quick 你好 fox", [274, 342, 337], ["The quick", "fox 😀"]])
def test_an_echo_with_log_probabilities_covers_prompt_and_answer(
    tiny: Tiny, prompt: object
) -> None:
    fields = {"prompt": prompt, "echo": True, "logprobs": 2, "n": 2, "return_token_ids": True}
    plain = tiny.complete(**fields).json()
    for each in plain["choices"]:
        logprobs, count = each["logprobs"], len(each["prompt_token_ids"])
        assert "".join(logprobs["tokens"]) == each["text"]
        assert len({len(part) for part in logprobs.values()}) == 1
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
        starts = logprobs["text_offset"]
        assert starts == sorted(starts)
        for at, token in zip(starts, logprobs["tokens"], strict=True):
            assert each["text"][at : at + len(token)] == token
        assert len(logprobs["tokens"]) >= count
    streamed = events(tiny.complete(stream=True, **fields))
    for each in plain["choices"]:
        parts = [one for event in streamed for one in event["choices"]]
        parts = [one for one in parts if one["index"] == each["index"]]
        assert "".join(part["text"] for part in parts) == each["text"]
        tokens = [
            token for part in parts if part["logprobs"] for token in part["logprobs"]["tokens"]
        ]
        assert tokens == each["logprobs"]["tokens"]
        ids = [token for part in parts for token in part.get("token_ids", [])]
        assert ids == each["token_ids"]
        assert parts[0]["prompt_token_ids"] == each["prompt_token_ids"]


def test_an_echo_alone_takes_no_token(tiny: Tiny) -> None:
    answer = tiny.complete(echo=True, logprobs=1, max_tokens=0).json()
    assert answer["choices"][0]["text"] == "The quick"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert tiny.complete(echo=True, max_tokens=0).json()["choices"][0]["text"] == "The quick"
    for refused_ in (tiny.complete(max_tokens=0), tiny.chat(max_tokens=0)):
        assert refused_.json()["error"]["param"] == "max_tokens"


def test_the_best_of_several_are_those_of_the_best_log_probability(tiny: Tiny) -> None:
    fields = {"temperature": 2, "seed": 3, "prompt": ["The quick", "fox"], "logprobs": 0}
    all_ = tiny.complete(n=6, **fields).json()["choices"]
    for count in (1, 2):
        best = tiny.complete(n=count, best_of=6, **fields).json()
        assert [each["index"] for each in best["choices"]] == list(range(2 * count))
        assert (
            best["usage"]["completion_tokens"]
            == sum(len(each["logprobs"]["tokens"]) for each in all_)
            or best["usage"]["completion_tokens"] == 6 * 2 * 8
        )
        for at, first in enumerate((0, 6)):
            group = sorted(
                all_[first : first + 6],
                key=lambda each: -mean(each["logprobs"]["token_logprobs"]),
            )
            chosen = best["choices"][at * count : (at + 1) * count]
            assert [each["text"] for each in chosen] == [each["text"] for each in group[:count]]
    unasked = tiny.complete(n=1, best_of=6, **fields | {"logprobs": None}).json()["choices"]
    assert [each["logprobs"] for each in unasked] == [None, None]
    for bad in ({"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}, {"best_of": 129}):
        assert tiny.complete(**bad).json()["error"]["param"] == "best_of"


@BOTH
def test_token_ids_come_with_the_answer_whole_and_streamed(tiny: Tiny, where: str) -> None:
    fields = {"return_token_ids": True, "n": 2, "max_tokens": 6, "temperature": 1, "seed": 1}
    plain = ask(tiny, where, **fields).json()
    ids = [each["token_ids"] for each in plain["choices"]]
    assert sum(map(len, ids)) == plain["usage"]["completion_tokens"]
    prompt = plain.get("prompt_token_ids") or plain["choices"][0]["prompt_token_ids"]
    assert len(prompt) == plain["usage"]["prompt_tokens"]
    streamed = events(ask(tiny, where, stream=True, **fields))
    found: list[list[int]] = [[], []]
    prompts = []
    for event in streamed:
        prompts.append(event.get("prompt_token_ids"))
        for each in event["choices"]:
            found[each["index"]] += each.get("token_ids", [])
            prompts.append(each.get("prompt_token_ids"))
    assert found == ids
    assert [each for each in prompts if each] == [prompt, prompt]
    assert "token_ids" not in ask(tiny, where).text


def test_the_token_that_ends_an_answer_is_among_its_ids(tiny: Tiny) -> None:
    stop = tiny.encode("dog")[-1]
    fields = {"logit_bias": {str(stop): 100}, "stop_token_ids": [stop], "min_tokens": 2}
    answer = tiny.complete(return_token_ids=True, **fields)
    assert choice(answer)["token_ids"][-1] == stop
    streamed = events(tiny.complete(return_token_ids=True, stream=True, **fields))
    assert streamed[-1]["choices"][0]["token_ids"] == [stop]


@BOTH
def test_tokens_are_named_by_their_ids_when_asked(tiny: Tiny, where: str) -> None:
    fields = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    fields |= {"logprobs": True, "top_logprobs": 2} if where == "chat" else {"logprobs": 2}
    answer = choice(ask(tiny, where, **fields))
    logprobs = answer["logprobs"]
    names = logprobs["tokens"] if where == "text" else [one["token"] for one in logprobs["content"]]
    known = [token for token in answer["token_ids"] if token < VOCAB - 8]
    assert names == [f"token_id:{token}" for token in known]
    tops = (
        [name for top in logprobs["top_logprobs"] for name in top]
        if where == "text"
        else [top["token"] for one in logprobs["content"] for top in one["top_logprobs"]]
    )
    assert all(name.startswith("token_id:") for name in tops)


def test_a_texts_alternatives_hold_the_chosen_token_too(tiny: Tiny) -> None:
    for count in (0, 2):
        fields = {"echo": True, "logprobs": count, "return_tokens_as_token_ids": True}
        logprobs = choice(tiny.complete(**fields))["logprobs"]
        names, scores, tops = (
            logprobs[name][1:] for name in ("tokens", "token_logprobs", "top_logprobs")
        )
        for name, score, top in zip(names, scores, tops, strict=True):
            assert top[name] == score
            assert len(top) == count + (list(top).index(name) == count)
            assert list(top.values()) == sorted(top.values(), reverse=True)


def test_documents_reach_the_template(tiny: Tiny) -> None:
    count = tiny.chat().json()["usage"]["prompt_tokens"]
    documents = [{"title": "t", "text": "The fox"}, {"text": "The dog"}]
    answer = tiny.chat(documents=documents, return_token_ids=True).json()
    assert answer["usage"]["prompt_tokens"] > count
    assert tiny.decode(answer["prompt_token_ids"]).startswith("doc: The fox\ndoc: The dog\n")
    for bad in ([{"text": "x"}] * 1025, [{"a": [[[[[[[[[1]]]]]]]]]}]):
        assert tiny.chat(documents=bad).json()["error"]["param"] == "documents"


def test_the_bounds_of_counts_are_bounds(tiny: Tiny) -> None:
    assert tiny.complete(prompt=["x"] * 100, best_of=11, n=1).json()["error"]["param"] == "prompt"
    assert tiny.complete(n=129).json()["error"]["param"] == "n"


def test_a_forced_function_is_called_in_the_old_form_whole_and_streamed(tiny: Tiny) -> None:
    parameters = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}
    fields = {
        "functions": [{"name": "look", "parameters": parameters}, {"name": "see"}],
        "function_call": {"name": "look"},
        "max_tokens": 64,
    }
    whole = choice(tiny.chat(**fields))
    assert whole["finish_reason"] == "function_call"
    assert whole["message"]["content"] is None
    call = whole["message"]["function_call"]
    assert call["name"] == "look"
    assert isinstance(json.loads(call["arguments"])["x"], bool)
    parts = [one for event in events(tiny.chat(stream=True, **fields)) for one in event["choices"]]
    pieces = [one["delta"]["function_call"] for one in parts if "function_call" in one["delta"]]
    assert pieces[0]["name"] == "look"
    assert "".join(piece["arguments"] for piece in pieces) == call["arguments"]
    assert parts[-1]["finish_reason"] == "function_call"


@BOTH
def test_a_choice_says_which_of_the_clients_stops_ended_it(tiny: Tiny, where: str) -> None:
    stop = tiny.encode("dog")[-1]
    fields = {"logit_bias": {str(stop): 100}, "max_tokens": 4}
    for asked, reason in (
        ({"stop_token_ids": [stop]}, stop),
        ({"stop": tiny.decode([stop])}, None),
    ):
        whole = choice(ask(tiny, where, **fields, **asked))
        assert whole["finish_reason"] == "stop"
        assert whole["stop_reason"] == (reason or asked["stop"])
    assert choice(ask(tiny, where, **fields))["stop_reason"] is None
