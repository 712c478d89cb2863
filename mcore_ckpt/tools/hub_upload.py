"""A folder that is written, brought to a HuggingFace hub."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from mcore_ckpt.errors import CheckpointError


def can_push_to_hub() -> bool:
    """Whether huggingface_hub is installed: to be asked before hours of writing."""
    return importlib.util.find_spec("huggingface_hub") is not None


def push_to_hub(folder: Path, repository: str, private: bool) -> None:
    """UploadQueue a model's folder; the repository is made if it is not there.

    Raises:
        CheckpointError: it did not arrive. The folder is as it was.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder)
    except Exception as error:  # of huggingface_hub, of its HTTP library, of the system
        raise CheckpointError(
            f"{folder} is complete, but could not be uploaded to {repository}: {type(error).__name__}: {error}"
        ) from error
