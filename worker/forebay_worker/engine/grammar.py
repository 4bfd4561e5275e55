"""Grammars: a client's constraint becomes a matcher, which says at each token what may follow.

Compiling happens on threads of its own, after a trial in a process that may die of it
(`grammar_check`), so a slow or hostile grammar delays no step. It knows no scheduler and no logits.
"""

import logging
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from queue import Empty, SimpleQueue

import msgspec
from forebay_shared.errors import EngineError, ForebayError, InvalidRequestError
from forebay_shared.sampling import Grammar
from forebay_shared.telemetry import GRAMMAR_OUTCOMES, GrammarOutcome
from llguidance import LLMatcher, LLTokenizer

from forebay_worker.engine.grammar_check import READY, Verdict, limits

_log = logging.getLogger(__name__)

COMPILERS = 2
CACHE_ENTRIES = 256
CACHE_BYTES = 64 << 20
# One of 10 properties (a source of 360 bytes) takes 44 KiB, one of 1,000 (30 kB) 205 KiB.
_BYTES_PER_ENTRY, _BYTES_PER_SOURCE_BYTE = 64 << 10, 8


@dataclass(slots=True, eq=False)
class Compiled:
    """A grammar's first state. Its copies share one lexer, which a failure spoils for all."""

    first: LLMatcher
    num_bytes: int
    spoiled: bool = False


class Matcher:
    """Where one sequence is in its grammar. After a failure it allows nothing and says why."""

    def __init__(self, compiled: Compiled, mask_bytes: int, field: str) -> None:
        self._compiled = compiled
        self._mask_bytes = mask_bytes
        self._field = field
        self._state = compiled.first.deep_copy()
        self._mask: bytes | None = None
        self.error: ForebayError | None = None

    @property
    def stopped(self) -> bool:
        """Whether the output is complete and nothing can follow."""
        return self.error is None and self._state.is_stopped()

    def advance(self, token_ids: Sequence[int]) -> None:
        """Takes what was sampled, or what had been before the sequence moved here."""
        self._mask = None
        self._state.consume_tokens(list(token_ids))
        self._check()

    def mask(self) -> bytes:
        """What may follow: bit t % 8 of byte t // 8 is set when token t may; computed once."""
        if self._mask is None:
            mask = self._state.compute_bitmask()
            self._check()
            self._mask = mask if self.error is None else bytes(self._mask_bytes)
        return self._mask

    def _check(self) -> None:
        if self.error is None and self._state.is_error():
            _log.warning("a grammar failed: %s", self._state.stop_reason())
            self._compiled.spoiled = True
            self.error = InvalidRequestError(
                "The grammar became too complex to follow.", param=self._field
            )


@dataclass(slots=True, eq=False)
class Preparation:
    """The matchers of one request in the making: those of `outputs`, ids emitted by index.

    In the end either `matchers` or `error` is there.
    """

    grammar: Grammar
    outputs: Mapping[int, Sequence[int]]
    matchers: dict[int, Matcher] = field(default_factory=dict[int, Matcher])
    error: ForebayError | None = None
    cancelled: bool = False


