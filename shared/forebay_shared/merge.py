"""Joins deltas of one sequence that adjoin, so that what waited together travels and is written
together.

It keeps the order within a sequence and knows nothing of who waits.
"""

from collections.abc import Sequence

from forebay_shared.wire import Delta, Reply


def merge(replies: Sequence[Reply]) -> list[Reply]:
    """The replies with every Delta joined to the one before it of the same attempt and index.

    The joined Delta stands where the first stood. Linear in the number of tokens; no input changes.
    """
    merged: list[Reply] = []
    places: dict[tuple[str, int, int], int] = {}
    joined: set[int] = set()
    for reply in replies:
        if type(reply) is not Delta:
            merged.append(reply)
            continue
        sequence = (reply.request_id, reply.attempt, reply.index)
        place = places.get(sequence)
        if place is not None:
            last = merged[place]
            assert type(last) is Delta
            if _adjoins(last, reply):
                if place not in joined:
                    joined.add(place)
                    last = merged[place] = _copy(last)
                last.token_ids.extend(reply.token_ids)
                if last.logprobs is not None and reply.logprobs is not None:
                    last.logprobs.extend(reply.logprobs)
                continue
        places[sequence] = len(merged)
        merged.append(reply)
    return merged


def _adjoins(last: Delta, reply: Delta) -> bool:
    return last.offset + len(last.token_ids) == reply.offset and (
        (last.logprobs is None) == (reply.logprobs is None)
    )


def _copy(delta: Delta) -> Delta:
    """A Delta whose lists nobody else holds."""
    return Delta(
        delta.request_id,
        delta.attempt,
        delta.index,
        delta.offset,
        list(delta.token_ids),
        None if delta.logprobs is None else list(delta.logprobs),
    )
