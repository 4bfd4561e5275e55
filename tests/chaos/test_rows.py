"""The table of README.md: all forty rows, in order, and every test that it names exists."""

import re
from pathlib import Path

HERE = Path(__file__).parent
ROWS = re.findall(r"^\| (\d+) \| (.+) \| (.+) \|$", (HERE / "README.md").read_text(), re.M)


def test_every_row_names_tests_that_exist_or_says_why_there_is_none() -> None:
    assert [int(number) for number, _, _ in ROWS] == list(range(1, 41))
    for number, _, where in ROWS:
        named = re.findall(r"`(\S+\.py)::(\w+)`", where)
        assert named or "not to be had" in where, number
        for path, test in named:
            text = (HERE / path).read_text()
            assert re.search(rf"^(?:async )?def {test}\(|^{test} = ", text, re.M), (number, test)


def test_every_case_here_is_in_its_row() -> None:
    rows = {int(number): where for number, _, where in ROWS}
    for path in HERE.glob("test_*.py"):
        for test in re.findall(r"^def (test_\d\w+)\(", path.read_text(), re.M):
            numbers = re.match(r"test_((?:\d\d_)+)", test)
            assert numbers is not None, test
            for number in map(int, numbers[1].strip("_").split("_")):
                assert f"{path.name}::{test}" in rows[number], f"{test} is missing in row {number}"
