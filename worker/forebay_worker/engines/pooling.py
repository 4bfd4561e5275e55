"""PoolingEngine: a model that makes vectors, behind the Engine protocol.

It puts model, core and loop together; what each does is theirs to know.
"""

import msgspec
from forebay_shared.errors import UnsupportedError
from forebay_shared.models import CAP_EMBED, EmbeddingCard
from forebay_shared.settings import StartError, WorkerSettings
from forebay_shared.wire import Encode, Submit

from forebay_worker.checkpoint import resolve
from forebay_worker.engine.ports import Recorder
from forebay_worker.engines.card import ModelFiles
from forebay_worker.engines.looped import LoopedEngine
from forebay_worker.pooling.core import EncodeCore
from forebay_worker.pooling.files import is_pooled, pooling_files
from forebay_worker.pooling.runner import BLOCK_SIZE, TorchVectors

__all__ = ["PoolingEngine", "is_pooled"]


class PoolingEngine(LoopedEngine[Encode]):
    """Loads the model when made. Raises StartError when it cannot be used as asked."""

    def __init__(self, settings: WorkerSettings) -> None:
        if settings.load_format == "dummy":
            raise StartError("--load-format dummy: there are no random weights for embeddings.")
        directory = resolve(settings.model)
        files, pooling = ModelFiles(directory, settings), pooling_files(directory)
        self._runner = TorchVectors(directory, pooling, settings)
        self._embedding = EmbeddingCard(
            size=self._runner.size,
            pooling=pooling.pooling,
            normalized=pooling.normalized,
            matryoshka=pooling.matryoshka or settings.matryoshka,
            sizes=pooling.sizes,
        )
        card, blobs = files.card(
            engine="native",
            revision=files.revision(f"{self._runner.dtype} {self._embedding}"),
            vocab_size=self._runner.vocab_size,
            max_model_len=self._runner.max_model_len,
            block_size=BLOCK_SIZE,
        )
        card = msgspec.structs.replace(
            card,
            capabilities=frozenset({CAP_EMBED}),
            generation_defaults={},
            embedding=self._embedding,
        )
        super().__init__(settings, card, blobs)

    def make_core(self, recorder: Recorder) -> EncodeCore:
        return EncodeCore(self._runner, self._embedding, self._settings, recorder)

    def submit(self, submit: Submit) -> None:
        """Refuses: this model generates nothing."""
        text = "This model makes embeddings; it does not generate text."
        self.refuse(submit, UnsupportedError(text))

    def encode(self, encode: Encode) -> None:
        self.take(encode)
