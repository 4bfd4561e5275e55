"""Tokens to text: any grouping gives the same text, and stop strings never leak."""

from collections.abc import Sequence

import pytest
from forebay_gateway.output import Output, OutputOptions, StopMatcher, Vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_house import SPECIALS, byte_level_tokenizer, sentencepiece_tokenizer
from tokenizers import Tokenizer, models

TEXT = st.text(
    st.one_of(
        st.sampled_from("ab <|>\n"),
        st.sampled_from("é€你😀\u200d\ufffd"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=40,
)
CUTS = st.lists(st.integers(1, 8), min_size=1, max_size=20)


TOKENIZERS = {"byte level": byte_level_tokenizer(), "sentencepiece": sentencepiece_tokenizer()}
VOCABULARIES = {
    name: Vocabulary(tokenizer, tokenizer.get_vocab_size())
    for name, tokenizer in TOKENIZERS.items()
}


def grouped(items: Sequence[int] | str, cuts: Sequence[int]) -> list[Sequence[int] | str]:
    """The items in groups of the given sizes, round and round."""
    groups, at = [], 0
    while at < len(items):
        size = cuts[len(groups) % len(cuts)]
        groups.append(items[at : at + size])
        at += size
    return groups


def spoken(name: str, ids: Sequence[int], cuts: Sequence[int], **options: object) -> list[str]:
    """The pieces of text, and what the end flushes."""
    output = Output(VOCABULARIES[name], OutputOptions(**options))
    pieces = []
    for group in grouped(ids, cuts):
        pieces.append(output.push(group))
        if output.stopped:
            return pieces
    return [*pieces, output.finish()]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXT, cuts=CUTS)
@settings(max_examples=150, deadline=None)
def test_joined_pieces_equal_the_full_decode_for_every_grouping(
    name: str, text: str, cuts: list[int]
) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(spoken(name, ids, cuts)) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXT, cut=st.integers(0, 60), cuts=CUTS)
@settings(max_examples=150, deadline=None)
def test_an_answer_cut_inside_a_character_has_no_replacement_mark_before_its_end(
    name: str, text: str, cut: int, cuts: list[int]
) -> None:
    ids = TOKENIZERS[name].encode(text.replace("\ufffd", "x"), add_special_tokens=False).ids
    *pieces, rest = spoken(name, ids[:cut], cuts)
    assert "\ufffd" not in "".join(pieces)
    assert "".join([*pieces, rest]) == "".join(spoken(name, ids[:cut], [1]))


@given(data=st.lists(st.integers(0, 310), max_size=60), cuts=CUTS)
@settings(max_examples=200, deadline=None)
def test_garbage_tokens_decode_like_the_tokenizer_does(data: list[int], cuts: list[int]) -> None:
    expected = TOKENIZERS["byte level"].decode(data, skip_special_tokens=True)
    assert "".join(spoken("byte level", data, cuts)) == expected


def test_special_tokens_show_only_when_asked_for() -> None:
    ids = [1, *TOKENIZERS["byte level"].encode("hi", add_special_tokens=False).ids, 2]
    assert "".join(spoken("byte level", ids, [1])) == "hi"
    assert "".join(spoken("byte level", ids, [1], skip_special=False)) == (
        f"{SPECIALS[1]}hi{SPECIALS[2]}"
    )


def test_an_id_outside_the_vocabulary_has_no_text() -> None:
    assert spoken("byte level", [10**6], [1]) == ["", ""]


STOPS = st.lists(st.text("ab ", min_size=1, max_size=5), min_size=1, max_size=4)


def first_stop(text: str, stops: list[str]) -> tuple[int, int] | None:
    """Start and end of the stop string that is complete first; of several the longest."""
    found = [(end, end - len(stop)) for stop in stops for end in ends_of(stop, text)]
    return (min(found)[1], min(found)[0]) if found else None


def ends_of(stop: str, text: str) -> list[int]:
    return [i for i in range(len(stop), len(text) + 1) if text.endswith(stop, 0, i)]


@given(text=st.text("ab c", max_size=40), stops=STOPS, cuts=CUTS, include=st.booleans())
@settings(max_examples=500, deadline=None)
def test_the_first_complete_stop_string_ends_the_text_for_every_grouping(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    matcher = StopMatcher(stops, include=include)
    sent, stopped = "", False
    for piece in grouped(text, cuts):
        out, stopped = matcher.push(str(piece))
        sent += out
        if stopped:
            break
    found = first_stop(text, stops)
    assert stopped == (found is not None)
    if found is None:
        assert sent + matcher.flush() == text
    else:
        assert sent == text[: found[1] if include else found[0]]
        assert matcher.matched == text[found[0] : found[1]]


@given(text=st.text("ab", max_size=30), stops=STOPS)
@settings(max_examples=300, deadline=None)
def test_exactly_the_longest_suffix_that_may_become_a_stop_is_held_back(
    text: str, stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    sent, stopped = matcher.push(text)
    if stopped:
        return
    lengths = range(min(len(text), max(map(len, stops)) - 1) + 1)
    longest = max(k for k in lengths if any(s.startswith(text[len(text) - k :]) for s in stops))
    assert text == sent + text[len(text) - longest :] if longest else sent == text


def test_tokens_behind_a_stop_string_are_not_counted_whatever_comes_with_them() -> None:
    ids = TOKENIZERS["byte level"].encode("The quick brown fox", add_special_tokens=False).ids
    counts = set()
    for size in range(1, 9):
        output = Output(VOCABULARIES["byte level"], OutputOptions(stops=("quick",)))
        for group in grouped(ids, [size]):
            if not output.stopped:
                output.push(group)
        counts.add(output.tokens)
    assert len(counts) == 1


def test_stop_strings_do_not_act_before_min_tokens() -> None:
    ids = TOKENIZERS["byte level"].encode("fox fox fox", add_special_tokens=False).ids
    said = "".join(spoken("byte level", ids, [1], stops=("fox",), min_tokens=len(ids) - 1))
    assert said == "fox fox "


def test_a_tokenizer_without_a_decoder_still_gives_text() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.add_tokens(["naïve ✓"])
    vocabulary = Vocabulary(tokenizer, 4)
    detokeniser = vocabulary.detokeniser()
    said = detokeniser.push([0, 3]) + detokeniser.push([1]) + detokeniser.flush()
    assert said == tokenizer.decode([0, 3, 1])
    assert vocabulary.spelling(3).decode() == "naïve ✓"


def test_a_token_outside_the_byte_alphabet_is_its_own_text() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens(["naïve ✓"])
    vocabulary = Vocabulary(tokenizer, tokenizer.get_vocab_size())
    added = tokenizer.token_to_id("naïve ✓")
    assert vocabulary.detokeniser().push([added]) == tokenizer.decode([added]) == "naïve ✓"
