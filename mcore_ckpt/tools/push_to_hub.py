"""Pushes a folder that is complete on disk to a HuggingFace hub."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from mcore_ckpt.errors import CheckpointError


def can_push_to_hub() -> bool:
    """True if huggingface_hub is installed. Call this before writing a model, which can take hours."""
    return importlib.util.find_spec("huggingface_hub") is not None


def push_to_hub(folder: Path, repository: str, private: bool) -> None:
    """Pushes a model's folder. Makes the repository if it does not exist.

    Args:
        folder: the model's folder.
        repository: "owner/name" on the hub.
        private: True to make a new repository private; an existing one stays as it is.

    Raises:
        CheckpointError: the push failed. The folder is unchanged.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder)
    except Exception as error:  # huggingface_hub, its HTTP library and the system raise many types
        raise CheckpointError(
            f"{folder} is complete, but could not be uploaded to {repository}: {type(error).__name__}: {error}. "
            "Push it again with huggingface_hub's `hf upload`"
        ) from error
