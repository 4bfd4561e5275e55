"""The gateway's picture of the workers: who lives, how loaded, which models they serve."""

from forebay_shared.models import ModelCard


class Roster:
    """Live workers and the cards of the models that they serve."""

    @property
    def ready(self) -> bool:
        """A live worker that takes requests exists."""
        raise NotImplementedError

    def cards(self) -> list[ModelCard]:
        """One card per served model, by main name; models whose workers are away for minutes are
        gone.
        """
        raise NotImplementedError

    def find(self, name: str) -> ModelCard:
        """The card that serves `name` (any of its names).

        Raises:
            NoWorkerError: no worker has ever been seen.
            ModelNotFoundError: workers are known, but none serves this name.
        """
        raise NotImplementedError
