"""Packets: whatever bytes come, a reader gets what can be read; merging keeps every token in
order.
"""

import msgspec
from forebay_shared.merge import merge
from forebay_shared.packets import REPLY, ROSTER, WORK
from forebay_shared.sampling import SamplingParams
from forebay_shared.wire import (
    WIRE_VERSION,
    Accepted,
    Beacon,
    Cancel,
    Delta,
    Done,
    Embedded,
    Encode,
    Load,
    Reply,
    Started,
    Submit,
    TokenLogprobs,
    Usage,
)
from hypothesis import given
from hypothesis import strategies as st


def test_packets_come_back_as_they_were() -> None:
    work = [
        Submit(request_id="r", attempt=1, gateway="g", prompt=b"", sampling=SamplingParams()),
        Encode(request_id="e", attempt=1, gateway="g", inputs=(b"\1\0\0\0",), normalize=False),
        Cancel(request_id="r", attempt=1, index=0),
    ]
    assert WORK.decode(WORK.encode("g", [*work])) == (work, 0)
    answer = Embedded("e", 1, [b"\0\0\0\0"], Usage())
    assert REPLY.decode(REPLY.encode("w", [answer])) == ([answer], 0)
    beacon = Beacon(worker="w", card="c", load=Load(1, 2, 3))
    assert ROSTER.decode(ROSTER.encode("w", [beacon])) == ([beacon], 0)


def test_a_packet_of_a_newer_version_gives_what_is_known() -> None:
    known = Delta("r", 1, 0, 0, [1])
    foreign = [["zz", "r", 1], ["d", "r"], ["d", "r", 1, 0, 0, [1], None, "a later field"]]
    messages = [msgspec.to_builtins(known), *foreign]
    data = msgspec.msgpack.encode([WIRE_VERSION + 1, "w", messages, "a later field"])
    assert REPLY.decode(data) == ([known, known], 2)


@given(st.binary(max_size=200))
def test_random_bytes_are_counted_and_never_raise(data: bytes) -> None:
    messages, bad = REPLY.decode(data)
    assert messages == [] or bad >= 0


@given(st.binary(max_size=4), st.integers(0, 300))
def test_a_damaged_packet_never_raises(noise: bytes, place: int) -> None:
    data = bytearray(REPLY.encode("w", [Delta("r", 1, 0, 0, [1, 2]), Accepted("r", 1)]))
    data[place % len(data) : place % len(data) + len(noise)] = noise
    REPLY.decode(bytes(data))


@st.composite
def _replies(draw: st.DrawFn) -> list[Reply]:
    """Interleaved sequences of two requests, as a worker would send them."""
    queues: list[list[Reply]] = []
    for request, index in (("a", 0), ("a", 1), ("b", 0)):
        replies: list[Reply] = [Started(request, 1, index, 0, 0.0)]
        offset = 0
        for length in draw(st.lists(st.integers(0, 3), max_size=6)):
            with_logprobs = draw(st.booleans())
            logprobs = [TokenLogprobs(-1.0)] * length if with_logprobs else None
            replies.append(
                Delta(request, 1, index, offset, list(range(offset, offset + length)), logprobs)
            )
            offset += length
        replies.append(Done(request, 1, index, "length", None, Usage()))
        queues.append(replies)
    mixed: list[Reply] = []
    while queues:
        queue = draw(st.sampled_from(queues))
        mixed.append(queue.pop(0))
        queues = [queue for queue in queues if queue]
    return mixed


def _story(replies: list[Reply]) -> dict[tuple[str, int], list[object]]:
    """Per sequence, what a client would be told."""
    story: dict[tuple[str, int], list[object]] = {}
    for reply in replies:
        assert isinstance(reply, Started | Delta | Done)
        told = story.setdefault((reply.request_id, reply.index), [])
        if isinstance(reply, Delta):
            assert reply.offset == sum(isinstance(item, tuple) for item in told)
            assert reply.logprobs is None or len(reply.logprobs) == len(reply.token_ids)
            told.extend((token, reply.logprobs is None) for token in reply.token_ids)
        else:
            told.append(type(reply))
    return story


@given(_replies())
def test_merging_changes_no_sequence_and_no_input(replies: list[Reply]) -> None:
    before = msgspec.msgpack.encode(replies)
    merged = merge(replies)
    assert _story(merged) == _story(replies)
    assert merge(merged) == merged
    assert msgspec.msgpack.encode(replies) == before


def test_a_thousand_steps_that_waited_become_one_delta() -> None:
    merged = merge([Delta("r", 1, 0, place, [place]) for place in range(1000)])
    assert merged == [Delta("r", 1, 0, 0, list(range(1000)))]
