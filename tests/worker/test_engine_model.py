"""The whole engine with the demo model: its greedy tokens are transformers' in float32, for twenty
prompts, and how they are scheduled changes none of them.
"""

from pathlib import Path

import pytest
import torch
import transformers
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
    "Write a haiku about rain.",
    "List three primary colors.",
    "Explain gravity to a child.",
    "2 + 2 =",
    "def fibonacci(n):",
    "Once upon a time",
    "The quick brown fox",
    "Translate 'good morning' into Spanish.",
    "Who wrote Hamlet?",
    "How do I boil an egg?",
    "Water is made of",
    "Give me a synonym for happy.",
    "The largest planet is",
    "Why is the sky blue?",
    "Summarise: cats sleep a lot because they hunt at dawn and dusk.",
    "A train leaves at noon and travels 60 km per hour for two hours. How far does it go?",
    "€ ü 漢字",
    "Hello",
    "SELECT name FROM",
)
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
OUTPUT = 16
GREEDY = SamplingParams(max_tokens=OUTPUT, temperature=0, ignore_eos=True)
BLOCK, SHARED = 8, 3  # tokens of a block, and blocks of the prefix that all prompts share
Tokens = dict[str, list[int]]


class Narrow:
    """A runner of which only the first `num_blocks` blocks may be used."""

    def __init__(self, runner: Runner, num_blocks: int) -> None:
        self._runner = runner
        self.num_blocks = num_blocks
        self.block_size = runner.block_size
        self.token_budget = runner.token_budget
        self.prefill_budget = runner.prefill_budget
        self.max_model_len = runner.max_model_len
        self.vocab_size = runner.vocab_size
        self.scores_prompts = runner.scores_prompts

    def execute(self, rows: list[ScheduledRow]) -> list[Sampled | None]:
        return self._runner.execute(rows)


class House:
    """The demo model, loaded once, and cores over it. `alone` are the answers one by one."""

    def __init__(self, directory: Path) -> None:
        settings = WorkerSettings(
            max_model_len=128, kv_cache_memory_bytes=128 << 20, block_size=BLOCK
        )
        self.directory = directory
        self.runner = Runner(directory, settings)
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.prompts = {
            f"q{at}": tokenizer.encode(CHAT.format(question), add_special_tokens=False).ids
            for at, question in enumerate(QUESTIONS)
        }
        core, _ = self.core(enable_prefix_caching=False)
        self.alone: Tokens = {}
        for name in self.prompts:
            self.alone |= self.answers(core, name)

    def core(self, num_blocks: int = 256, **settings: object) -> tuple[EngineCore, Recorded]:
        runner, recorder = Narrow(self.runner, num_blocks), Recorded()
        return EngineCore(runner, Limits.of(runner), WorkerSettings(**settings), recorder), recorder

    def answers(self, core: EngineCore, *names: str, attempt: int = 1) -> Tokens:
        """The tokens of the named questions, all asked at once; of every one when none is."""
        chosen = names or tuple(self.prompts)
        submits = [
            make_submit(name, self.prompts[name], sampling=GREEDY, attempt=attempt)
            for name in chosen
        ]
        tokens: Tokens = {name: [] for name in chosen}
        for message in run(core, *submits):
            assert not isinstance(message, Done) or message.finish_reason == "length"
            if isinstance(message, Delta):
                tokens[message.request_id] += message.token_ids
        core.blocks.check_integrity()
        return tokens


@pytest.fixture(scope="module")
def house() -> House:
    return House(resolve("", progress=False))


def test_greedy_tokens_equal_transformers(house: House) -> None:
    """Each of our tokens is transformers' argmax after the ones before: so by induction the outputs
    are those of its greedy generate, at the price of one forward."""
    model = transformers.AutoModelForCausalLM.from_pretrained(house.directory, dtype=torch.float32)
    for name, prompt in house.prompts.items():
        output = house.alone[name]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == output


def test_a_batch_changes_no_token(house: House) -> None:
    core, _ = house.core(enable_prefix_caching=False)
    assert house.answers(core) == house.alone


def test_a_cached_prefix_changes_no_token(house: House) -> None:
    core, recorder = house.core()
    assert house.answers(core) == house.alone
    shared = recorder.total("prefix_hits")
    assert shared >= (len(QUESTIONS) - 1) * SHARED * BLOCK
    assert house.answers(core, attempt=2) == house.alone
    assert recorder.total("prefix_hits") >= shared + len(QUESTIONS) * SHARED * BLOCK


@pytest.mark.parametrize("caching", [True, False])
def test_prefill_in_chunks_changes_no_token(house: House, caching: bool) -> None:
    core, recorder = house.core(max_num_batched_tokens=7, enable_prefix_caching=caching)
    assert house.answers(core) == house.alone
    assert recorder.steps[0]["prompt_tokens"] == 0


@pytest.mark.parametrize("caching", [True, False])
def test_preemption_changes_no_token(house: House, caching: bool) -> None:
    """Room for the prompts of four, their shared blocks counted once, and too little to grow."""
    whole = 4 * -(-max(map(len, house.prompts.values())) // BLOCK)
    core, recorder = house.core(
        num_blocks=whole - 3 * SHARED * caching, enable_prefix_caching=caching, max_num_seqs=4
    )
    assert house.answers(core) == house.alone
    assert recorder.total("preemptions") > 0
