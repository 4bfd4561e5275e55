"""The bench client's own SSE parser, against every way a server or a network may write a stream."""

import itertools

from forebay_gateway.bench.sse import SseParser
from hypothesis import given
from hypothesis import strategies as st

NEWLINES = ["\n", "\r\n", "\r"]
TEXT = st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), max_size=12)
NOISE = st.sampled_from(["", ": keep-alive", "event: message", "id: 7", "retry: 10", "data2: no"])


def parse(stream: bytes, cuts: list[int]) -> list[bytes]:
    parser = SseParser()
    edges = [0, *sorted(cuts), len(stream)]
    pieces = [stream[a:b] for a, b in itertools.pairwise(edges)]
    return [event for piece in pieces for event in parser.feed(piece)]


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """A stream with mixed line ends, comments and multi-line data, and the events that it holds."""
    stream, events = draw(st.sampled_from(["", "\ufeff"])), list[bytes]()
    for lines in draw(st.lists(st.lists(TEXT, min_size=1, max_size=3), max_size=4)):
        end = draw(st.sampled_from(NEWLINES))
        space = draw(st.sampled_from(["", " "])) if not any(s[:1] == " " for s in lines) else " "
        noise = draw(NOISE)
        stream += f"{noise}{end}" if noise else ""
        stream += "".join(f"data:{space}{line}{end}" for line in lines) + end
        events.append("\n".join(lines).encode())
    return stream.encode(), events


@given(streams(), st.data())
def test_any_cut_gives_the_same_events(
    case: tuple[bytes, list[bytes]], data: st.DataObject
) -> None:
    stream, events = case
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8))
    assert parse(stream, cuts) == events


def test_every_single_and_byte_by_byte_cut_gives_the_same_events() -> None:
    stream = (
        'data: {"한":"국😀"}\r\n\r\ndata:two\rdata: lines\r\r: note\n\ndata:[DONE]\n\n'.encode()
    )
    events = ['{"한":"국😀"}'.encode(), b"two\nlines", b"[DONE]"]
    for cut in range(len(stream) + 1):
        assert parse(stream, [cut]) == events, cut
    assert parse(stream, list(range(len(stream)))) == events


def test_an_event_that_the_end_cuts_off_is_none() -> None:
    assert parse(b"data: whole\n\ndata: half\n", []) == [b"whole"]


def test_only_the_first_space_after_the_colon_is_dropped() -> None:
    assert parse(b"data:  two\n\ndata:\n\ndata\n\n", []) == [b" two", b"", b""]
