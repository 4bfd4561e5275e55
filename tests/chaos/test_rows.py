"""The table of README.md: all forty rows, in order; every test that it names exists; every metric
that it names is the product's, and a test of its row speaks of it."""

import ast
import re
from functools import cache
from pathlib import Path

from meters import Metric

HERE = Path(__file__).parent
CATALOGUE = HERE.parent.parent / "docs" / "metrics.md"
ROW = re.compile(r"^\| (\d+) \| (.+) \| (.+) \| (.+) \|$", re.M)
ROWS = ROW.findall((HERE / "README.md").read_text())
NAMED = re.compile(r"`(\S+\.py)::(\w+)`")
METRIC = re.compile(r"`((?:forebay_|vllm:)[^`]+)`")


def test_every_row_names_tests_that_exist_or_says_why_there_is_none() -> None:
    assert [int(number) for number, *_ in ROWS] == list(range(1, 41))
    for number, _, _, where in ROWS:
        named = NAMED.findall(where)
        assert named or "not to be had" in where, number
        for path, test in named:
            assert test in _bodies(HERE / path), (number, test)


def test_every_case_here_is_in_its_row() -> None:
    rows = {int(number): where for number, _, _, where in ROWS}
    for path in HERE.glob("test_*.py"):
        for test in re.findall(r"^def (test_\d\w+)\(", path.read_text(), re.M):
            numbers = re.match(r"test_((?:\d\d_)+)", test)
            assert numbers is not None, test
            for number in map(int, numbers[1].strip("_").split("_")):
                assert f"{path.name}::{test}" in rows[number], f"{test} is missing in row {number}"


def test_every_row_names_a_metric_and_a_test_of_it_looks_at_it() -> None:
    for number, _, seen, where in ROWS:
        metrics = METRIC.findall(seen)
        assert metrics, f"row {number}: what does an operator see?"
        bodies = [_bodies(HERE / path)[test] for path, test in NAMED.findall(where)]
        for name in metrics if bodies else ():
            family = Metric.read(name).name
            assert any(family in body for body in bodies), f"row {number}: nobody asserts {family}"


def test_every_metric_of_a_row_is_in_the_catalogue() -> None:
    catalogue = set(re.findall(r"(?:forebay_|vllm:)\w+", CATALOGUE.read_text()))
    for number, _, seen, _ in ROWS:
        for name in METRIC.findall(seen):
            assert Metric.read(name).name in catalogue, f"row {number}: {name}"


@cache
def _bodies(path: Path) -> dict[str, str]:
    """The text of each test of a file, with what it uses of the file: constants and helpers."""
    text = path.read_text()
    parts: dict[str, ast.stmt] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parts[node.name] = node
        elif isinstance(node, ast.Assign):
            parts |= {one.id: node for one in node.targets if isinstance(one, ast.Name)}
    texts = {name: ast.get_source_segment(text, node) or "" for name, node in parts.items()}
    return {
        name: "\n".join([texts[name], *(texts[used] for used in _names(node) & texts.keys())])
        for name, node in parts.items()
    }


def _names(node: ast.stmt) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
