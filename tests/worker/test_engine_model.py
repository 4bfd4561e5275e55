"""The whole engine with a real model: how it is scheduled changes no greedy token."""

from pathlib import Path

import pytest
from engine_fakes import Recorded, make_submit, run
from forebay_shared.sampling import SamplingParams
from forebay_shared.settings import WorkerSettings
from forebay_shared.wire import Delta, Done
from forebay_worker.checkpoint import resolve
from forebay_worker.engine.batch import Sampled, ScheduledRow
from forebay_worker.engine.core import EngineCore
from forebay_worker.engine.intake import Limits
from forebay_worker.engine.runner import Runner
from tokenizers import Tokenizer

QUESTIONS = (
    "What is the capital of France?",
    "Tell me a story about a fox.",
    "Explain how rain forms.",
    "Write a long poem about the sea.",
)
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
GREEDY = SamplingParams(max_tokens=20, temperature=0)
Tokens = dict[str, list[int]]


class Narrow:
    """A runner of which only the first `num_blocks` blocks may be used."""

    def __init__(self, runner: Runner, num_blocks: int) -> None:
        self._runner = runner
        self.num_blocks = num_blocks
        self.block_size = runner.block_size
        self.max_model_len = runner.max_model_len
        self.vocab_size = runner.vocab_size

    def execute(self, rows: list[ScheduledRow]) -> list[Sampled | None]:
        return self._runner.execute(rows)


class House:
    """The demo model, loaded once, and cores over it."""

    def __init__(self, directory: Path) -> None:
        settings = WorkerSettings(max_model_len=256, kv_cache_memory_bytes=64 << 20, block_size=8)
        self.runner = Runner(directory, settings)
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.prompts = {
            f"q{at}": self.tokenizer.encode(CHAT.format(question), add_special_tokens=False).ids
            for at, question in enumerate(QUESTIONS)
        }
        core, _ = self.core(enable_prefix_caching=False)
        self.alone: Tokens = {}
        for name in self.prompts:
            self.alone |= self.answers(core, name)

    def core(self, num_blocks: int = 64, **settings: object) -> tuple[EngineCore, Recorded]:
        runner, recorder = Narrow(self.runner, num_blocks), Recorded()
        limits = Limits.of(runner, (2,))
        return EngineCore(runner, limits, WorkerSettings(**settings), recorder), recorder

    def answers(self, core: EngineCore, *names: str, attempt: int = 1) -> Tokens:
        """The tokens of the named questions, all asked at once; of every one when none is."""
        chosen = names or tuple(self.prompts)
        submits = [
            make_submit(name, self.prompts[name], sampling=GREEDY, attempt=attempt)
            for name in chosen
        ]
        tokens: Tokens = {name: [] for name in chosen}
        for message in run(core, *submits):
            assert not isinstance(message, Done) or message.finish_reason in ("stop", "length")
            if isinstance(message, Delta):
                tokens[message.request_id] += message.token_ids
        core.blocks.check_integrity()
        return tokens


@pytest.fixture(scope="module")
def house() -> House:
    return House(resolve("", progress=False))


def test_the_model_answers_a_question(house: House) -> None:
    assert house.tokenizer.decode(house.alone["q0"]) == "The capital of France is Paris."


def test_a_batch_changes_no_token(house: House) -> None:
    core, _ = house.core(enable_prefix_caching=False)
    assert house.answers(core) == house.alone


def test_a_cached_prefix_changes_no_token(house: House) -> None:
    core, recorder = house.core()
    assert house.answers(core) == house.alone
    shared = recorder.total("prefix_hits")
    assert shared >= 3 * 24
    assert house.answers(core, attempt=2) == house.alone
    assert recorder.total("prefix_hits") >= shared + 4 * 24


def test_prefill_in_chunks_changes_no_token(house: House) -> None:
    core, recorder = house.core(max_num_batched_tokens=7)
    assert house.answers(core) == house.alone
    assert recorder.steps[0]["prompt_tokens"] == 0


@pytest.mark.parametrize("caching", [True, False])
def test_preemption_changes_no_token(house: House, caching: bool) -> None:
    """Room for two prompts, of which three blocks are shared, and for two more blocks."""
    needed = 2 * -(-max(map(len, house.prompts.values())) // 8) + 2
    core, recorder = house.core(
        num_blocks=needed - 3 * caching, enable_prefix_caching=caching, max_num_seqs=2
    )
    assert house.answers(core) == house.alone
    assert recorder.total("preemptions") > 0
