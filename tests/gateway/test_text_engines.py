"""Text from engines that speak it: what a client has had, what it is made of, what it may ask."""

import json

import pytest
from forebay_gateway.api.openai import texts
from forebay_gateway.api.openai.schema import ChatRequest, decode_chat
from forebay_gateway.inbox import COMPACT_AT, MAX_TOKENS, TEXT_WEIGHT, Inbox
from forebay_gateway.ledger import TextLedger
from forebay_gateway.meter import Meter
from forebay_gateway.output import OutputOptions
from forebay_gateway.parts import (
    CallArguments,
    CallEnd,
    CallStart,
    Collected,
    Part,
    Reasoning,
    Text,
)
from forebay_gateway.relayed import Relayed, Words
from forebay_gateway.teams.caller import Caller
from forebay_shared.asked import Chat, estimated_tokens
from forebay_shared.errors import OverloadedError, UnsupportedError
from forebay_shared.models import CAP_GENERATE, CAP_TEXT, ModelCard
from forebay_shared.packets import REPLY, WORK
from forebay_shared.telemetry import GatewayMetrics
from forebay_shared.wire import (
    UNSAID,
    CallDelta,
    Done,
    Started,
    SubmitText,
    TextDelta,
    TextLogprobs,
    Usage,
)
from prometheus_client import CollectorRegistry


def delta(offset: int = 0, **said: object) -> TextDelta:
    return TextDelta("r", 1, 0, offset, **said)


def card(*parameters: str) -> ModelCard:
    return ModelCard(
        names=("far",), revision="r", family="compatible", engine="http", tokenizer="",
        vocab_size=2**31 - 1, max_model_len=100, block_size=16, created=0,
        capabilities=frozenset({CAP_GENERATE, CAP_TEXT}), parameters=frozenset(parameters),
    )  # fmt: skip


def chat(**fields: object) -> ChatRequest:
    body = {"model": "far", "messages": [{"role": "user", "content": "hi"}], **fields}
    return decode_chat(json.dumps(body).encode())


def test_each_delta_is_passed_on_once_and_a_gap_is_a_loss() -> None:
    ledger = TextLedger(2)
    first = [Started("r", 1, 0, 0, 0.0), delta(0, content="a"), delta(0, content="a")]
    assert ledger.fold(first) == first[:2]
    assert (ledger.repeated, ledger.begun, ledger.told) == (1, True, True)
    assert ledger.fold([delta(2, content="c")]) == []
    assert ledger.lost == "gap"


def test_nothing_is_told_before_the_first_delta() -> None:
    ledger = TextLedger(1)
    ledger.fold([Started("r", 1, 0, 0, 0.0)])
    assert not ledger.told
    ledger.begin()
    assert ledger.fold([Started("r", 2, 0, 0, 0.0)]) == [], "once, over all attempts"
    ledger.fold([Done("r", 2, 0, "stop", None, Usage())])
    assert not ledger.open


def test_an_abort_that_nobody_asked_for_is_a_loss() -> None:
    ledger = TextLedger(1)
    assert ledger.fold([Done("r", 1, 0, "abort", None, Usage())]) == []
    assert ledger.lost == "failed"


def test_parts_come_in_order_and_calls_are_numbered_anew() -> None:
    relayed = Relayed(Words(), OutputOptions())
    parts: list[Part] = []
    parts += relayed.hear(delta(reasoning="hm", content="so"))
    parts += relayed.hear(delta(calls=[CallDelta(3, "c", "look", "{"), CallDelta(3, "", "", "}")]))
    parts += relayed.hear(delta(calls=[CallDelta(4, "", "see", "{}")]))
    parts += relayed.finish()
    assert parts[:5] == [
        Reasoning("hm"), Text("so"), CallStart(0, "c", "look"), CallArguments(0, "{}"), CallEnd(0),
    ]  # fmt: skip
    assert isinstance(parts[5], CallStart)
    assert parts[5].id.startswith("call_"), "an upstream that gives none"
    assert parts[6:] == [CallArguments(1, "{}"), CallEnd(1)]
    assert relayed.calls == 2


NONE = UNSAID


@pytest.mark.parametrize(
    ("told", "calls"),
    [
        # Every call has the number 0, or none.
        ([(0, "a", "f", "{}"), (0, "b", "g", "[]")], ["a f {}", "b g []"]),
        ([(0, "a", "f", "{}"), (0, "b", "f", "{}")], ["a f {}", "b f {}"]),
        ([(NONE, "a", "f", "{}"), (NONE, "b", "f", "{}")], ["a f {}", "b f {}"]),
        ([(NONE, "", "f", "{}"), (NONE, "", "g", "{}")], ["- f {}", "- g {}"]),
        # The number comes with the first piece alone.
        ([(1, "a", "f", ""), (NONE, "", "", "{"), (NONE, "", "", "}")], ["a f {}"]),
        # Id and name come again with each piece.
        ([(0, "a", "f", "{"), (0, "a", "f", "}"), (1, "b", "f", "{}")], ["a f {}", "b f {}"]),
    ],
)
def test_calls_of_servers_that_number_them_badly_are_told_apart(
    told: list[tuple], calls: list[str]
) -> None:
    relayed, answer = Relayed(Words(), OutputOptions()), Collected()
    for each in told:
        answer.add(relayed.hear(delta(calls=[CallDelta(*each)])))
    answer.add(relayed.finish())
    ids = ["-" if call.id.startswith("call_") else call.id for call in answer.calls]
    found = [
        f"{id_} {each.name} {each.arguments}" for id_, each in zip(ids, answer.calls, strict=True)
    ]
    assert found == calls


