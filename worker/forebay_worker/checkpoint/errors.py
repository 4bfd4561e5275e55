"""The one error of this package."""

from forebay_shared.settings import StartError


class CheckpointError(StartError):
    """A model cannot be used: one line that names what is wrong and what would be right."""
