"""Rows of a batch do not touch each other: whatever joins, leaves or fails, each row's tokens are
those of its solo run on the same small model."""

from collections import defaultdict
from collections.abc import Iterator
from time import monotonic

import pytest
from engine_fakes import Recorded, make_submit
from forebay_shared.sampling import Grammar, SamplingParams
from forebay_shared.settings import WorkerSettings
from forebay_worker.engine.core import EngineCore
from forebay_worker.engine.grammar import Grammars
from forebay_worker.engine.intake import Limits
from forebay_worker.engine.runner import Runner
from fuzz_house import EOS, Outcome, note
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoint import TOKENIZER, VOCAB, make_directory

WORDS = [TOKENIZER.encode(text, add_special_tokens=False).ids for text in ("The fox", " dog", "a")]
prompts = st.sampled_from(
    [
        WORDS[0],
        WORDS[0] + WORDS[1] * 6,
        WORDS[0] + WORDS[1] * 6 + WORDS[2],
        WORDS[2] * 25,
        list(range(40, 75)),
    ]
)
tokens = st.integers(3, VOCAB - 1)
samplings = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([1, 4, 12]),
    min_tokens=st.sampled_from([0, 0, 3]),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_p=st.sampled_from([1.0, 0.8]),
    top_k=st.sampled_from([0, 5]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 3),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -1.0]),
    logit_bias=st.sampled_from([{}, {}, {EOS: 8.0}, {50: 6.0, 51: -100.0}]),
    allowed_token_ids=st.sampled_from([None, None, None, (50, 51, 52, EOS), tuple(range(30, 90))]),
    bad_words=st.sampled_from([(), (), ((50,), (60, 61))]),
    stop_token_ids=st.sampled_from([(), (), tuple(range(100, 160))]),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, None, 2]),
    prompt_logprobs=st.sampled_from([None, None, None, 1]),
    grammar=st.sampled_from(
        [None, None, None, Grammar("regex", "[a-f]{2,9}"), Grammar("choice", '["fox","dog"]')]
    ),
)
rows = st.lists(
    st.tuples(
        prompts,
        samplings,
        st.sampled_from([1, 1, 2]),
        st.integers(0, 12),
        st.sampled_from([None, None, None, 3, 9]),
    ),
    min_size=2,
    max_size=9,
)


class House:
    """The model, and the outcomes of requests that run alone."""

    def __init__(self, runner: Runner, grammars: Grammars) -> None:
        self._runner = runner
        self._grammars = grammars
        self._alone: dict[str, Outcome] = {}

    def core(self, **changes: object) -> EngineCore:
        return EngineCore(
            self._runner,
            Limits.of(self._runner, (EOS,)),
            WorkerSettings(**changes),
            Recorded(),
            grammars=self._grammars,
        )

    def alone(self, prompt: list[int], sampling: SamplingParams, n: int) -> Outcome:
        key = repr((prompt, sampling, n))
        if key not in self._alone:
            core = self.core(enable_prefix_caching=False)
            work = {"r": (make_submit("r", prompt, sampling=sampling, n=n), 0, None)}
            self._alone[key] = run(core, work)["r"]
        return self._alone[key]


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    home = make_directory(tmp_path_factory.mktemp("tiny"))
    runner = Runner(
        home, WorkerSettings(block_size=8, max_model_len=128, kv_cache_memory_bytes=1 << 19)
    )
    grammars = Grammars((home / "tokenizer.json").read_bytes(), VOCAB, (EOS,))
    yield House(runner, grammars)
    grammars.close()


def run(core: EngineCore, work: dict[str, tuple]) -> dict[str, Outcome]:
    """Submits each request at its step, cancels some at theirs; what came of each."""
    found: dict[str, Outcome] = defaultdict(dict)
    step, last = 0, max(join for _, join, _ in work.values())
    while step <= last or not core.idle:
        for name, (submit, join, leave) in work.items():
            if join == step:
                core.submit(submit, monotonic())
            if leave is not None and join + leave == step:
                core.cancel(name, 1)
        if core.stalled:
            core.wait_for_grammar(5)
        core.step()
        core.blocks.check_integrity(core.scheduler.running)
        for _, event in core.take_events():
            note(found[event.request_id], event)
        step += 1
    return found


@settings(max_examples=25, deadline=None)
@given(rows=rows, budget=st.sampled_from([4, 16, 64]), seats=st.sampled_from([2, 4, 16]))
def test_a_row_is_what_it_is_alone(
    house: House, rows: list[tuple], budget: int, seats: int
) -> None:
    core = house.core(max_num_batched_tokens=budget, max_num_seqs=seats)
    work = {
        f"r{at}": (make_submit(f"r{at}", prompt, sampling=sampling, n=n), join, leave)
        for at, (prompt, sampling, n, join, leave) in enumerate(rows)
    }
    found = run(core, work)
    assert core.blocks.num_free == core.blocks.num_blocks
    for at, (prompt, sampling, n, _, leave) in enumerate(rows):
        outcome, alone = found[f"r{at}"], house.alone(prompt, sampling, n)
        ends = [value[0] for key, value in outcome.items() if key[0] == "end"]
        if leave is not None and "abort" in ends:
            for key in [key for key in outcome if key[0] in ("tokens", "tops")]:
                assert outcome[key] == alone[key][: len(outcome[key])]
            continue
        if "failed" in alone:  # how much came before that is a matter of its chunks
            outcome.pop("ranks", None)
            alone = {key: value for key, value in alone.items() if key != "ranks"}
        assert outcome == alone