@pytest.mark.parametrize("pieces", [["ab", "cd", "ef"], list("abcdef"), ["abcdef"]])
def test_a_stop_string_acts_in_any_grouping(pieces: list[str]) -> None:
    relayed = Relayed(Words(), OutputOptions(stops=("de",)))
    heard: list[Part] = []
    for piece in pieces:
        heard += relayed.hear(delta(content=piece))
        if relayed.stopped:
            break
    assert "".join(part.text for part in heard if isinstance(part, Text)) == "abc"
    assert (relayed.stopped, relayed.stop) == (True, "de")


def test_tokens_are_numbered_as_they_come_and_spelled_again() -> None:
    words = Words()
    told = TextLogprobs(b"a", -0.1, [(b"a", -0.1), (b"b", -2.0)])
    again = TextLogprobs(b"b", -0.2, [])
    ids, entries = words.numbered(delta(logprobs=[told, again]))
    assert [words.spelling(token) for token in ids] == [b"a", b"b"]
    assert [words.spelling(token) for token, _ in entries[0].top] == [b"a", b"b"]
    assert words.spelling(99) == b""


def test_what_is_given_is_what_the_client_set() -> None:
    request = chat(temperature=0.5, seed=3, max_completion_tokens=9, top_p=None)
    fields = ("temperature", "seed", "max_completion_tokens")
    told = texts.chat_job(request, card(*fields), "r", Caller())
    assert told.job.given == ("max_tokens", "seed", "temperature")
    assert (told.job.sampling.max_tokens, told.job.sampling.seed) == (9, 3)
    assert isinstance(told.job.asked, Chat)
    plain = texts.chat_job(chat(), card(), "r", Caller()).job
    assert plain.given == ()
    assert plain.demand.output_tokens == 100, "no more than the context is reserved"


@pytest.mark.parametrize("name", ["temperature", "tools", "seed", "min_tokens", "functions"])
def test_a_field_that_the_card_does_not_name_is_refused(name: str) -> None:
    value = [{"name": "f"}] if name == "functions" else 1
    if name == "tools":
        value = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(UnsupportedError) as error:
        texts.check(chat(**{name: value}), card())
    assert error.value.param == name


def test_functions_go_as_tools_where_those_are_taken() -> None:
    request = chat(
        functions=[{"name": "look"}, {"name": "see"}],
        function_call={"name": "see"},
        messages=[
            {"role": "assistant", "content": None, "function_call": {"name": "look"}},
            {"role": "function", "name": "look", "content": "1"},
        ],
    )
    job = texts.chat_job(request, card("tools", "tool_choice"), "r", Caller()).job
    asked = job.asked
    assert isinstance(asked, Chat)
    assert [each.name for each in asked.functions] == ["look", "see"]
    assert (asked.forced, asked.parallel) == ("see", False)
    call, result = asked.messages
    assert result.role == "tool"
    assert [each.id for each in call.calls] == [result.call_id] != [""]
    for taken in ((), ("tools",)):
        with pytest.raises(UnsupportedError) as error:
            texts.check(request, card(*taken))
        assert error.value.param == ("function_call" if taken else "functions")
    texts.check(chat(functions=[], function_call="none"), card())


def test_a_slow_client_is_bounded() -> None:
    inbox = Inbox(GatewayMetrics(CollectorRegistry()))
    box = inbox.open("r", 1)
    number = max(COMPACT_AT, MAX_TOKENS // TEXT_WEIGHT) * 2
    inbox.deliver([delta(offset, content="x") for offset in range(number)])
    assert isinstance(box.error, OverloadedError)
    assert inbox.tokens <= number


def test_what_was_estimated_is_marked() -> None:
    settled: list[Usage] = []

    class Receipt:
        def settle(self, usage: Usage, *rest: object) -> None:
            settled.append(usage)

    cut = Meter(Receipt(), 11, 1, estimated=True)
    cut.take([Started("r", 1, 0, 0, 0.0), delta(0, content="a"), delta(1, content="b")])
    cut.settle("cancelled")
    assert (settled[0].prompt_tokens, settled[0].completion_tokens) == (11, 2)
    assert settled[0].estimated
    measured = Meter(Receipt(), 11, 1, estimated=True)
    measured.take([Started("r", 1, 0, 0, 0.0), Done("r", 1, 0, "stop", None, Usage(7, 0, 5))])
    measured.settle("completed")
    assert (settled[1].prompt_tokens, settled[1].estimated) == (7, False)


def test_an_estimate_counts_bytes() -> None:
    assert estimated_tokens("") == 1
    assert estimated_tokens("x" * 400) == 100
    assert estimated_tokens("東" * 400) == 300


def test_text_crosses_the_bus_whole() -> None:
    told = texts.chat_job(chat(), card(), "r", Caller()).job
    work = SubmitText(
        request_id="r", attempt=1, gateway="g", asked=told.asked, sampling=told.sampling
    )
    assert WORK.decode(WORK.encode("g", [work])) == ([work], 0)
    said = delta(3, content="é", calls=[CallDelta(0, "c", "f", "{}")], usage=Usage(1, 2, 3))
    assert REPLY.decode(REPLY.encode("w", [said])) == ([said], 0)
