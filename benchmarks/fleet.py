"""A simulated fleet for router.py: workers that prefill, decode and cache by a cost model, and
gateways that see them only through digests and reports that arrive late. Time is simulated; no
clock is read, so a run gives the same figures each time.

The cost model is an H200 with an 8B model in bfloat16 (rates measured for LOG.md and the engine's
benchmarks): a step takes 3.8 ms for the weights, 0.02 ms for each decoding sequence, 34 ns for each
token of their contexts, and 1/43,000 s for each prefilled token, at most 8,192 of them; the cache
holds 740,000 tokens. Blocks enter it when a sequence is admitted, as the engine promises blocks
that are being computed; sequences are admitted in order of arrival, with room for their output.
"""

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

STEP_S = 0.0038
STEP_PER_SEQUENCE_S = 0.00002
STEP_PER_CONTEXT_TOKEN_S = 34e-9
PREFILL_RATE = 43_000.0
DECODE_RATE = 13_000.0
TOKEN_BUDGET = 8_192
MAX_SEQS = 256
CACHE_TOKENS = 740_000


@dataclass(slots=True, eq=False)
class Request:
    """`chain` are the hashes of the prompt's full blocks."""

    at: float
    prompt: int
    output: int
    chain: list[int]
    cached: int = 0
    queued: int = 0
    ttft_s: float = -1.0
    done_s: float = -1.0


