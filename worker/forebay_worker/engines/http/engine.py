"""HttpEngine: a model of another OpenAI-compatible server behind the Engine protocol.

It speaks text: the gateway sends what a client asked for, checked, and gets text back. Each answer
is a streamed call of its own, whatever the client wants, so that a cancel ends it and a hang is
seen. See docs/upstreams.md.
"""

import asyncio
import contextlib
import logging
import time
from contextlib import aclosing

from forebay_shared.asked import Chat
from forebay_shared.errors import ForebayError, UnsupportedError, UpstreamError
from forebay_shared.models import CAP_EMBED, ModelCard
from forebay_shared.settings import WorkerSettings
from forebay_shared.telemetry import UpstreamMetrics
from forebay_shared.wire import (
    Embedded,
    Encode,
    FinishReason,
    Submit,
    SubmitText,
    TextDelta,
    Usage,
)
from prometheus_client import CollectorRegistry

from forebay_worker.engines.http.bodies import body_of, embedding_body
from forebay_worker.engines.http.breaker import Replica
from forebay_worker.engines.http.card import find, key_of, urls_of
from forebay_worker.engines.http.chunks import Chunk
from forebay_worker.engines.http.upstream import Upstream
from forebay_worker.engines.http.vectors import normalised, vectors_of
from forebay_worker.engines.lives import Ending, Life
from forebay_worker.engines.tasks import TaskEngine

log = logging.getLogger(__name__)

PROBE_S = 3.0

_REASONS: dict[str, FinishReason] = {
    "length": "length",
    "max_tokens": "length",
    "model_length": "length",
}
_BROKEN = frozenset({"abort", "error"})
"""What some servers call it when an answer ends before it is over."""


class HttpEngine(TaskEngine):
    """Asks the upstream for its model when made. Raises StartError when it cannot be used."""

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__(settings)
        self._replicas = [Replica(url) for url in urls_of(settings)]
        self._key = key_of(settings)
        urls = [replica.url for replica in self._replicas]
        self._found = asyncio.run(find(settings, urls, self._key))
        self._upstream: Upstream | None = None

    @property
    def card(self) -> ModelCard:
        return self._found.card

    @property
    def available(self) -> bool:
        """Some replica answers."""
        return any(replica.up for replica in self._replicas)

    def measure(self, registry: CollectorRegistry, engine: str) -> None:
        registry.register(UpstreamMetrics(engine, self._replicas, time.monotonic))

    async def serve(self, stopping: asyncio.Event) -> None:
        """Holds the connections, and asks each replica now and then whether it is there."""
        self._upstream = upstream = Upstream(self._settings, self._replicas, self._key)
        try:
            self.ready()
            while not stopping.is_set():
                was = self.available
                await asyncio.gather(*map(upstream.probe, self._replicas))
                if was != self.available:
                    log.warning("the upstream is %s", "back" if self.available else "away")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PROBE_S):
                        await stopping.wait()
        finally:
            await self.emptied()
            await upstream.close()

    def submit(self, submit: Submit) -> None:
        self.refuse(submit, UnsupportedError("This engine takes text, not token ids."))

    def submit_text(self, submit: SubmitText) -> None:
        if CAP_EMBED in self.card.capabilities:
            self.refuse(submit, UnsupportedError("This model makes embeddings only."))
            return
        try:
            submit.sampling.validate(self.card.vocab_size)
        except ForebayError as error:
            self.refuse(submit, error)
            return
        self.open(submit, dict.fromkeys(submit.indexes, 0), self._tell)

    def encode(self, encode: Encode) -> None:
        if CAP_EMBED not in self.card.capabilities:
            self.refuse(encode, UnsupportedError("This model does not make embeddings."))
        elif not encode.texts or not all(encode.texts):
            self.refuse(encode, UnsupportedError("This engine takes text, not token ids."))
        else:
            self.open(encode, {0: 0}, self._embed)

    @property
    def _calls(self) -> Upstream:
        assert self._upstream is not None, "the engine has not been started"
        return self._upstream

    async def _tell(self, life: Life) -> Ending:
        """One answer: a streamed call."""
        submit = life.work
        assert isinstance(submit, SubmitText)
        path = "chat/completions" if isinstance(submit.asked, Chat) else "completions"
        body = body_of(submit, life.index, self._found.model, self._found.kind)
        told = _Told(life)
        async with aclosing(self._calls.stream(path, body, life.begin)) as stream:
            async for chunks in stream:
                told.take(chunks)
        return told.ending()

    async def _embed(self, life: Life) -> Embedded:
        encode = life.work
        assert isinstance(encode, Encode)
        body = embedding_body(encode.texts, self._found.model, encode.dimensions)
        timeout_s = self._settings.upstream_first_token_timeout_s
        answer = await self._calls.post("embeddings", body, timeout_s)
        vectors, tokens = await asyncio.to_thread(vectors_of, answer, len(encode.texts))
        if encode.normalize:
            vectors = [normalised(vector) for vector in vectors]
        usage = Usage(encode.num_tokens if tokens is None else tokens, estimated=tokens is None)
        return Embedded(*life.key, vectors, life.spent(usage))


class _Told:
    """What an upstream has told of one answer."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._usage: Usage | None = None
        self._reason: str | None = None
        self._ended = False
        life.usage = Usage(life.work.num_tokens, estimated=True)

    def take(self, chunks: list[Chunk]) -> None:
        life = self._life
        deltas: list[TextDelta] = []
        for chunk in chunks:
            self._reason = chunk.reason or self._reason
            self._ended |= chunk.ended
            self._usage = chunk.usage or self._usage
            if chunk.says:
                deltas.append(self._delta(chunk))
        life.usage = self._usage or Usage(
            life.work.num_tokens, completion_tokens=life.tokens, estimated=True
        )
        life.say(*deltas)

    def ending(self) -> Ending:
        """Raises UpstreamError when the stream ended before the answer did. Of an answer that has
        begun its end may be said without a reason."""
        reason = self._reason
        if reason is None and self._ended and self._life.tokens:
            reason = "stop"
        if reason is None or reason in _BROKEN:
            raise UpstreamError("The upstream broke off its answer.")
        return Ending(_REASONS.get(reason, "stop"), self._life.usage)

    def _delta(self, chunk: Chunk) -> TextDelta:
        life = self._life
        life.tokens += 1
        return TextDelta(
            *life.key,
            life.index,
            life.tokens - 1,
            chunk.content,
            chunk.reasoning,
            chunk.calls,
            chunk.logprobs,
            chunk.usage,
        )