class Grammars:
    """Compiles against one vocabulary. `prepare` and `finished` are for one thread, the engine's.

    Raises ValueError when llguidance cannot read the tokenizer.
    """

    def __init__(self, tokenizer: bytes, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = LLTokenizer(
            tokenizer.decode(), n_vocab=vocab_size, eos_token=list(eos_token_ids)
        )
        self._mask_bytes = -(-vocab_size // 32) * 4
        self._cache = _Cache()
        self._asked: SimpleQueue[Preparation | None] = SimpleQueue()
        self._done: SimpleQueue[Preparation] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._counting = threading.Lock()
        self.waiting = 0
        """Requests whose grammar compiles or waits for that."""
        self.outcomes: dict[GrammarOutcome, int] = dict.fromkeys(GRAMMAR_OUTCOMES, 0)
        self.wake: Callable[[], None] = _nothing
        """Called from another thread when `finished` has something."""

    @property
    def cache_size(self) -> tuple[int, int]:
        """Entries and estimated bytes."""
        return len(self._cache), self._cache.num_bytes

    def prepare(self, preparation: Preparation) -> bool:
        """True when it is ready at once; else `finished` will have it."""
        compiled = self._cache.get(preparation.grammar)
        if compiled is not None and not any(preparation.outputs.values()):
            self._fill(preparation, compiled)
            return True
        if not self._threads:
            self._start()
        with self._counting:
            self.waiting += 1
        self._asked.put(preparation)
        return False

    def finished(self, timeout_s: float = 0) -> list[Preparation]:
        """What has become ready since the last call; waits for the first one at most so long."""
        ready: list[Preparation] = []
        try:
            if timeout_s > 0:
                ready.append(self._done.get(timeout=timeout_s))
            while True:
                ready.append(self._done.get_nowait())
        except Empty:
            return ready

    def close(self) -> None:
        """Ends the threads, each after what it is in."""
        for _ in self._threads:
            self._asked.put(None)
        self._threads = []

    def _start(self) -> None:
        self._threads = [
            threading.Thread(target=self._work, name=f"grammar-{number}", daemon=True)
            for number in range(COMPILERS)
        ]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        checker = _Checker()
        while (preparation := self._asked.get()) is not None:
            outcome = None if preparation.cancelled else self._prepare(preparation, checker)
            with self._counting:
                self.waiting -= 1
                if outcome is not None:
                    self.outcomes[outcome] += 1
            if outcome is not None:
                self._done.put(preparation)
                self.wake()
        checker.close()

    def _prepare(self, preparation: Preparation, checker: "_Checker") -> GrammarOutcome:
        try:
            self._fill(preparation, self._compile(preparation.grammar, checker))
        except ForebayError as error:
            preparation.error = error
            return "refused"
        except Exception:
            _log.exception("a grammar could not be compiled")
            preparation.error = EngineError("The engine could not compile the grammar.")
            return "failed"
        return "compiled"

    def _compile(self, grammar: Grammar, checker: "_Checker") -> Compiled:
        compiled = self._cache.get(grammar)
        if compiled is None:
            text = checker.check(grammar)
            first = LLMatcher(self._tokenizer, text, log_level=0, limits=limits())
            if first.is_error():
                raise _refusal(grammar)
            num_bytes = _BYTES_PER_ENTRY + _BYTES_PER_SOURCE_BYTE * len(text)
            compiled = Compiled(first, num_bytes)
            self._cache.put(grammar, compiled)
        return compiled

    def _fill(self, preparation: Preparation, compiled: Compiled) -> None:
        """A matcher for each sequence, moved past what it has emitted."""
        for index, output in preparation.outputs.items():
            matcher = Matcher(compiled, self._mask_bytes, preparation.grammar.field)
            if output:
                matcher.advance(output)
            if matcher.error is not None:
                raise matcher.error
            preparation.matchers[index] = matcher


class _Cache:
    """Compiled grammars by the hash of kind and source; the least recently used go first."""

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, Compiled] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, grammar: Grammar) -> Compiled | None:
        key = _key(grammar)
        with self._lock:
            compiled = self._entries.get(key)
            if compiled is None:
                return None
            if compiled.spoiled:
                self._drop(key)
                return None
            self._entries.move_to_end(key)
            return compiled

    def put(self, grammar: Grammar, compiled: Compiled) -> None:
        key = _key(grammar)
        with self._lock:
            if key in self._entries:
                self._drop(key)
            self._entries[key] = compiled
            self.num_bytes += compiled.num_bytes
            while len(self._entries) > CACHE_ENTRIES or self.num_bytes > CACHE_BYTES:
                self._drop(next(iter(self._entries)))

    def _drop(self, key: bytes) -> None:
        self.num_bytes -= self._entries.pop(key).num_bytes


class _Checker:
    """A process of `grammar_check`, started at need; for one thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, grammar: Grammar) -> str:
        """The grammar in llguidance's form. Raises InvalidRequestError for one that is broken or
        that the process died of, OSError when there is no process."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(grammar) + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line.endswith(b"\n"):
            self.close()
            raise _refusal(grammar)
        verdict = msgspec.json.decode(line, type=Verdict)
        if verdict.error:
            raise InvalidRequestError(verdict.error, param=grammar.field)
        return verdict.grammar

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "forebay_worker.engine.grammar_check"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a terminal is for the parent to act on
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != READY:
            self.close()
            raise OSError("the grammar check did not start")
        return self._process


def _key(grammar: Grammar) -> bytes:
    return sha256(f"{grammar.kind}\n{grammar.source}".encode()).digest()


def _refusal(grammar: Grammar) -> InvalidRequestError:
    return InvalidRequestError(
        "The grammar takes too long or too much memory to compile.", param=grammar.field
    )


def _nothing() -> None:
    pass
