"""Responses in Redis: kept for a while, within a team's share, readable from any gateway.

Every step is one script and one round trip. A response that runs in the background has an owner,
who says again and again that it lives; when it falls silent, whoever looks next marks the response
as failed. It knows no HTTP and nothing of what responses hold, but for the fields that a change of
status changes.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple, cast

import msgspec
from forebay_shared import keys
from forebay_shared.bus import Publisher
from forebay_shared.errors import (
    InvalidRequestError,
    NotFoundError,
    PreviousResponseError,
    RateLimitError,
)
from forebay_shared.link import Argument, Value
from forebay_shared.scripts import Script
from forebay_shared.settings import GatewaySettings
from forebay_shared.telemetry import GatewayMetrics

from forebay_gateway.api.responses.shapes import ResponseError, Status

MAX_COUNT = 10_000
"""Responses of one team at once."""
SHARE = 4
"""One response may take this part of a team's bytes."""
MAX_DEPTH = 512
"""Responses behind one another by previous_response_id."""
MAX_CHAIN_BYTES = 16_777_216
BEAT_S = 1.0
SILENCE_S = 10.0
"""An owner that has been silent for so long is gone: a Redis that restarts is back before."""
MAX_EVENT_BYTES = 8_388_608
EVENTS_TTL_S = 7200
"""Events are for who lost a connection, not for good; a leap of Redis's clock by an hour leaves
them."""

_ID = re.compile("resp_[0-9a-f]{32}")
_LOST = ResponseError("server_error", "The gateway that ran this response has gone.")


class Stored(NamedTuple):
    """A stored response: its JSON as it is now, and the JSON of its input's items."""

    response: bytes
    input: bytes
    status: Status


class Link(NamedTuple):
    """One response of a conversation: the JSON of what it was given and of what it answered."""

    input: bytes
    response: bytes


