"""Which of an engine's calls a task is, and what an engine does not do. It knows no reply."""

from forebay_shared.errors import UnsupportedError
from forebay_shared.models import CAP_RESUME, ModelCard
from forebay_shared.wire import Encode, Submit, SubmitText, Task

from forebay_worker.engines.base import Encoder, Engine, Teller

_LACKS: dict[type[Task], str] = {
    Encode: "make embeddings",
    SubmitText: "speak text",
    Submit: "have this adapter",
}


def hand(engine: Engine, work: Task) -> UnsupportedError | None:
    """Gives it to the engine; why not, where the engine does no such thing."""
    if isinstance(work, Submit) and _has(engine.card, work.adapter):
        engine.submit(work)
    elif isinstance(work, SubmitText) and isinstance(engine, Teller):
        engine.submit_text(work)
    elif isinstance(work, Encode) and isinstance(engine, Encoder):
        engine.encode(work)
    else:
        return UnsupportedError(f"This engine does not {_LACKS[type(work)]}.")
    return None


def movable(card: ModelCard, work: Task) -> bool:
    """Whether another worker of this card can go on with it."""
    return CAP_RESUME in card.capabilities if isinstance(work, Submit) else isinstance(work, Encode)


def answering(card: ModelCard, work: Task) -> str:
    """What the client calls what answers: the adapter, or the model."""
    return (isinstance(work, Submit) and work.adapter) or card.name


def _has(card: ModelCard, adapter: str) -> bool:
    return not adapter or any(each.name == adapter for each in card.adapters)
