"""Writes one response, whole or as typed events: an `answers.Writer`.

The last event holds the very object that a plain answer is, and that is stored. It knows no bus and
no HTTP.
"""

import time
from collections.abc import Mapping, Sequence

from forebay_shared.errors import ForebayError
from msgspec.structs import replace

from forebay_gateway.api.openai.logprobs import ChatLogprobs
from forebay_gateway.api.responses.composer import Composer, Events, encode
from forebay_gateway.api.responses.shapes import (
    IncompleteDetails,
    Response,
    Status,
    response_error,
    response_usage,
)
from forebay_gateway.api.responses.tools import Callee
from forebay_gateway.api.sse import COMMENT
from forebay_gateway.api.transcript import FinishReason, Update, Usage
from forebay_gateway.parts import Collected


class ResponseWriter:
    """`response` is the response as it is now: the events of its life hold copies of it. `callees`
    and `seals` are as the composer's."""

    running_usage = False

    def __init__(
        self,
        response: Response,
        logprobs: ChatLogprobs | None = None,
        callees: Mapping[str, Callee] = {},
        *,
        seals: bool = False,
    ) -> None:
        self.response = response
        self._composer = Composer(response.id, logprobs, callees, seals=seals)
        self._cut = False

    def sign_of_life(self, *, as_event: bool) -> bytes:
        """OpenAI's own sign has a type that its SDKs do not know; this one is known to all."""
        return self._lifecycle("in_progress") if as_event else COMMENT

    def opening(self, size: int, usage: Usage) -> bytes:
        return b"".join([*self.created(), *self.started()])

    def events(self, update: Update, usage: Usage | None) -> bytes:
        return b"".join(self.pushed(update))

    def collect(self, update: Update) -> None:
        self.pushed(update)

    def closing(self, usage: Usage) -> bytes:
        self.settle(usage)
        return b"".join(self.ended())

    def failure(self, error: ForebayError) -> bytes:
        self.fail(error)
        return b"".join(self.ended())

    def whole(
        self, answers: Sequence[Collected], reasons: Sequence[FinishReason], usage: Usage
    ) -> bytes:
        self.settle(usage)
        return encode(self.response)

    def created(self) -> Events:
        """The first event; for a response in the background also that it waits."""
        if self.response.status != "queued":
            return [self._lifecycle("created")]
        return [self._lifecycle("created"), self._lifecycle("queued")]

    def started(self) -> Events:
        self._become("in_progress")
        return [self._lifecycle("in_progress")]

    def pushed(self, update: Update) -> Events:
        if update.reason == "length":
            self._cut = True
        return self._composer.push(update)

    def settle(self, usage: Usage) -> None:
        """Makes the response what it is in the end. Doing it twice changes nothing."""
        if self.response.usage is not None:
            return
        self._become("incomplete" if self._cut else "completed")
        self.response = replace(
            self.response,
            output=self._composer.items,
            usage=response_usage(usage),
            completed_at=None if self._cut else int(time.time()),
            incomplete_details=IncompleteDetails() if self._cut else None,
        )

    def fail(self, error: ForebayError) -> None:
        """Makes it a failed response, with what it had to say until then."""
        self._become("failed")
        self.response = replace(
            self.response,
            output=self._composer.snapshot(),
            error=response_error(error),
            completed_at=None,
            incomplete_details=None,
        )

    def ended(self) -> Events:
        """The last event: completed, incomplete or failed."""
        return [self._lifecycle(self.response.status)]

    def _become(self, status: Status) -> None:
        self.response = replace(self.response, status=status)

    def _lifecycle(self, name: str) -> bytes:
        return self._composer.event(f"response.{name}", b'"response":%b' % encode(self.response))
