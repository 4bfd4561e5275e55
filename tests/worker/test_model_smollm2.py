"""The demo model: greedy tokens equal transformers' in float32, alone, batched and chunked."""

from pathlib import Path

import pytest
import torch
import transformers
from forebay_shared.sampling import SamplingParams
from forebay_shared.settings import WorkerSettings
from forebay_worker.checkpoint import resolve
from forebay_worker.engine.batch import ScheduledRow
from forebay_worker.engine.runner import Runner
from forebay_worker.engine.sequence import Sequence
from tiny_models import make_sequence
from tokenizers import Tokenizer

OUTPUT = 16
BLOCKS = 8
pytestmark = pytest.mark.timeout(300)

GREEDY = SamplingParams(temperature=0)
PROMPTS = (
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


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return resolve("", progress=False)


@pytest.fixture(scope="module")
def prompts(checkpoint: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    chats = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in PROMPTS]
    return [tokenizer.encode(chat, add_special_tokens=False).ids for chat in chats]


@pytest.fixture(scope="module")
def runner(checkpoint: Path) -> Runner:
    return Runner(checkpoint, WorkerSettings(max_model_len=BLOCKS * 16))


@pytest.fixture(scope="module")
def alone(runner: Runner, prompts: list[list[int]]) -> list[list[int]]:
    return [output for prompt in prompts for output in generate(runner, [prompt], chunk=999)]


def generate(runner: Runner, prompts: list[list[int]], chunk: int) -> list[list[int]]:
    """Greedy outputs of the prompts, in one batch, prefilled by at most `chunk` tokens a step."""
    sequences = [
        make_sequence(prompt, list(range(at * BLOCKS, (at + 1) * BLOCKS)), GREEDY)
        for at, prompt in enumerate(prompts)
    ]
    while running := [each for each in sequences if each.num_output < OUTPUT]:
        rows = sorted((scheduled(each, chunk) for each in running), key=lambda row: row.num_new > 1)
        for row, sampled in zip(rows, runner.execute(rows), strict=True):
            row.sequence.num_computed += row.num_new
            if sampled is not None:
                row.sequence.token_ids.append(sampled.token_id)
    return [each.token_ids[each.num_prompt :] for each in sequences]


def scheduled(sequence: Sequence, chunk: int) -> ScheduledRow:
    left = len(sequence.token_ids) - sequence.num_computed
    return ScheduledRow(sequence, min(left, chunk), samples=left <= chunk)


def test_greedy_tokens_equal_transformers(
    checkpoint: Path, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    """Each of our tokens is transformers' argmax after the ones before: so by induction the outputs
    are those of its greedy generate, at the price of one forward."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for prompt, output in zip(prompts, alone, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == output


@pytest.mark.parametrize("chunk", [999, 7])
def test_a_batch_generates_what_each_prompt_does_alone(
    runner: Runner, prompts: list[list[int]], alone: list[list[int]], chunk: int
) -> None:
    assert generate(runner, prompts, chunk) == alone
