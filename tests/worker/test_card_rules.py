"""What a sequence asks of its next logits, in words: counted on from step to step."""

import numpy as np
from engine_fakes import make_sequence
from forebay_shared.sampling import SamplingParams
from forebay_worker.engine.card_rules import Rules, Words, most_words, needs_host
from forebay_worker.engine.sequence import Sequence
from hypothesis import given
from hypothesis import strategies as st

VOCAB = 100
IDS = st.lists(st.integers(0, 9), max_size=60)


def sequence_of(tokens: list[int], num_prompt: int, sampling: SamplingParams) -> Sequence:
    sequence = make_sequence(tokens)
    sequence.num_prompt, sequence.sampling = num_prompt, sampling
    return sequence


def words_of(sequence: Sequence, pending: int = 0) -> Words:
    return Rules(sequence, VOCAB).words(sequence, pending)


def said(words: Words) -> dict[int, int]:
    """How many times each id was said."""
    pairs = [(word & 0xFFFFFFFF, word >> 32) for word in words.said.tolist()]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def allowed(words: Words) -> list[int]:
    return np.flatnonzero(np.unpackbits(words.bits.view(np.uint8), bitorder="little")).tolist()


@given(prompt=IDS, output=IDS, steps=st.lists(IDS, max_size=4))
def test_what_was_said_is_counted_on(
    prompt: list[int], output: list[int], steps: list[list[int]]
) -> None:
    both = [
        sequence_of(prompt + output, len(prompt), sampling)
        for sampling in (
            SamplingParams(repetition_penalty=1.2, presence_penalty=0.5),
            SamplingParams(frequency_penalty=0.5),
        )
    ]
    rules = [Rules(each, VOCAB) for each in both]
    for new in ([], *steps):
        for each in both:
            each.token_ids += new
        told = both[0].token_ids[len(prompt) :]
        with_prompt, without = (
            said(one.words(each, 0)) for one, each in zip(rules, both, strict=True)
        )
        assert with_prompt == {each: told.count(each) for each in {*prompt, *told}}
        assert without == {each: told.count(each) for each in told}


def test_who_asks_nothing_has_no_words() -> None:
    words = words_of(sequence_of([1, 2, 3], 2, SamplingParams()))
    assert [len(each) for each in words] == [0, 0, 0, 0]


def test_biases_are_bounded_floats() -> None:
    asked = SamplingParams(logit_bias={0: 1.5, 99: -1e300})
    words = words_of(sequence_of([1], 1, asked)).biased
    assert (words & 0xFFFFFFFF).tolist() == [0, 99]
    values = (words >> 32).astype(np.int32).view(np.float32)
    assert values.tolist() == [1.5, np.float32(-1e30)]


def test_a_grammar_and_a_client_allow_what_both_allow() -> None:
    class Rule:
        stopped = False

        def mask(self) -> bytes:
            return b"\xff\x0f" + bytes(10) + b"\x08" + bytes(3)  # as long as a matcher's words

    sequence = sequence_of([1], 1, SamplingParams(allowed_token_ids=(3, 12, 11, 99)))
    assert allowed(words_of(sequence)) == [3, 11, 12, 99]
    sequence.matcher = Rule()  # type: ignore[assignment]
    assert allowed(words_of(sequence)) == [3, 11, 99]
    free = sequence_of([1], 1, SamplingParams())
    free.matcher = Rule()  # type: ignore[assignment]
    assert allowed(words_of(free)) == [*range(12), 99]


def test_ends_are_banned_until_the_tokens_on_their_way_are_enough() -> None:
    sequence = sequence_of([1, 2, 3], 2, SamplingParams(min_tokens=2))
    sequence.stop_ids = frozenset([7])
    assert words_of(sequence).banned.tolist() == [7]
    assert words_of(sequence, pending=1).banned.tolist() == []


def test_an_id_is_banned_once_and_a_rows_words_have_a_bound() -> None:
    asked = SamplingParams(
        bad_words=((5,), (3, 5)),
        logit_bias=dict.fromkeys(range(VOCAB), 1.0),
        repetition_penalty=2.0,
        allowed_token_ids=(1,),
    )
    words = words_of(sequence_of([*range(VOCAB), 3], VOCAB, asked))
    assert words.banned.tolist() == [5]
    assert sum(map(len, words)) <= most_words(VOCAB)


def test_only_bad_words_and_grammars_must_see_each_token() -> None:
    assert needs_host(SamplingParams(bad_words=((1, 2),)))
    assert not needs_host(
        SamplingParams(min_tokens=3, repetition_penalty=2.0, logit_bias={1: 1.0}, logprobs=2)
    )
