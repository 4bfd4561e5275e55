"""The last wall in front of an engine: what no sampler could honour is refused by its name."""

import math

import pytest
from forebay_shared.errors import InvalidRequestError
from forebay_shared.sampling import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams

VOCABULARY = 100


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", math.inf),
        ("seed", 2**64),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-320),
        ("presence_penalty", -2.5),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("logit_bias", {VOCABULARY: 1.0}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (1,) * (MAX_STOP_TOKEN_IDS + 1)),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", (VOCABULARY,)),
        ("bad_words", ((1, VOCABULARY),)),
    ],
)
def test_a_value_that_no_sampler_could_honour_is_refused_by_its_name(
    name: str, value: object
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value}).validate(VOCABULARY)
    assert caught.value.param == name
    assert name in caught.value.message


def test_the_widest_values_that_a_client_may_ask_for_pass() -> None:
    SamplingParams(
        max_tokens=2**31 - 1,
        temperature=2,
        seed=2**64 - 1,
        logprobs=20,
        logit_bias={VOCABULARY - 1: -100.0},
        allowed_token_ids=(0,),
        bad_words=((1, 2),),
    ).validate(VOCABULARY)


@pytest.mark.parametrize(
    "asked",
    [{"temperature": 0}, {"temperature": 1e-6}, {"top_k": 1}, {"top_p": 0}, {"top_p": 1e-46}],
)
def test_no_heat_or_one_candidate_is_greedy(asked: dict[str, float]) -> None:
    SamplingParams(**asked).validate(VOCABULARY)
    assert SamplingParams(**asked).greedy
    assert not SamplingParams(temperature=1).greedy
