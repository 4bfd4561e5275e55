"""The end of an engine: what still runs is handed back, so that it goes on elsewhere."""

from forebay_shared.sampling import SamplingParams
from forebay_shared.wire import Failed

from forebay_worker.conformance.driver import Driven


def test_stop_hands_back_what_still_runs(driven: Driven, prompt: list[int]) -> None:
    room = driven.card.max_model_len - len(prompt)
    sampling = SamplingParams(temperature=0.0, max_tokens=min(4096, room), ignore_eos=True)
    request_id = driven.submit(prompt, sampling)
    driven.wait_tokens(request_id)
    driven.stop()
    failed = [reply for reply in driven.ended(request_id) if isinstance(reply, Failed)]
    assert [(each.code, each.retryable) for each in failed] == [("worker_lost", True)]
    driven.stop()
