"""A deterministic engine without a model: it answers a prompt with the prompt's own ids, over and
over.

The token at output position p of sequence i is prompt[(p + i) mod length], a pure function of the
prompt, so a resumed sequence goes on exactly where it was. An end-of-sequence or stop id in the
prompt ends the answer, as it would a model's; before min_tokens a space stands in for it. With any
adapter, which is no more than a name here, it answers in capitals. The
system tests and the load tests of the gateway run on it: it batches every running sequence into
each step and makes well over 50,000 tokens/s.
"""

import time
from pathlib import Path

import msgspec
from forebay_shared.errors import UnsupportedError
from forebay_shared.models import (
    CAP_ADAPTERS,
    CAP_DIGESTS,
    CAP_EMBED,
    CAP_GENERATE,
    CAP_LOGPROBS,
    CAP_RESUME,
    CAP_RESUME_SAMPLED,
    Adapter,
    ModelCard,
    content_hash,
)
from forebay_shared.settings import WorkerSettings
from forebay_shared.wire import Encode, Load, Submit

from forebay_worker.engine.loop import EngineLoop
from forebay_worker.engines.adapters import adapter_paths, check_names
from forebay_worker.engines.base import CacheLog, Emit, Recorder
from forebay_worker.engines.card import template_text
from forebay_worker.engines.echo import vectors
from forebay_worker.engines.echo.core import EchoCore
from forebay_worker.engines.echo.model import CHAT_TEMPLATE, END, SPECIALS, tokenizer_json
from forebay_worker.engines.looped import LoopedEngine
from forebay_worker.pooling.core import EncodeCore

DEFAULT_MODEL_LEN = 32_768
BLOCK_SIZE = 16
_GENERATES = frozenset({CAP_GENERATE, CAP_LOGPROBS, CAP_RESUME, CAP_RESUME_SAMPLED})
_CAPABILITIES = {
    "auto": _GENERATES | {CAP_EMBED},
    "generate": _GENERATES,
    "pooling": frozenset({CAP_EMBED}),
}


class EchoEngine(LoopedEngine[Submit]):
    """Generates in one loop and makes vectors in another. `echo_delay_ms` is the time of a step;
    one that starts sequences takes the time of their prefill besides, what is cached left out."""

    def __init__(self, settings: WorkerSettings) -> None:
        contents = tokenizer_json(), _template(settings)
        tokenizer, template = map(content_hash, contents)
        card = _card(settings, tokenizer, template)
        super().__init__(settings, card, dict(zip((tokenizer, template), contents, strict=True)))
        self._cache_log = CacheLog() if settings.echo_cache_blocks else None
        self._vectors: EngineLoop[Encode] | None = None

    @property
    def cache_log(self) -> CacheLog | None:
        return self._cache_log

    @property
    def healthy(self) -> bool:
        return super().healthy and (self._vectors is None or self._vectors.healthy)

    def make_core(self, recorder: Recorder) -> EchoCore:
        return EchoCore(self._card, self._settings, recorder, self._cache_log)

    def start(self, emit: Emit, recorder: Recorder) -> None:
        super().start(emit, recorder)
        card = self._card
        if card.embedding is not None:
            delay_s = self._settings.echo_delay_ms / 1000
            runner = vectors.EchoVectors(card.vocab_size, card.max_model_len, delay_s)
            core = EncodeCore(runner, card.embedding, self._settings, recorder)
            self._vectors = EngineLoop(core, emit)
            self._vectors.start()

    def submit(self, submit: Submit) -> None:
        self.take(submit)

    def encode(self, encode: Encode) -> None:
        if self._vectors is not None:
            self._vectors.submit(encode)
        else:
            self.refuse(encode, UnsupportedError("This model does not make embeddings."))

    def cancel(self, request_id: str, attempt: int, index: int | None = None) -> None:
        super().cancel(request_id, attempt, index)
        if self._vectors is not None:
            self._vectors.cancel(request_id, attempt, index)

    def cancel_gateway(self, gateway: str) -> None:
        super().cancel_gateway(gateway)
        if self._vectors is not None:
            self._vectors.cancel_gateway(gateway)

    def load(self) -> Load:
        load = super().load()
        if self._vectors is None:
            return load
        other = self._vectors.load()
        return msgspec.structs.replace(
            load,
            running=load.running + other.running,
            waiting=load.waiting + other.waiting,
            waiting_tokens=load.waiting_tokens + other.waiting_tokens,
        )

    def stop(self, timeout_s: float) -> None:
        super().stop(timeout_s)
        if self._vectors is not None:
            self._vectors.stop(timeout_s)


def _template(settings: WorkerSettings) -> bytes:
    """Its own, or the given one: what that writes is what is answered, so that a script may play a
    model. Raises CheckpointError."""
    given = settings.chat_template
    return (template_text(Path(given)) if given else CHAT_TEMPLATE).encode()


def _card(settings: WorkerSettings, tokenizer: str, template: str) -> ModelCard:
    """The card; `tokenizer` and `template` are their content hashes."""
    paths = adapter_paths(settings)
    names = settings.served_model_name or (settings.model or "echo",)
    check_names(paths, names)
    able = {CAP_DIGESTS: settings.echo_cache_blocks > 0, CAP_ADAPTERS: bool(paths)}
    capabilities = _CAPABILITIES[settings.runner]
    if CAP_GENERATE in capabilities:
        capabilities |= {name for name, can in able.items() if can}
    return ModelCard(
        names=names,
        revision="echo-1",
        family="echo",
        engine="echo",
        tokenizer=tokenizer,
        vocab_size=256 + len(SPECIALS),
        max_model_len=settings.max_model_len or DEFAULT_MODEL_LEN,
        block_size=settings.block_size or BLOCK_SIZE,
        created=int(time.time()),
        eos_token_ids=(END,),
        chat_template=template,
        template_tokens={"eos_token": SPECIALS[0]},
        capabilities=capabilities,
        embedding=None if settings.runner == "generate" else vectors.CARD,
        adapters=tuple(
            Adapter(name, content_hash(str(path).encode())[:32], path.name)
            for name, path in paths.items()
        ),
    )
