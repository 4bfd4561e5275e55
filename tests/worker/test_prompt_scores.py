"""Log-probabilities of a prompt: transformers' own, however it is cut, cached or resumed."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from engine_fakes import FakeRunner, Recorded, expected_scores, make_core, make_submit, run
from forebay_shared.sampling import SamplingParams
from forebay_shared.settings import WorkerSettings
from forebay_shared.wire import Delta, Done, PromptLogprobs, Started, TokenLogprobs
from forebay_worker.engine import runner, scoring
from forebay_worker.engine.core import EngineCore
from forebay_worker.engine.intake import Limits
from forebay_worker.engine.runner import Runner
from forebay_worker.engine.scheduler import MAX_SCORED
from tiny_models import VOCAB, make_model

PROMPT = [3, 9, 4, 17, 5, 5, 12, 8, 6, 3, 11]
ASKED = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, prompt_logprobs=3)
ECHO = SamplingParams(max_tokens=0, prompt_logprobs=0)


def scores(messages: list[object], request_id: str = "r") -> list[TokenLogprobs]:
    """All entries of a request, which come in order and before its first token."""
    entries: list[TokenLogprobs] = []
    for message in messages:
        if getattr(message, "request_id", None) != request_id:
            continue
        if isinstance(message, PromptLogprobs):
            assert message.offset == len(entries) + 1
            entries += message.entries
        assert not (isinstance(message, Delta) and message.index == 0) or entries
    return entries


@pytest.fixture(scope="module")
def wanted(checkpoint: Path, model: torch.nn.Module) -> list[TokenLogprobs]:
    with torch.inference_mode():
        logprobs = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    found: list[TokenLogprobs] = []
    for row, token in zip(logprobs[:-1], PROMPT[1:], strict=True):
        best = row.topk(3)
        top = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        found.append(TokenLogprobs(row[token].item(), top, int((row > row[token]).sum()) + 1))
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> torch.nn.Module:
    return make_model("qwen3", checkpoint)


@pytest.fixture(scope="module", params=["compiled", "torch"])
def engine(request: pytest.FixtureRequest, checkpoint: Path, model: torch.nn.Module) -> Runner:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(runner, "_fused", lambda: None)
        settings = WorkerSettings(kv_cache_memory_bytes=2**20, block_size=4)
        return Runner(checkpoint, settings)


def core_of(engine: Runner, **settings: object) -> EngineCore:
    return EngineCore(engine, Limits.of(engine), WorkerSettings(**settings), Recorded())


@pytest.mark.parametrize("budget", [1, 4, 64])
def test_scores_equal_transformers_however_the_prompt_is_cut(
    engine: Runner, wanted: list[TokenLogprobs], budget: int
) -> None:
    core = core_of(engine, max_num_batched_tokens=budget)
    messages = run(core, make_submit("r", PROMPT, sampling=ASKED))
    got = scores(messages)
    assert [entry.rank for entry in got] == [entry.rank for entry in wanted]
    for one, other in zip(got, wanted, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        assert [value for _, value in one.top] == pytest.approx(
            [value for _, value in other.top], abs=1e-4
        )


def test_scoring_changes_no_token_of_its_own_or_another_row(engine: Runner) -> None:
    plain = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    asked = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, prompt_logprobs=0)
    prompts = {"r": PROMPT, "other": PROMPT[3:]}

    def tokens(samplings: dict[str, SamplingParams]) -> list[tuple[str, list[int]]]:
        submits = [
            make_submit(name, prompts[name], sampling=each) for name, each in samplings.items()
        ]
        messages = run(core_of(engine), *submits)
        return [(one.request_id, one.token_ids) for one in messages if isinstance(one, Delta)]

    assert tokens({"r": asked, "other": plain}) == tokens({"r": plain, "other": plain})


def test_a_prompt_in_the_cache_is_computed_again_and_a_resumed_one_too() -> None:
    core = make_core(FakeRunner())
    prompt = list(range(2, 30))
    run(core, make_submit("warm", prompt))
    for name, emitted in (("cold", None), ("moved", {0: [7, 8]})):
        messages = run(core, make_submit(name, prompt, sampling=ASKED, emitted=emitted))
        assert scores(messages, name) == expected_scores(prompt)
        (started,) = (one for one in messages if isinstance(one, Started))
        assert started.cached_tokens == 0


def test_one_of_n_choices_scores_and_the_others_find_its_blocks() -> None:
    fake, recorder = FakeRunner(), Recorded()
    core = make_core(fake, recorder)
    prompt = list(range(2, 30))
    messages = run(core, make_submit("r", prompt, sampling=ASKED, n=4))
    assert scores(messages) == expected_scores(prompt)
    assert recorder.total("prefix_hits") == 3 * 24


def test_an_echo_alone_is_scored_without_a_token() -> None:
    core = make_core(FakeRunner(), max_num_batched_tokens=4)
    prompt = list(range(2, 30))
    messages = run(core, make_submit("r", prompt, sampling=ECHO, n=2))
    assert scores(messages) == expected_scores(prompt)
    assert not any(isinstance(one, Delta) for one in messages)
    ends = [one for one in messages if isinstance(one, Done)]
    assert sorted(one.index for one in ends) == [0, 1]
    assert {(one.finish_reason, one.usage.completion_tokens) for one in ends} == {("length", 0)}


def test_the_shortest_prompt_has_nothing_to_score() -> None:
    assert scores(run(make_core(FakeRunner()), make_submit("r", [5], sampling=ECHO))) == []


def test_a_step_scores_a_bounded_number_of_tokens() -> None:
    fake = FakeRunner(num_blocks=512, max_model_len=1024)
    core = make_core(fake)
    prompt = [at % 60 + 2 for at in range(MAX_SCORED + 90)]
    submits = [make_submit(name, prompt, sampling=ECHO, cache_salt=name) for name in "abc"]
    messages = run(core, *submits)
    for name in "abc":
        assert scores(messages, name) == expected_scores(prompt)
    most = max(sum(len(row.scored) for row in rows) for rows in fake.batches)
    assert most <= MAX_SCORED + len(submits)


def test_a_prompt_with_a_nan_fails_alone(engine: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = torch.nan
    real = scoring.add_scores

    def poisoned(rows, results, given):
        bad = [row.sequence.request_id == "bad" for row in rows for _ in row.scored]

        def spoilt(start: int, stop: int) -> torch.Tensor:
            piece = given(start, stop).clone()
            piece[torch.tensor(bad[start:stop])] = logits
            return piece

        return real(rows, results, spoilt)

    monkeypatch.setattr(runner, "add_scores", poisoned)
    messages = run(
        core_of(engine),
        *(make_submit(name, PROMPT, sampling=ASKED, cache_salt=name) for name in ("bad", "good")),
    )
    assert scores(messages, "bad") == []
    assert len(scores(messages, "good")) == len(PROMPT) - 1
    codes = [one.code for one in messages if hasattr(one, "code")]
    assert codes == ["engine_error"]


def test_pieces_join_without_a_seam(monkeypatch: pytest.MonkeyPatch, engine: Runner) -> None:
    whole = scores(run(core_of(engine), make_submit("r", PROMPT, sampling=ASKED)))
    monkeypatch.setattr(scoring, "PIECE", 2)
    pieces = scores(run(core_of(engine), make_submit("r", PROMPT, sampling=ASKED)))
    assert pieces == whole
    assert all(a[1] >= b[1] for entry in whole for a, b in pairwise(entry.top))