class Clock:
    """Events in order of time, then of their making."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()

    def at(self, time: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._serial), call))

    def run(self) -> None:
        while self._events:
            self.now, _, call = heapq.heappop(self._events)
            call()


class Cache:
    """Blocks by hash, referenced or idle; idle ones go least recently used first."""

    def __init__(self, blocks: int, changed: Callable[[int, bool], None]) -> None:
        self.blank = blocks
        self._refs: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._changed = changed

    def __len__(self) -> int:
        return len(self._refs)

    def match(self, chain: list[int]) -> int:
        count = 0
        for key in chain:
            if key not in self._refs:
                break
            count += 1
        return count

    def admit(self, chain: list[int], hits: int, private: int) -> bool:
        """References a whole chain, of which `hits` are there, and takes private blocks."""
        need = len(chain) - hits + private
        idle_hits = sum(self._refs[key] == 0 for key in chain[:hits])
        if need + idle_hits > self.blank + len(self._idle):
            return False
        for key in chain[:hits]:
            if self._refs[key] == 0:
                del self._idle[key]
            self._refs[key] += 1
        while self.blank < need:
            key, _ = self._idle.popitem(last=False)
            del self._refs[key]
            self._changed(key, False)
            self.blank += 1
        self.blank -= need
        for key in chain[hits:]:
            if key in self._refs:  # its parent had gone before it
                self.blank += 1
                if self._refs[key] == 0:
                    del self._idle[key]
                self._refs[key] += 1
            else:
                self._refs[key] = 1
                self._changed(key, True)
        return True

    def release(self, chain: list[int], private: int) -> None:
        self.blank += private
        for key in reversed(chain):
            self._refs[key] -= 1
            if self._refs[key] == 0:
                self._idle[key] = None


@dataclass(slots=True, eq=False)
class _Running:
    request: Request
    left: int
    """Prompt tokens to prefill."""
    private: int


@dataclass
class Report:
    """What a worker says: its load, and the blocks stored and evicted since the last report."""

    running: int
    waiting: int
    waiting_tokens: int
    stored: list[int] = field(default_factory=list[int])
    evicted: list[int] = field(default_factory=list[int])


class SimWorker:
    """One simulated engine. `speed` scales its rates."""

    def __init__(self, number: int, clock: Clock, block_size: int, speed: float = 1.0) -> None:
        self.number = number
        self.block_size = block_size
        self.speed = speed
        self.busy_s = 0.0
        self.prefilled = 0
        self.coming: list[Request] = []
        self.finished: Callable[[Request], None] = lambda request: None
        self.cache = Cache(CACHE_TOKENS // block_size, self._change)
        self._clock = clock
        self._changes: dict[int, bool] = {}
        self._waiting: deque[Request] = deque()
        self._prefilling: deque[_Running] = deque()
        self._decoding: list[tuple[int, int, _Running]] = []
        self._serial = itertools.count()
        self._steps = 0
        self._context = 0
        self._stepping = False

    def _change(self, key: int, stored: bool) -> None:
        self._changes[key] = stored

    def submit(self, request: Request) -> None:
        self.coming.remove(request)
        request.queued = request.prompt - self.will_match(request.chain) * self.block_size
        self._waiting.append(request)
        if not self._stepping:
            self._step()

    @property
    def tokens_to_prefill(self) -> int:
        """Of those that wait, what was not in the cache when they came."""
        coming = sum(one.prompt for one in self.coming)
        waiting = sum(one.queued for one in self._waiting)
        return coming + waiting + sum(one.left for one in self._prefilling)

    def will_match(self, chain: list[int]) -> int:
        """Blocks in the cache once those that wait have been served."""
        best = self.cache.match(chain)
        for other in (*self._waiting, *self.coming):
            if other.chain[:1] == chain[:1]:
                pairs = zip(other.chain, chain, strict=False)
                same = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
                best = max(best, min(len(other.chain), len(chain)) if same is None else same)
        return best

    @property
    def num_running(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def report(self) -> Report:
        """Takes the changes since the last report."""
        changes, self._changes = self._changes, {}
        return Report(
            self.num_running,
            self.num_waiting,
            self.tokens_to_prefill - sum(one.prompt for one in self.coming),
            [key for key, stored in changes.items() if stored],
            [key for key, stored in changes.items() if not stored],
        )

    def _step(self) -> None:
        budget = TOKEN_BUDGET - len(self._decoding)
        parts: list[tuple[_Running, int]] = []
        at = 0
        while budget > 0:
            if at == len(self._prefilling) and not self._admit():
                break
            running = self._prefilling[at]
            part = min(running.left, budget)
            parts.append((running, part))
            budget -= part
            at += 1
        tokens = sum(part for _, part in parts)
        if not tokens and not self._decoding:
            self._stepping = False
            return
        self._stepping = True
        seconds = (
            STEP_S
            + STEP_PER_SEQUENCE_S * len(self._decoding)
            + STEP_PER_CONTEXT_TOKEN_S * self._context
            + tokens / PREFILL_RATE
        ) / self.speed
        self.busy_s += seconds
        self.prefilled += tokens
        self._clock.at(self._clock.now + seconds, lambda: self._end_step(parts))

    def _admit(self) -> bool:
        if not self._waiting or self.num_running >= MAX_SEQS:
            return False
        request = self._waiting[0]
        hits = self.cache.match(request.chain)
        total = -(-(request.prompt + request.output) // self.block_size)
        private = total - len(request.chain)
        if not self.cache.admit(request.chain, hits, private):
            return False
        self._waiting.popleft()
        request.cached = hits * self.block_size
        self._prefilling.append(_Running(request, request.prompt - request.cached, private))
        return True

    def _end_step(self, parts: list[tuple[_Running, int]]) -> None:
        self._steps += 1
        self._context += len(self._decoding)
        while self._decoding and self._decoding[0][0] <= self._steps:
            self._finish(heapq.heappop(self._decoding)[2])
        for running, part in parts:
            running.left -= part
            if running.left == 0:
                self._prefilling.remove(running)
                request = running.request
                request.ttft_s = self._clock.now - request.at
                end = self._steps + max(0, request.output - 1)
                heapq.heappush(self._decoding, (end, next(self._serial), running))
                self._context += request.prompt
        self._step()

    def _finish(self, running: _Running) -> None:
        request = running.request
        self._context -= request.prompt + max(0, request.output - 1)
        self.cache.release(request.chain, running.private)
        request.done_s = self._clock.now
        self.finished(request)
