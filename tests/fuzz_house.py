"""Random clients of a core: requests with any sampling options that come, go and are cancelled.

With poisoned blocks nothing fails and nothing leaks, and who asks again alone gets the same.
"""

import random
from collections import defaultdict
from time import monotonic
from typing import Any

from engine_fakes import Recorded, make_submit
from forebay_shared.sampling import Grammar, SamplingParams
from forebay_shared.settings import WorkerSettings
from forebay_shared.wire import Delta, Done, Failed, PromptLogprobs, Submit
from forebay_worker.engine.core import EngineCore
from forebay_worker.engine.grammar import Grammars
from forebay_worker.engine.intake import Limits
from forebay_worker.engine.ports import Runner
from tiny_checkpoint import VOCAB

EOS = 2
Outcome = dict[Any, Any]
_GRAMMARS = (Grammar("regex", "[a-f]{2,9}"), Grammar("choice", '["fox","dog"]'))


def note(outcome: Outcome, event: object) -> None:
    """Adds to what has come of a request; how its deltas were cut does not show."""
    match event:
        case Delta():
            outcome.setdefault(("tokens", event.index), []).extend(event.token_ids)
            tops = [[token for token, _ in one.top] for one in event.logprobs or ()]
            outcome.setdefault(("tops", event.index), []).extend(tops)
        case PromptLogprobs():
            outcome.setdefault("ranks", []).extend(one.rank for one in event.entries)
        case Done():
            outcome["end", event.index] = (event.finish_reason, event.stop_token)
        case Failed():
            outcome["failed"] = event.code
        case _:
            pass


class Fuzz:
    """One model and its random clients, the same in every run."""

    def __init__(
        self,
        runner: Runner,
        grammars: Grammars,
        *,
        most_open: int,
        prompts: tuple[int, ...] = (1, 5, 17, 40),
        outputs: tuple[int, ...] = (1, 7, 30, 60),
    ) -> None:
        """`prompts`: their lengths without the 64 or 150 tokens that some share."""
        self._runner, self._grammars = runner, grammars
        self._rng = random.Random(0)
        self._most_open = most_open
        self._prompts, self._outputs = prompts, outputs
        self._shared = [self._rng.randrange(3, VOCAB) for _ in range(150)]
        self.submits: list[Submit] = []
        self.cancelled: set[str] = set()
        self.outcomes: defaultdict[str, Outcome] = defaultdict(dict)

    def run(self, steps: int, settings: WorkerSettings) -> Recorded:
        """So many steps of clients, then until all is served; what was recorded."""
        recorder, rng = Recorded(), self._rng
        core = self._core(settings, recorder)
        for step in range(steps):
            wanted = rng.randint(0, self._most_open)
            while len(core.scheduler.running) + len(core.scheduler.waiting) < wanted:
                self.submits.append(self._request(f"r{len(self.submits)}"))
                self._submit(core, self.submits[-1])
            if rng.random() < 0.05 and self.submits:
                name = rng.choice(self.submits[-40:]).request_id
                self.cancelled.add(name)
                core.cancel(name, 1)
            self._step(core, self.outcomes)
            if step % 100 == 0:
                core.blocks.check_integrity(core.scheduler.running)
        self._finish(core, self.outcomes)
        core.blocks.check_integrity()
        assert core.blocks.num_free == self._runner.num_blocks
        return recorder

    def check_alone(self, count: int, settings: WorkerSettings) -> None:
        """Asks some requests again, one by one."""
        whole = [each for each in self.submits if each.request_id not in self.cancelled]
        for submit in self._rng.sample(whole, min(count, len(whole))):
            alone: defaultdict[str, Outcome] = defaultdict(dict)
            core = self._core(settings, Recorded())
            self._submit(core, submit)
            self._finish(core, alone)
            found, wanted = self.outcomes[submit.request_id], alone[submit.request_id]
            if "failed" in wanted:  # how much came before that is a matter of its chunks
                found, wanted = (
                    {key: value for key, value in each.items() if key != "ranks"}
                    for each in (found, wanted)
                )
            assert found == wanted, submit

    def _core(self, settings: WorkerSettings, recorder: Recorded) -> EngineCore:
        limits = Limits.of(self._runner, (EOS,))
        return EngineCore(self._runner, limits, settings, recorder, grammars=self._grammars)

    def _submit(self, core: EngineCore, submit: Submit) -> None:
        core.submit(submit, monotonic())
        while core._requests.num_preparing:  # so that it joins at the same step in every run
            core.wait_for_grammar(5)

    def _step(self, core: EngineCore, outcomes: defaultdict[str, Outcome]) -> None:
        core.step()
        for _, event in core.take_events():
            # Its own settings may leave a request no token; nothing else may fail.
            assert not isinstance(event, Failed) or event.code == "invalid_value", event
            note(outcomes[event.request_id], event)

    def _finish(self, core: EngineCore, outcomes: defaultdict[str, Outcome]) -> None:
        while not core.idle:
            self._step(core, outcomes)

    def _request(self, name: str) -> Submit:
        rng = self._rng
        prompt = [rng.randrange(3, VOCAB) for _ in range(rng.choice(self._prompts))]
        if rng.random() < 0.4:
            prompt = self._shared[: rng.choice([64, 150])] + prompt
        return make_submit(name, prompt, sampling=self._options(), n=rng.choice([1, 1, 1, 2]))

    def _options(self) -> SamplingParams:
        """Mostly what every step can do at once; now and then one of the others."""
        rng = self._rng

        def seldom(usual: Any, *others: Any) -> Any:
            return rng.choice(others) if rng.random() < 0.04 else usual

        return SamplingParams(
            max_tokens=rng.choice(self._outputs),
            min_tokens=seldom(0, 3),
            temperature=rng.choice([0.0, rng.uniform(0.3, 1.5)]),
            top_k=rng.choice([0, 0, 1, 20]),
            top_p=rng.choice([1.0, 1.0, 0.9]),
            min_p=rng.choice([0.0, 0.0, 0.05]),
            seed=rng.randrange(2**64),
            repetition_penalty=seldom(1.0, 1.2, 0.9),
            presence_penalty=seldom(0.0, 0.5),
            frequency_penalty=seldom(0.0, -0.5),
            logit_bias=seldom({}, {3: 2.0}, {EOS: 8.0, 50: -100.0}),
            allowed_token_ids=seldom(None, (50, 51, 52, EOS), tuple(range(30, 90))),
            bad_words=seldom((), ((50,), (60, 61))),
            stop_token_ids=(rng.randrange(VOCAB),),
            ignore_eos=rng.random() < 0.5,
            logprobs=seldom(None, 0, 3),
            prompt_logprobs=seldom(None, 1),
            grammar=seldom(None, *_GRAMMARS),
        )
