"""What a caller says that a record must be like: If-Match and If-None-Match of RFC 9110.

A record's tag is its revision. Pure: it knows no HTTP but the form of the two headers.
"""

import re
from typing import NamedTuple

from forebay_shared.errors import InvalidRequestError, PreconditionError

# A tag is printable ASCII or any byte of 0x80 on, without quotes; lists may have empty places.
_TAG = r'(?:W/)?"[\x21\x23-\x7e\x80-\xff]*"'
_LIST = re.compile(rf"[ \t,]*{_TAG}(?:[ \t]*,[ \t,]*{_TAG})*[ \t,]*")
_EACH = re.compile(r'(W/)?"([^"]*)"')
_REVISION = re.compile(r"[1-9]\d{0,17}")


class Tags(NamedTuple):
    """One of the headers. `any`: it was `*`; else the revisions that it names."""

    any: bool = False
    revisions: frozenset[int] = frozenset()


class Conditions(NamedTuple):
    """Both headers; None: not sent."""

    match: Tags | None = None
    none_match: Tags | None = None

    def expected(self, known: int) -> int | None:
        """The revision that a record must have when it is changed (0: it must not exist); None:
        nothing is asked for. `known` is what its mirror has, which may be behind.

        Raises PreconditionError where no revision would do.
        """
        expected: int | None = None
        if self.match is not None:
            if self.match.any:
                if not known:
                    raise PreconditionError("If-Match: * asks for what exists; this does not.")
            elif known in self.match.revisions:
                expected = known
            else:  # another gateway's change may be on its way: the newest is the one to be
                expected = max(self.match.revisions, default=0)
                if not expected:
                    raise PreconditionError("No tag of If-Match is this record's.")
        if self.none_match is not None:
            if self.none_match.any:
                if expected:
                    raise PreconditionError("If-Match and If-None-Match cannot both hold.")
                return 0
            if (known if expected is None else expected) in self.none_match.revisions:
                raise PreconditionError("If-None-Match names the record as it is.")
        return expected

    def must_match(self, known: int) -> None:
        """Raises PreconditionError where a reader's If-Match does not hold."""
        match = self.match
        if match is not None and not (match.any or known in match.revisions):
            raise PreconditionError("No tag of If-Match is this record's.")

    def is_unchanged(self, known: int) -> bool:
        """Whether a reader has this revision already."""
        tags = self.none_match
        return tags is not None and (tags.any or known in tags.revisions)


NONE = Conditions()


def conditions(match: str | None, none_match: str | None) -> Conditions:
    """Of the headers' values. Raises InvalidRequestError, with the header's name."""
    return Conditions(
        # Strong comparison: a weak tag is never a match. For If-None-Match both forms are one.
        None if match is None else _tags("If-Match", match, weak=False),
        None if none_match is None else _tags("If-None-Match", none_match, weak=True),
    )


def _tags(header: str, value: str, *, weak: bool) -> Tags:
    value = value.strip(" \t")
    if value == "*":
        return Tags(any=True)
    if not _LIST.fullmatch(value):
        raise InvalidRequestError(f'{header} must be * or tags such as "12", "13".', param=header)
    named = [tag for is_weak, tag in _EACH.findall(value) if weak or not is_weak]
    return Tags(revisions=frozenset(int(tag) for tag in named if _REVISION.fullmatch(tag)))
