"""Vectors: one for each input, and the same in any company. Skipped where the card has none."""

import math
from array import array

import pytest
from forebay_shared.models import CAP_EMBED
from forebay_shared.wire import Embedded, Encode, Failed, pack_ids
from tokenizers import Tokenizer

from forebay_worker.conformance.conftest import TEXTS
from forebay_worker.conformance.driver import GATEWAY, Driven
from forebay_worker.engines.base import Encoder

TOLERANCE = 1e-4


@pytest.fixture
def inputs(driven: Driven) -> list[list[int]]:
    if CAP_EMBED not in driven.card.capabilities:
        pytest.skip("the card does not declare embeddings")
    if driven.card.speaks_text:
        pytest.skip("this engine does not embed ids")
    tokenizer = Tokenizer.from_str(driven.engine.blobs[driven.card.tokenizer].decode())
    return [tokenizer.encode(text).ids for text in TEXTS]


def encode(driven: Driven, *inputs: list[int], dimensions: int = 0) -> "list[array[float]]":
    engine = driven.engine
    assert isinstance(engine, Encoder)
    request_id = driven.name(GATEWAY)
    engine.encode(
        Encode(
            request_id=request_id,
            attempt=1,
            gateway=GATEWAY,
            inputs=tuple(pack_ids(each) for each in inputs),
            dimensions=dimensions,
        )
    )
    last = driven.ended(request_id)[-1]
    assert isinstance(last, Embedded), last
    assert last.usage.prompt_tokens == sum(map(len, inputs))
    return [array("f", vector) for vector in last.vectors]


def test_each_input_gets_a_vector_of_the_cards_size(
    driven: Driven, inputs: list[list[int]]
) -> None:
    card = driven.card.embedding
    assert card is not None
    vectors = encode(driven, *inputs)
    assert [len(vector) for vector in vectors] == [card.size] * len(inputs)
    if card.normalized:
        assert all(math.dist(v, [0.0] * len(v)) == pytest.approx(1, abs=1e-3) for v in vectors)


def test_company_changes_no_vector(driven: Driven, inputs: list[list[int]]) -> None:
    together = encode(driven, *inputs)
    for one, vector in zip(inputs, together, strict=True):
        (alone,) = encode(driven, one)
        assert math.dist(alone, vector) < TOLERANCE


def test_a_bad_input_is_answered_and_harms_nobody(driven: Driven, inputs: list[list[int]]) -> None:
    engine = driven.engine
    assert isinstance(engine, Encoder)
    (before,) = encode(driven, inputs[0])
    for bad in ([], [driven.card.vocab_size + 5]):
        request_id = driven.name(GATEWAY)
        engine.encode(
            Encode(request_id=request_id, attempt=1, gateway=GATEWAY, inputs=(pack_ids(bad),))
        )
        last = driven.ended(request_id)[-1]
        assert isinstance(last, Failed)
        assert not last.retryable
    (after,) = encode(driven, inputs[0])
    assert math.dist(before, after) < TOLERANCE
