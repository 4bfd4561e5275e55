"""Datasets, traces and arrival plans of the bench client: pure functions of options and seed."""

import gzip
import itertools
import random
import statistics
from collections import Counter
from pathlib import Path

import pytest
from forebay_gateway.bench.datasets import DatasetOptions, as_text, make_samples
from forebay_gateway.bench.load import arrivals
from forebay_gateway.bench.traces import read_trace
from hypothesis import given
from hypothesis import strategies as st

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9306900,396,109
2023-11-16 18:15:47.6805900,12,3
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 1100, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 3500, "input_length": 1500, "output_length": 490, "hash_ids": [0, 1, 9]}
{"timestamp": 3500, "input_length": 600, "output_length": 4, "hash_ids": [4, 5]}
"""


@given(st.integers(0, 5), st.sampled_from(["random", "lognormal", "prefix_repetition"]))
def test_a_seed_gives_the_same_dataset_and_another_seed_another(seed: int, name: str) -> None:
    options = DatasetOptions(dataset_name=name, num_prompts=5, seed=seed)
    other = DatasetOptions(dataset_name=name, num_prompts=5, seed=seed + 1)
    assert make_samples(options) == make_samples(options)
    assert make_samples(options) != make_samples(other)


def test_random_lengths_stay_within_the_ratio_behind_one_prefix() -> None:
    options = DatasetOptions(
        num_prompts=300,
        random_input_len=100,
        random_output_len=50,
        random_range_ratio=0.2,
        random_prefix_len=7,
    )
    samples = make_samples(options)
    lengths = {len(sample.prompt) - 7 for sample in samples}
    assert (min(lengths), max(lengths)) == (80, 120)
    assert {min(s.output_len for s in samples), max(s.output_len for s in samples)} == {40, 60}
    assert len({tuple(sample.prompt[:7]) for sample in samples}) == 1
    assert len({tuple(sample.prompt[7:20]) for sample in samples}) == 300


def test_lognormal_lengths_have_the_medians_of_sharegpt() -> None:
    samples = make_samples(DatasetOptions(dataset_name="lognormal", num_prompts=4000))
    inputs, outputs = [len(s.prompt) for s in samples], [s.output_len for s in samples]
    assert statistics.median(inputs) == pytest.approx(110, rel=0.1)
    assert statistics.median(outputs) == pytest.approx(130, rel=0.1)
    assert (min(inputs), max(inputs)) == (4, 1024)
    assert min(outputs) >= 4
    assert max(outputs) <= 1024


def test_prefixes_are_repeated_evenly() -> None:
    options = DatasetOptions(
        dataset_name="prefix_repetition",
        num_prompts=12,
        prefix_repetition_num_prefixes=4,
        prefix_repetition_prefix_len=30,
        prefix_repetition_suffix_len=5,
        prefix_repetition_output_len=9,
    )
    samples = make_samples(options)
    assert Counter(Counter(tuple(s.prompt[:30]) for s in samples).values()) == {3: 4}
    assert len({tuple(s.prompt[30:]) for s in samples}) == 12
    assert {(len(s.prompt), s.output_len) for s in samples} == {(35, 9)}


@pytest.mark.parametrize("zipped", [True, False])
def test_an_azure_trace_gives_arrivals_and_lengths(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress(AZURE.encode()) if zipped else AZURE.encode())
    rows = read_trace(path, limit=100)
    assert [(r.at_s, r.input_len, r.output_len) for r in rows] == [
        (0.0, 374, 44),
        (1.0, 12, 3),
        (pytest.approx(4.2501), 396, 109),
    ]
    options = DatasetOptions(
        dataset_name="trace", dataset_path=path, num_prompts=2, time_scale=0.5, max_input_len=200
    )
    samples = make_samples(options)
    assert [(s.at_s, len(s.prompt), s.output_len) for s in samples] == [
        (0.0, 200, 44),
        (pytest.approx(2.12505), 200, 109),
    ]


def test_a_mooncake_trace_shares_the_blocks_of_equal_hash_ids(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(MOONCAKE.encode()))
    options = DatasetOptions(dataset_name="trace", dataset_path=path)
    first, second, third = (sample.prompt for sample in make_samples(options))
    assert (len(first), len(second), len(third)) == (1100, 1500, 600)
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:1100]
    assert third[:512] not in (first[:512], first[512:1024])
    assert [sample.at_s for sample in make_samples(options)] == [0.0, 2.5, 2.5]


def test_scaled_lengths_keep_the_shared_share_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE)
    options = DatasetOptions(dataset_name="trace", dataset_path=path, length_scale=1 / 32)
    first, second, third = (sample.prompt for sample in make_samples(options))
    assert (len(first), len(second), len(third)) == (34, 47, 19)
    assert first[:32] == second[:32]
    assert first[32:] != second[32:34]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", '{"timestamp": 1}\n', AZURE + "x,y,z\n"])
def test_a_file_that_is_no_trace_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "odd.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"odd\.csv"):
        read_trace(path, limit=10)


def test_text_prompts_share_what_id_prompts_share() -> None:
    left, right = as_text([1000, 2000, 3000]), as_text([1000, 2000, 4001])
    assert left.split()[:2] == right.split()[:2]
    assert len(left.split()) == 3
    assert left != right


@given(st.integers(1, 200), st.floats(0.1, 1000), st.floats(0.1, 10), st.integers(0, 2**32))
def test_arrivals_are_ordered_and_keep_the_rate(
    count: int, rate: float, burstiness: float, seed: int
) -> None:
    offsets = arrivals(count, rate, burstiness, random.Random(seed))
    assert len(offsets) == count
    assert offsets == sorted(offsets)
    assert offsets[-1] == pytest.approx(count / rate)


def test_gaps_of_a_poisson_process_spread_like_one_and_even_arrivals_do_not() -> None:
    def variation(burstiness: float) -> float:
        offsets = [0.0, *arrivals(4000, 10, burstiness, random.Random(1))]
        gaps = [b - a for a, b in itertools.pairwise(offsets)]
        return statistics.stdev(gaps) / statistics.fmean(gaps)

    assert variation(1.0) == pytest.approx(1.0, abs=0.1)
    assert variation(100.0) == pytest.approx(0.1, abs=0.02)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrivals(3, float("inf"), 1.0, random.Random(0)) == [0.0, 0.0, 0.0]
