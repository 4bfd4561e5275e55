"""PEFT's directories: what their files are called, and what tells two adapters apart."""

import hashlib
from pathlib import Path

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def adapter_revision(directory: Path) -> str:
    """A hash over all of both files: adapters of one shape may differ in little."""
    digest = hashlib.sha256((directory / CONFIG).read_bytes())
    with (directory / WEIGHTS).open("rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:32]
