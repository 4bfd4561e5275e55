"""Thinking and answer: every character in one of the two, the same for every grouping."""

from collections.abc import Sequence

import pytest
from forebay_gateway.parts import Collected
from forebay_gateway.reasoning.base import Opened, ReasoningParser
from forebay_gateway.reasoning.registry import (
    BUILT_IN,
    check_reasoning_parser,
    reasoning_parser,
)
from forebay_shared.settings import StartError
from hypothesis import given, settings
from hypothesis import strategies as st

CUTS = st.lists(st.integers(1, 8), min_size=1, max_size=12)
WORDS = st.text(st.sampled_from("ab </>\n\tthink你😀"), max_size=20)


def read(parser: ReasoningParser, text: str, cuts: Sequence[int]) -> tuple[str, str]:
    """Thinking and answer of a text in groups of the given sizes, round and round."""
    collected, at, turn = Collected(), 0, 0
    while at < len(text):
        size = cuts[turn % len(cuts)]
        collected.add(parser.push(text[at : at + size]))
        at, turn = at + size, turn + 1
    collected.add(parser.finish())
    return collected.reasoning, collected.text


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("opened", Opened)
@given(
    text=st.lists(
        st.one_of(WORDS, st.sampled_from(["<think>", "</think>", "\n" * 70])), max_size=5
    ).map("".join),
    cuts=CUTS,
)
@settings(max_examples=60, deadline=None)
def test_the_split_is_the_same_for_every_grouping_and_loses_nothing_but_tags(
    name: str, opened: Opened, text: str, cuts: list[int]
) -> None:
    reasoning, answer = read(BUILT_IN[name](opened), text, cuts)
    assert (reasoning, answer) == read(BUILT_IN[name](opened), text, [max(1, len(text))])
    kept = (reasoning + answer).replace("\n", "").replace(" ", "").replace("\t", "")
    whole = text.replace("\n", "").replace(" ", "").replace("\t", "")
    assert kept in (
        whole,
        whole.replace("<think>", "", 1),
        whole.replace("</think>", "", 1),
        whole.replace("<think>", "", 1).replace("</think>", "", 1),
    )


@pytest.mark.parametrize("cut", range(1, 9))
@pytest.mark.parametrize(
    ("name", "opened", "text", "expected"),
    [
        ("qwen3", Opened.UNSAID, "<think>\nhm\n\n</think>\n\nYes.", ("hm", "Yes.")),
        ("qwen3", Opened.YES, "hm\nso</think>Yes.", ("hm\nso", "Yes.")),
        ("qwen3", Opened.YES, "<think>\nhm</think>Yes.", ("hm", "Yes.")),
        ("qwen3", Opened.UNSAID, "Yes. <think>", ("", "Yes. <think>")),
        ("qwen3", Opened.CLOSED, "<think> is a tag", ("", "<think> is a tag")),
        ("qwen3", Opened.UNSAID, "<think>\n\n</think>\n\nYes.", ("", "Yes.")),
        ("qwen3", Opened.YES, "cut off </thi", ("cut off </thi", "")),
        ("deepseek_r1", Opened.UNSAID, "hm</think>\nYes.", ("hm", "Yes.")),
        ("deepseek_r1", Opened.UNSAID, "<think>hm</think>a </think> b", ("hm", "a </think> b")),
        ("deepseek_r1", Opened.CLOSED, "Yes.", ("", "Yes.")),
    ],
)
def test_thinking_and_answer_are_told_apart(
    name: str, opened: Opened, text: str, expected: tuple[str, str], cut: int
) -> None:
    assert read(BUILT_IN[name](opened), text, [cut]) == expected


def test_the_end_of_the_prompt_says_whether_the_thinking_is_open() -> None:
    assert ReasoningParser.opened("<|im_start|>assistant\n<think>\n") is Opened.YES
    assert ReasoningParser.opened("assistant\n<think>\n\n</think>\n\n") is Opened.CLOSED
    assert ReasoningParser.opened("<think> user text\nassistant\n") is Opened.UNSAID


def test_long_runs_of_line_feeds_are_held_in_linear_space() -> None:
    parser = BUILT_IN["qwen3"](Opened.YES)
    for _ in range(5_000):
        parser.push("\n")
        parser.push("x\n")
        assert len(parser._text) - parser._at < 16


def test_the_parser_is_found_in_the_template_or_named_by_the_flag() -> None:
    assert reasoning_parser("auto", "no thinking here") is None
    assert reasoning_parser("none", "</think>") is None
    assert reasoning_parser("auto", "{{ '</think>' }}") is BUILT_IN["qwen3"]
    assert reasoning_parser("auto", "<｜Assistant｜></think>") is BUILT_IN["deepseek_r1"]
    assert reasoning_parser("qwen3", "") is BUILT_IN["qwen3"]
    with pytest.raises(StartError, match="--reasoning-parser must be one of auto, none"):
        check_reasoning_parser("nope")
