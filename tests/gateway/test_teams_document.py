"""`teams.yaml`: which records a document means, and what of it is refused, in a file too."""

from pathlib import Path
from typing import Any

import pytest
from forebay_gateway.admin import files
from forebay_gateway.admin.client import AdminClient
from forebay_gateway.teams import document
from forebay_gateway.teams.directory import Directory
from forebay_gateway.teams.records import Key
from forebay_shared.errors import InvalidRequestError
from forebay_shared.settings import Secret, StartError
from teams_house import filled


def teams_with_keys(keys: dict[str, list[str]]) -> dict[str, Any]:
    """A document of one organisation, its teams and their keys' names."""
    teams = [{"id": team, "keys": [{"name": n} for n in names]} for team, names in keys.items()]
    return {"organisations": [{"id": "acme", "teams": teams}]}


def test_new_keys_are_told_apart_by_their_whole_names() -> None:
    long = "a-name-that-begins-as-the-others-do"
    tree = teams_with_keys({"a": ["b-c", f"{long}-1", f"{long}-2"], "a-b": ["c"], "acme": ["x"]})
    tree["organisations"][0]["keys"] = [{"name": "x", "role": "owner"}]
    found = [each for each in document.read(tree, Directory()) if isinstance(each, Key)]
    assert len({each.id for each in found}) == 6
    steps = document.difference(document.read(tree, Directory()), Directory(), prune=False)
    assert len([step for step in steps if step.label.startswith("key/")]) == 6


def test_a_key_that_is_there_twice_is_named_by_its_team_and_name() -> None:
    with pytest.raises(InvalidRequestError, match="there twice: key/red/ci"):
        document.read(teams_with_keys({"red": ["ci", "ci"]}), Directory())


def test_what_was_exported_ends_no_key_when_it_is_applied_again() -> None:
    unnamed = (Key(id="1", team="red"), Key(id="2", organisation="acme", role="owner"))
    directory = filled(*unnamed, Key(id="3", role="owner"), Key(id="4", team="blue", name="ci"))
    tree = document.write(directory)
    assert document.difference(document.read(tree, directory), directory, prune=True) == []
    [acme] = tree["organisations"]
    acme["teams"] = [team for team in acme["teams"] if team["id"] != "red"]
    steps = document.difference(document.read(tree, directory), directory, prune=True)
    assert [step.place for step in steps] == ["key/1", "user/ann", "team/red"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("keys: [{name: a, expires: 2027-02-30}]", "a value cannot be read: day"),
        ("keys: &all [*all]", "more than 2000000 values"),
        ("keys: &all {x: *all}", "more than 2000000 values"),
        (
            "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
            + "".join(
                f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n"
                for before, name in zip("abcdefgh", "bcdefghi", strict=True)
            ),
            "more than 2000000 values",
        ),
        ("keys: " + "[" * 5_000 + "]" * 5_000, "nested too deeply"),
        ("models:\n  - id: [", "not YAML in line 2"),
        ("models: []\nmodels: []", "models is there twice in line 2"),
        ("- models", "must be a mapping"),
        ("", "must be a mapping"),
    ],
)
def test_a_file_that_means_nothing_is_refused_in_one_line(
    text: str, says: str, tmp_path: Path
) -> None:
    file = tmp_path / "teams.yaml"
    file.write_text(text)
    with pytest.raises(StartError, match=says) as refused:
        files.load(str(file))
    assert "\n" not in str(refused.value)


def test_a_value_that_json_cannot_hold_is_refused_in_one_line() -> None:
    client = AdminClient("http://127.0.0.1:1", Secret("sk-x"))
    with pytest.raises(StartError, match="cannot be written as JSON"):
        client.call("POST", "apply", {"models": [{"id": "\ud800"}]})
