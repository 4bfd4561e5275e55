"""Where a model comes from: any name that a person may give, made a Hugging Face directory.

`resolve` is the way in. It knows files and formats; it does not know the engine, and imports torch
only while it converts.
"""

from forebay_worker.checkpoint.errors import CheckpointError
from forebay_worker.checkpoint.resolve import public_name, resolve

__all__ = ["CheckpointError", "public_name", "resolve"]
