"""Which requests a worker has that have not ended, by the gateway that waits for them.

It says when the last sequence of a request has ended, and tells the trace of each. It knows neither
the engine nor the bus.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forebay_shared.wire import Done, Embedded, Encode, Failed, Task

if TYPE_CHECKING:
    from forebay_shared.tracing.spans import Tracing

RequestKey = tuple[str, int]
"""A request's id, and its attempt."""


@dataclass(slots=True)
class _Open:
    """A request that has not ended. `left`: sequences that have not; `traceparent`: where their
    spans belong, if they are traced; `model`: what the client calls what answers."""

    left: int
    traceparent: str
    model: str


class Opened:
    """One worker's. A gateway is in it only while it has an open request."""

    def __init__(self, tracing: "Tracing | None" = None) -> None:
        self._tracing = tracing
        self._by_gateway: dict[str, dict[RequestKey, _Open]] = {}

    def __len__(self) -> int:
        return sum(len(requests) for requests in self._by_gateway.values())

    def __contains__(self, gateway: str) -> bool:
        return gateway in self._by_gateway

    @property
    def gateways(self) -> list[str]:
        return list(self._by_gateway)

    def keys(self) -> list[tuple[str, RequestKey]]:
        """Every open request, each with its gateway."""
        return [(name, key) for name, requests in self._by_gateway.items() for key in requests]

    def add(self, work: Task, model: str) -> None:
        """Takes in a request, which the client knows as one of `model`."""
        traceparent = "" if isinstance(work, Encode) else work.traceparent
        requests = self._by_gateway.setdefault(work.gateway, {})
        key = (work.request_id, work.attempt)
        requests[key] = _Open(work.num_sequences, traceparent, model)

    def drop(self, gateway: str) -> list[RequestKey]:
        """Forgets all requests of a gateway, and says which they were."""
        return list(self._by_gateway.pop(gateway, ()))

    def ended(self, gateway: str, reply: Done | Failed | Embedded) -> None:
        """A sequence has ended, or all of the request; of one that is not open nothing is kept."""
        key = (reply.request_id, reply.attempt)
        requests = self._by_gateway.get(gateway, {})
        request = requests.get(key)
        if request is None:
            return
        if isinstance(reply, Done):
            self._trace(request, reply)
            request.left -= 1
            if request.left > 0:
                return
        del requests[key]
        if not requests:
            del self._by_gateway[gateway]

    def _trace(self, request: _Open, reply: Done) -> None:
        if self._tracing is not None and request.traceparent:
            self._tracing.sequence(
                request.traceparent, request.model, reply.usage, reply.finish_reason
            )
