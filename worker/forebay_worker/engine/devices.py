"""Which runner serves which device; a card's is imported only where there is a card."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from forebay_shared.settings import WorkerSettings

from forebay_worker.engine.adapters import NO_ADAPTERS
from forebay_worker.engine.runner import Runner
from forebay_worker.models.config import ModelError

if TYPE_CHECKING:
    from forebay_worker.engine.card_runner import CardRunner


def make_runner(
    checkpoint: Path, settings: WorkerSettings, adapters: Mapping[str, Path] = NO_ADAPTERS
) -> "Runner | CardRunner":
    """The runner that `--device` asks for; auto: a card's where there is one. It numbers the
    `adapters` in their order.

    Raises ModelError when there is none, or the model or an adapter does not fit.
    """
    has_card = torch.cuda.is_available()
    if settings.device == "cpu" or (settings.device == "auto" and not has_card):
        return Runner(checkpoint, settings, adapters)
    if not has_card:
        raise ModelError("--device cuda: torch finds no CUDA card on this machine.")
    try:
        from forebay_worker.engine.card_runner import CardRunner
    except ImportError as error:
        raise ModelError(f"--device cuda needs the package triton ({error}).") from error
    return CardRunner(checkpoint, settings, adapters=adapters)
