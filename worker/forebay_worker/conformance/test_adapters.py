"""Adapters: each is a model of its own, whoever runs beside it, and shares no cached block."""

import msgspec
import pytest
from forebay_shared.models import CAP_ADAPTERS, CAP_DIGESTS
from forebay_shared.sampling import SamplingParams
from forebay_shared.wire import SequenceStart, pack_ids

from forebay_worker.conformance.driver import Driven

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def adapters(driven: Driven) -> list[str]:
    """The names to ask for: none for the model itself, then those on the card."""
    if CAP_ADAPTERS not in driven.card.capabilities:
        pytest.skip("the card does not declare adapters")
    return ["", *(adapter.name for adapter in driven.card.adapters)]


def test_the_card_names_its_adapters_and_their_revisions(driven: Driven) -> None:
    names = [*driven.card.names, *(adapter.name for adapter in driven.card.adapters)]
    assert bool(driven.card.adapters) == (CAP_ADAPTERS in driven.card.capabilities)
    assert len(set(names)) == len(names)
    assert all(adapter.revision for adapter in driven.card.adapters)
    assert not any("/" in adapter.root for adapter in driven.card.adapters)


def test_an_adapter_answers_alike_alone_in_company_and_where_another_left_off(
    driven: Driven, prompts: list[list[int]], adapters: list[str]
) -> None:
    asked = [(prompt, adapter) for prompt in prompts for adapter in adapters]
    alone = [_answer(driven, _ask(driven, *each)) for each in asked]
    together = [_ask(driven, *each) for each in asked * 2]
    assert [_answer(driven, request_id) for request_id in together] == alone * 2
    for (prompt, adapter), whole in zip(asked, alone, strict=True):
        start = SequenceStart(0, pack_ids(whole[:7]))
        assert _answer(driven, _ask(driven, prompt, adapter, start), start) == whole[7:]


def test_an_adapter_finds_no_block_of_another_in_the_cache(
    driven: Driven, prompts: list[list[int]], adapters: list[str]
) -> None:
    if CAP_DIGESTS not in driven.card.capabilities:
        pytest.skip("the card does not declare digests")
    prompt = (prompts[1] * driven.card.block_size * 2)[: driven.card.block_size * 3 + 1]
    sampling = msgspec.structs.replace(GREEDY, max_tokens=1)
    outcomes = [
        driven.outcomes(driven.submit(prompt, sampling, adapter=adapter, cache_salt="of this test"))
        for adapter in adapters * 2
    ]
    cached = [outcome.done[0].usage.cached_tokens for (outcome,) in outcomes]
    assert cached == [0] * len(adapters) + [driven.card.block_size * 3] * len(adapters)


def _ask(driven: Driven, prompt: list[int], adapter: str, *starts: SequenceStart) -> str:
    return driven.submit(prompt, GREEDY, *starts, adapter=adapter)


def _answer(driven: Driven, request_id: str, *starts: SequenceStart) -> list[int]:
    return driven.outcomes(request_id, *starts)[0].token_ids
