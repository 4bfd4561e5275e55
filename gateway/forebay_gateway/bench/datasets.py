"""What to ask: prompts as token ids, output lengths and, for a trace, arrival times.

A pure function of the options and the seed; knows no HTTP. Prompts are lists of ids even where text
will be sent: `as_text` maps an id to a word, so that prefixes shared in ids are shared in text too.
"""

import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from forebay_gateway.bench.traces import TraceRow, read_trace
from forebay_gateway.bench.words import WORDS

# Ordinary tokens, no control or byte tokens, in the vocabularies of Llama 2 and 3, Qwen, Mistral
# and SmolLM2. The ints are made once: a prompt of n tokens then costs 8n bytes, not 36n.
TOKEN_IDS = tuple(range(1_000, 30_000))


class Sample(msgspec.Struct, frozen=True):
    """One request to make. `at_s` is its arrival after the start, None where the load decides."""

    prompt: list[int]
    output_len: int
    at_s: float | None = None


class DatasetOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths are in tokens. What each field does is in the help of `forebay bench serve`."""

    dataset_name: str = "random"
    dataset_path: Path | None = None
    num_prompts: int = 1000
    seed: int = 0
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_output_len: int = 128
    time_scale: float = 1.0
    length_scale: float = 1.0
    max_input_len: int = 0
    max_output_len: int = 0


def make_samples(options: DatasetOptions) -> list[Sample]:
    """Raises ValueError, with a line for the user, when the options make no dataset."""
    rng = random.Random(f"{options.seed}/prompts")  # of an int it would take the absolute value
    makers = {
        "random": uniform,
        "lognormal": lognormal,
        "prefix_repetition": prefix_repetition,
        "trace": trace,
    }
    return [_clip(sample, options) for sample in makers[options.dataset_name](options, rng)]


def uniform(options: DatasetOptions, rng: random.Random) -> Iterator[Sample]:
    """Lengths uniform within 1 -+ ratio of those asked, behind a prefix that all share."""
    prefix = _draw(rng, options.random_prefix_len)
    for _ in range(options.num_prompts):
        input_len = _around(rng, options.random_input_len, options.random_range_ratio)
        output_len = _around(rng, options.random_output_len, options.random_range_ratio)
        yield Sample(prefix + _draw(rng, input_len), output_len)


def lognormal(options: DatasetOptions, rng: random.Random) -> Iterator[Sample]:
    """Like ShareGPT: input median 110, sigma 1.3; output median 130, sigma 0.9; within 4..1024."""
    for _ in range(options.num_prompts):
        input_len = _lognormal(rng, median=110, sigma=1.3)
        output_len = _lognormal(rng, median=130, sigma=0.9)
        yield Sample(_draw(rng, input_len), output_len)


def prefix_repetition(options: DatasetOptions, rng: random.Random) -> Iterator[Sample]:
    """Every prompt is one of a few prefixes and a suffix of its own; the order is shuffled."""
    prefixes = [
        _draw(rng, options.prefix_repetition_prefix_len)
        for _ in range(options.prefix_repetition_num_prefixes)
    ]
    order = [index % len(prefixes) for index in range(options.num_prompts)]
    rng.shuffle(order)
    for index in order:
        suffix = _draw(rng, options.prefix_repetition_suffix_len)
        yield Sample(prefixes[index] + suffix, options.prefix_repetition_output_len)


def trace(options: DatasetOptions, rng: random.Random) -> Iterator[Sample]:
    """Arrival times and lengths of a recorded trace. Rows with block hashes share those blocks."""
    if options.dataset_path is None:
        raise ValueError("--dataset-name trace needs --dataset-path")
    blocks: dict[int, list[int]] = {}
    for row in read_trace(options.dataset_path, limit=options.num_prompts):
        length = max(1, round(row.input_len * options.length_scale))
        prompt = _of_blocks(row, blocks, options) if row.hash_ids else []
        prompt = prompt[:length] + _draw(rng, length - len(prompt))
        output_len = max(1, round(row.output_len * options.length_scale))
        yield Sample(prompt, output_len, row.at_s * options.time_scale)


def as_text(prompt: Sequence[int]) -> str:
    """A text of as many words as `prompt` has ids, in common vocabularies about as many tokens."""
    return " ".join(WORDS[token % len(WORDS)] for token in prompt)


def _of_blocks(row: TraceRow, blocks: dict[int, list[int]], options: DatasetOptions) -> list[int]:
    """The row's blocks of ids; each hash id always stands for the same ids."""
    size = max(1, round(row.block_size * options.length_scale))
    for hash_id in row.hash_ids:
        if hash_id not in blocks:
            blocks[hash_id] = _draw(random.Random(f"{options.seed}/{hash_id}"), size)
    return [token for hash_id in row.hash_ids for token in blocks[hash_id]]


def _draw(rng: random.Random, length: int) -> list[int]:
    return rng.choices(TOKEN_IDS, k=max(0, length))


def _around(rng: random.Random, length: int, ratio: float) -> int:
    low, high = math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))
    return max(1, rng.randint(low, high))


def _lognormal(rng: random.Random, median: float, sigma: float) -> int:
    return min(1024, max(4, round(rng.lognormvariate(math.log(median), sigma))))


def _clip(sample: Sample, options: DatasetOptions) -> Sample:
    prompt, output_len = sample.prompt, sample.output_len
    if options.max_input_len:
        prompt = prompt[: options.max_input_len]
    if options.max_output_len:
        output_len = min(output_len, options.max_output_len)
    return Sample(prompt, output_len, sample.at_s)
