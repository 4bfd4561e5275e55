"""PoolingEngine: a model that makes vectors, behind the Engine protocol.

It puts model, core and loop together; what each does is theirs to know.
"""

import msgspec
from forebay_shared.errors import UnsupportedError
from forebay_shared.models import CAP_EMBED, EmbeddingCard, ModelCard
from forebay_shared.settings import StartError, WorkerSettings
from forebay_shared.wire import Encode, Failed, Load, Submit

from forebay_worker.checkpoint import resolve
from forebay_worker.engine.loop import EngineLoop
from forebay_worker.engine.ports import Emit, Recorder
from forebay_worker.engines.card import ModelFiles
from forebay_worker.pooling.core import EncodeCore
from forebay_worker.pooling.files import is_pooled, pooling_files
from forebay_worker.pooling.runner import BLOCK_SIZE, TorchVectors

__all__ = ["PoolingEngine", "is_pooled"]


class PoolingEngine:
    """Loads the model when made. Raises StartError when it cannot be used as asked."""

    def __init__(self, settings: WorkerSettings) -> None:
        if settings.load_format == "dummy":
            raise StartError("--load-format dummy: there are no random weights for embeddings.")
        directory = resolve(settings.model)
        files, pooling = ModelFiles(directory, settings), pooling_files(directory)
        self._settings = settings
        self._runner = TorchVectors(directory, pooling, settings)
        self._embedding = EmbeddingCard(
            size=self._runner.size,
            pooling=pooling.pooling,
            normalized=pooling.normalized,
            matryoshka=pooling.matryoshka or settings.matryoshka,
            sizes=pooling.sizes,
        )
        card, self._blobs = files.card(
            engine="native",
            revision=files.revision(f"{self._runner.dtype} {self._embedding}"),
            vocab_size=self._runner.vocab_size,
            max_model_len=self._runner.max_model_len,
            block_size=BLOCK_SIZE,
        )
        self._card = msgspec.structs.replace(
            card,
            capabilities=frozenset({CAP_EMBED}),
            generation_defaults={},
            embedding=self._embedding,
        )
        self._emit: Emit | None = None
        self._loop: EngineLoop[Encode] | None = None

    @property
    def card(self) -> ModelCard:
        return self._card

    @property
    def blobs(self) -> dict[str, bytes]:
        return self._blobs

    @property
    def cache_log(self) -> None:
        """It keeps nothing of an input."""
        return

    @property
    def healthy(self) -> bool:
        """False once the engine's thread has given up; the process should end then."""
        return self._loop is None or self._loop.healthy

    def core(self, recorder: Recorder) -> EncodeCore:
        """A core over the loaded model."""
        return EncodeCore(self._runner, self._embedding, self._settings, recorder)

    def start(self, emit: Emit, recorder: Recorder) -> None:
        self._emit = emit
        self._loop = EngineLoop(
            self.core(recorder), emit, check=self._settings.log_level == "debug"
        )
        self._loop.start()

    def submit(self, submit: Submit) -> None:
        """Refuses: this model generates nothing."""
        assert self._emit is not None, "the engine has not been started"
        error = UnsupportedError("This model makes embeddings; it does not generate text.")
        failed = Failed(submit.request_id, submit.attempt, error.code, error.message)
        self._emit([(submit.gateway, failed)])

    def encode(self, encode: Encode) -> None:
        self._running.submit(encode)

    def cancel(self, request_id: str, attempt: int, index: int | None = None) -> None:
        self._running.cancel(request_id, attempt, index)

    def cancel_gateway(self, gateway: str) -> None:
        self._running.cancel_gateway(gateway)

    def load(self) -> Load:
        return Load() if self._loop is None else self._loop.load()

    def stop(self, timeout_s: float) -> None:
        if self._loop is not None:
            self._loop.stop(timeout_s)

    @property
    def _running(self) -> EngineLoop[Encode]:
        assert self._loop is not None, "the engine has not been started"
        return self._loop
