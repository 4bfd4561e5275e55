"""Prompts that any vocabulary has."""

import pytest
from forebay_shared.models import CAP_GENERATE
from tokenizers import Tokenizer

from forebay_worker.conformance.driver import Driven

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "Once upon a time there was a river that wanted to be a lake.",
    "def add(a, b):\n    return a + b\n",
    "1, 1, 2, 3, 5, 8, 13,",
)


@pytest.fixture(scope="session")
def prompts(driven: Driven) -> list[list[int]]:
    """A few prompts of different lengths, in the model's own ids."""
    if CAP_GENERATE not in driven.card.capabilities or driven.card.speaks_text:
        pytest.skip("this engine does not generate from ids")
    tokenizer = Tokenizer.from_str(driven.engine.blobs[driven.card.tokenizer].decode())
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    if all(len(set(prompt)) > 3 for prompt in prompts):
        return prompts
    size = min(driven.card.vocab_size, 100)  # a vocabulary that knows no English
    return [[(5 * at + 3 * k) % size for k in range(8 + at)] for at in range(len(TEXTS))]


@pytest.fixture
def prompt(prompts: list[list[int]]) -> list[int]:
    return prompts[0]
