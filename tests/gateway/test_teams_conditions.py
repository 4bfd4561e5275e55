"""If-Match and If-None-Match: what they let through, with a mirror that may be behind."""

import pytest
from forebay_gateway.teams.conditions import NONE, conditions
from forebay_shared.errors import InvalidRequestError, PreconditionError


def test_without_headers_nothing_is_asked_for() -> None:
    assert NONE.expected(0) is None
    assert NONE.expected(7) is None
    NONE.must_match(7)
    assert not NONE.is_unchanged(7)


@pytest.mark.parametrize(
    ("match", "known", "expected"),
    [
        ("*", 7, None),
        ('"7"', 7, 7),
        ('"6", "7"', 7, 7),
        (' ,"6" ,\t, "7",', 7, 7),
        ('W/"7", "7"', 7, 7),
        ('"6","9"', 7, 9),  # what another gateway wrote a moment ago; Redis knows
        ('"6"', 7, 6),  # Redis refuses
        ('"5"', 0, 5),
    ],
)
def test_a_record_must_be_at_a_revision_that_is_named(
    match: str, known: int, expected: int | None
) -> None:
    assert conditions(match, None).expected(known) == expected


@pytest.mark.parametrize(
    ("match", "known"),
    [("*", 0), ('W/"7"', 7), ('"abc"', 7), ('"07"', 7), ('"0"', 0), ('""', 7), ('"\x80"', 7)],
)
def test_what_can_match_nothing_is_refused(match: str, known: int) -> None:
    with pytest.raises(PreconditionError):
        conditions(match, None).expected(known)


@pytest.mark.parametrize("known", [0, 7])
def test_a_new_record_is_new(known: int) -> None:
    assert conditions(None, "*").expected(known) == 0, "Redis refuses where there is one"


@pytest.mark.parametrize("none_match", ['"7"', 'W/"7"', '"1", "7"'])
def test_a_revision_that_must_not_be_is_refused(none_match: str) -> None:
    with pytest.raises(PreconditionError):
        conditions(None, none_match).expected(7)
    assert conditions(None, none_match).expected(8) is None
    with pytest.raises(PreconditionError):
        conditions('"7"', none_match).expected(8)


def test_nothing_is_there_and_not_there() -> None:
    with pytest.raises(PreconditionError):
        conditions('"7"', "*").expected(7)


@pytest.mark.parametrize(
    "value",
    ["", "7", "'7'", '"7', '7"', '"7" "8"', '*, "7"', "**", 'w/"7"', 'W / "7"', '"a b"', '"7";'],
)
@pytest.mark.parametrize("header", ["If-Match", "If-None-Match"])
def test_bad_syntax_is_refused_by_the_headers_name(header: str, value: str) -> None:
    given = (value, None) if header == "If-Match" else (None, value)
    with pytest.raises(InvalidRequestError, match=header) as caught:
        conditions(*given)
    assert caught.value.param == header


def test_a_long_header_is_read_in_time() -> None:
    with pytest.raises(InvalidRequestError):
        conditions('"1" , ,' * 10_000 + "x", None)
    assert conditions(", ".join(f'"{n}"' for n in range(1, 9_999)), None).expected(5) == 5
