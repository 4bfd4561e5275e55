"""Rates: how fast an engine prefills and decodes, measured from its steps, for the router."""

_KEEP = 0.95
"""Share of the past that each step leaves: the last 20 steps or so count."""
_WARM_UP = 4
"""First steps of each kind, which compile and capture, are not counted."""
_MIN_PREFILL = 32
"""Prompt tokens that make a step one of prefill; a few among decodes say nothing of the rate."""


class _Rate:
    __slots__ = ("_seconds", "_steps", "_tokens")

    def __init__(self) -> None:
        self._steps = 0
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self._steps += 1
        if self._steps > _WARM_UP:
            self._tokens = self._tokens * _KEEP + tokens
            self._seconds = self._seconds * _KEEP + seconds

    @property
    def value(self) -> float:
        return self._tokens / self._seconds if self._seconds > 0 else 0.0


class Rates:
    """Tokens per second of recent steps; 0 until known."""

    __slots__ = ("_decode", "_prefill")

    def __init__(self) -> None:
        self._prefill = _Rate()
        self._decode = _Rate()

    def step(self, *, prefilled: int, decoded: int, seconds: float) -> None:
        """Counts one step: prompt tokens and generated tokens, and the time of both."""
        if prefilled >= _MIN_PREFILL:
            self._prefill.add(prefilled, seconds)
        elif decoded and not prefilled:
            self._decode.add(decoded, seconds)

    @property
    def prefill(self) -> float:
        return self._prefill.value

    @property
    def decode(self) -> float:
        return self._decode.value
