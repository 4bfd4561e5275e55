"""Conversations in the orders of roles that some chat templates insist on. It knows no dialect.

Agents put system messages into the middle, hosts several in front, and people write twice before
they are answered; a template may refuse each of these. What it refuses is said in another order,
the least different first. Nothing moves to the front of what was said before: the prompt of an
earlier turn stays the beginning of a later one's, and so stays in the cache.
"""

from collections.abc import Iterator, Sequence

from forebay_shared.template import Json

Message = dict[str, Json]

BREAK = "\n\n"
"""What stands between messages that become one."""


def orders(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """The conversation as it is, then those of its other orders that differ, one by one."""
    said = list(messages)
    yield said
    for change in (_one_system, _alternating, _without_system):
        changed = change(said)
        if changed != said:
            said = changed
            yield said


def _one_system(messages: Sequence[Message]) -> list[Message]:
    """Those in front as one; a later one is the user's, at its place."""
    front = 0
    while front < len(messages) and messages[front]["role"] == "system":
        front += 1
    rest = [_as_user(each) for each in messages[front:]]
    return [*_joined(messages[:front]), *rest]


def _alternating(messages: Sequence[Message]) -> list[Message]:
    return _joined(messages)


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """The user says it all, and says something before the assistant does."""
    said = [_as_user(each) for each in messages]
    if said and said[0]["role"] == "assistant":
        said.insert(0, {"role": "user", "content": ""})
    return _joined(said)


def _as_user(message: Message) -> Message:
    return message | {"role": "user"} if message["role"] == "system" else message


def _joined(messages: Sequence[Message]) -> list[Message]:
    """Neighbours of one role as one message; calls and their results stay by themselves."""
    joined: list[Message] = []
    for message in messages:
        if joined and _is_one_turn(joined[-1], message):
            joined[-1] = _both(joined[-1], message)
        else:
            joined.append(message)
    return joined


def _is_one_turn(first: Message, then: Message) -> bool:
    return first["role"] == then["role"] != "tool" and "tool_calls" not in first


def _both(first: Message, then: Message) -> Message:
    """The name is the first one's, the calls are those of the last."""
    both = then | first
    for field, between in (("content", BREAK), ("reasoning_content", BREAK)):
        texts = [text for each in (first, then) if (text := each.get(field))]
        if texts or field in both:
            both[field] = between.join(map(str, texts))
    return both
