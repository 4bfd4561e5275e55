"""The end of an engine: what still runs is handed back, so that it goes on elsewhere."""

import pytest
from forebay_shared.asked import Prompt
from forebay_shared.models import CAP_GENERATE
from forebay_shared.sampling import SamplingParams
from forebay_shared.wire import Failed

from forebay_worker.conformance.conftest import TEXTS
from forebay_worker.conformance.driver import Driven


def test_stop_hands_back_what_still_runs(driven: Driven, prompt: list[int]) -> None:
    room = driven.card.max_model_len - len(prompt)
    sampling = SamplingParams(temperature=0.0, max_tokens=min(4096, room), ignore_eos=True)
    stopped(driven, driven.submit(prompt, sampling))


def test_stop_hands_back_what_speaks_text(driven: Driven) -> None:
    if not driven.card.speaks_text or CAP_GENERATE not in driven.card.capabilities:
        pytest.skip("the card does not declare text")
    long = SamplingParams(max_tokens=400)
    stopped(driven, driven.submit_text(Prompt(" ".join(TEXTS)), long, "max_tokens"))


def stopped(driven: Driven, request_id: str) -> None:
    driven.wait_tokens(request_id)
    driven.stop()
    failed = [reply for reply in driven.ended(request_id) if isinstance(reply, Failed)]
    assert [(each.code, each.retryable) for each in failed] == [("worker_lost", True)]
    driven.stop()