class ResponseStore:
    """The responses of all teams. Every call may raise BusError."""

    def __init__(
        self, redis: Publisher, settings: GatewaySettings, telemetry: GatewayMetrics
    ) -> None:
        self._redis = redis
        self._script = Script("responses")
        self._ttl_ms = settings.response_ttl_s * 1000
        self._bytes = settings.response_store_bytes
        self._limit = settings.max_background_responses
        self._metrics = telemetry.responses

    @property
    def keeps(self) -> bool:
        """Whether this server keeps responses at all."""
        return self._ttl_ms > 0

    def check_size(self, input_: bytes) -> None:
        """Raises InvalidRequestError for an input that takes too much of a team's share."""
        most = self._bytes // SHARE
        if len(input_) > most:
            raise InvalidRequestError(
                f"input may take at most {most} bytes of a stored response; "
                "send less, or store: false.",
                param="input",
            )

    async def keep(
        self, team: str, id_: str, response: bytes, input_: bytes, status: Status, previous: str
    ) -> None:
        """Keeps a response that has ended; the team's oldest go where there is no room."""
        fields = (response, input_, status, previous)
        self._evicted(await self._run("keep", team, id_, *self._room(response, input_), *fields))

    async def begin(
        self, team: str, id_: str, response: bytes, input_: bytes, previous: str, owner: str
    ) -> None:
        """Keeps a response that its owner runs in the background.

        Raises RateLimitError when the team runs as many as it may.
        """
        fields = (response, input_, "queued", previous, owner, _ms(SILENCE_S), self._limit)
        evicted = await self._run("begin", team, id_, *self._room(response, input_), *fields)
        if evicted == -1:
            raise RateLimitError(
                f"At most {self._limit} responses may run in the background at once.",
                retry_after_s=5.0,
            )
        self._evicted(evicted)

    async def beat(self, team: str, id_: str, owner: str, status: Status) -> bool:
        """Says that a response still runs; False when it is to stop: cancelled, deleted, lost."""
        return await self._run("beat", team, id_, owner, status) == status.encode()

    async def settle(
        self, team: str, id_: str, response: bytes, status: Status, owner: str, size: int
    ) -> bool:
        """Ends a response that ran; False when somebody else has ended or deleted it.

        `size` is what it takes beside its own JSON, in bytes.
        """
        room = self._room(response, bytes(0), size)
        evicted = await self._run("settle", team, id_, *room, response, status, owner)
        self._evicted(evicted)
        return evicted != -1

    async def read(self, team: str, id_: str) -> Stored:
        """Raises NotFoundError when the team has no such response."""
        if not _ID.fullmatch(id_):
            raise _not_found()
        return _stored(await self._run("read", team, id_, _ms(SILENCE_S)))

    async def cancel(self, team: str, id_: str) -> Stored:
        """Cancels a response if it runs. Raises NotFoundError."""
        if not _ID.fullmatch(id_):
            raise _not_found()
        return _stored(await self._run("cancel", team, id_, _ms(SILENCE_S)))

    async def delete(self, team: str, id_: str) -> None:
        """Raises NotFoundError when the team has no such response."""
        if not _ID.fullmatch(id_) or not await self._run("delete", team, id_):
            raise _not_found()

    async def chain(self, team: str, id_: str) -> list[Link]:
        """The conversation that ends with a response, the oldest first.

        Raises PreviousResponseError when any of it is not there, InvalidRequestError when it is too
        long or not at its end.
        """
        if not _ID.fullmatch(id_):
            raise PreviousResponseError(_CHAIN["missing"], param="previous_response_id")
        limits = (_ms(SILENCE_S), MAX_DEPTH, MAX_CHAIN_BYTES)
        word, *found = cast("list[bytes]", await self._run("chain", team, id_, *limits))
        if word != b"ok":
            kind = (
                InvalidRequestError if word in (b"long", b"unfinished") else PreviousResponseError
            )
            raise kind(_CHAIN[word.decode()], param="previous_response_id")
        pairs = zip(found[1::2], found[::2], strict=True)
        return [Link(input_, response) for input_, response in pairs][::-1]

    async def add_events(self, team: str, id_: str, events: Sequence[bytes]) -> None:
        """Appends to the events of a response; the place of each is its sequence number."""
        key = keys.response_events(team, id_)
        added = self._redis.call("RPUSH", key, *events)
        await self._redis.call("PEXPIRE", key, min(self._ttl_ms, _ms(EVENTS_TTL_S)))
        await added

    async def events(self, team: str, id_: str, first: int, most: int) -> list[bytes]:
        """Up to `most` events from number `first` on; -1 and 1: the last one that is kept."""
        key = keys.response_events(team, id_)
        return cast("list[bytes]", await self._redis.call("LRANGE", key, first, first + most - 1))

    async def _run(self, step: str, team: str, id_: str, *arguments: Argument) -> Value:
        prefixes = keys.response(team, ""), keys.response_events(team, "")
        books = list(keys.responses(team))
        return await self._script.send(self._redis, books, [step, *prefixes, id_, *arguments])

    def _room(self, response: bytes, input_: bytes, more: int = 0) -> tuple[Argument, ...]:
        """What a response takes, and what there is."""
        return len(response) + len(input_) + more, self._ttl_ms, MAX_COUNT, self._bytes

    def _evicted(self, count: Value) -> None:
        if isinstance(count, int) and count > 0:
            self._metrics.evicted.inc(count)


_CHAIN = {
    "missing": "The response of previous_response_id is not found.",
    "broken": "A response before the one of previous_response_id is not stored any more.",
    "unfinished": "previous_response_id must name a response that is completed or incomplete.",
    "long": f"The conversation of previous_response_id is too long: at most {MAX_DEPTH} responses "
    f"of {MAX_CHAIN_BYTES} bytes in all.",
}


def _stored(value: Value) -> Stored:
    response, input_, status, lost = cast("list[bytes | None]", value)
    if response is None or input_ is None or status is None:
        raise _not_found()
    word = cast("Status", status.decode())
    return Stored(_as_now(response, word, lost=lost is not None), input_, word)


def _as_now(response: bytes, status: Status, *, lost: bool) -> bytes:
    """The JSON with the status that it has by now, where that came after it was written."""
    fields = msgspec.json.decode(response, type=dict[str, msgspec.Raw])
    word = msgspec.json.encode(status)
    if bytes(fields["status"]) == word:
        return response
    fields["status"] = msgspec.Raw(word)
    if lost:
        fields["error"] = msgspec.Raw(msgspec.json.encode(_LOST))
    return msgspec.json.encode(fields)


def _not_found() -> NotFoundError:
    return NotFoundError("There is no such response, or it is not stored any more.")


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
