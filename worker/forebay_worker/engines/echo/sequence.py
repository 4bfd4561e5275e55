"""A sequence of the echo engine: what it is to give, how far it is, and its times."""

import math

from forebay_shared.wire import SequenceStart, Submit, Usage

from forebay_worker.engine.replies import Key
from forebay_worker.engines.echo.model import END


class Sequence:
    """One generation. `position` counts its output ids, those of earlier attempts included.

    What each token needs stands in fields of its own: a step of 256 sequences takes half as long
    so.
    """

    __slots__ = (
        "adapter", "alternatives", "arrived", "attempt", "cache_salt", "cached", "enders",
        "first_token", "gateway", "index", "last_token", "latest_start", "limit", "min_tokens",
        "position", "prompt", "request_id", "started",
    )  # fmt: skip

    def __init__(
        self,
        submit: Submit,
        start: SequenceStart,
        prompt: list[int],
        max_model_len: int,
        arrived: float,
    ) -> None:
        sampling = submit.sampling
        self.request_id = submit.request_id
        self.attempt = submit.attempt
        self.gateway = submit.gateway
        self.index = start.index
        self.adapter = submit.adapter
        self.cache_salt = submit.cache_salt
        self.cached = 0
        self.prompt = prompt
        self.position = len(start.emitted) // 4
        self.limit = min(sampling.max_tokens, max_model_len - len(prompt))
        self.min_tokens = sampling.min_tokens
        self.alternatives = sampling.logprobs
        self.enders = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self.enders |= {END}
        self.arrived = arrived
        self.latest_start = arrived + (submit.queue_timeout_ms / 1000 or math.inf)
        self.started = 0.0
        self.first_token = 0.0
        self.last_token = 0.0

    @property
    def key(self) -> Key:
        return self.request_id, self.attempt

    def usage(self, now: float) -> Usage:
        """What it cost so far."""
        started = self.started or now
        first = self.first_token or now
        return Usage(
            len(self.prompt), self.cached, self.position,
            (started - self.arrived) * 1000, (first - started) * 1000, (now - first) * 1000,
        )  # fmt: skip
