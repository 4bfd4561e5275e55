"""A hub id -> the snapshot in huggingface_hub's own cache, only the files that serving needs.

Knows huggingface_hub; does not know what the files hold.
"""

from pathlib import Path

from forebay_worker.checkpoint.errors import CheckpointError

NEEDED = [
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "modules.json",
    "sentence_bert_config.json",
    "*/config.json",  # of the modules that pool
]


def download(model: str, *, progress: bool = True) -> Path:
    """The snapshot of `org/name` or `org/name@revision`; what is there is not fetched again.

    Without a network the snapshot of an earlier run serves. Raises CheckpointError in one line.
    """
    import huggingface_hub
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    from huggingface_hub.utils import disable_progress_bars

    if not progress:
        disable_progress_bars()
    repo, _, revision = model.partition("@")
    try:
        return Path(
            huggingface_hub.snapshot_download(
                repo, revision=revision or None, allow_patterns=NEEDED
            )
        )
    except GatedRepoError:
        raise CheckpointError(
            f"model {repo} is gated: accept its terms on the hub and set HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise CheckpointError(f"model {repo} has no revision {revision!r} on the hub") from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"model {repo} is not on the hub, or is private: check the name, or set HF_TOKEN"
        ) from None
    except LocalEntryNotFoundError:
        raise CheckpointError(
            f"model {repo} is not in the cache and the hub cannot be reached: "
            "connect, or give a local directory or .gguf file"
        ) from None
    except Exception as error:  # its HTTP client's errors have no common base
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"model {repo} cannot be downloaded: {reason}") from error
