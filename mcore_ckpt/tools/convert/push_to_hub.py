"""Pushes a folder that is complete on disk to a HuggingFace hub."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from mcore_ckpt.errors import CheckpointError, InvalidArgumentError


def can_push_to_hub() -> bool:
    """Returns True if huggingface_hub is installed. Call this first, because writing a model can take hours."""
    return importlib.util.find_spec("huggingface_hub") is not None


def check_has_no_model(repository: str) -> None:
    """Checks that a repository has no weights, because a push would replace them. Call this before writing a model.

    Does nothing if the hub does not answer: the push will fail with a message.

    Raises InvalidArgumentError: the repository has weights.
    """
    from huggingface_hub import HfApi

    try:
        files = HfApi().list_repo_files(repository)
    except Exception:  # the repository does not exist, or the hub does not answer (many types of errors)
        return
    weights = sorted(file for file in files if file.endswith((".safetensors", ".bin", ".pt", ".gguf")))
    if weights:
        raise InvalidArgumentError(
            f"--hf_upload_path {repository}: has a model already ({weights[0]}): name another repository, or replace "
            "its files with --force"
        )


def push_to_hub(folder: Path, repository: str, private: bool) -> None:
    """Pushes a model's folder to the `repository` "owner/name". A repository that does not exist is made.

    `private` is True to hide a new repository.

    Raises CheckpointError: the push failed. The folder is unchanged.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder)
    except Exception as error:  # huggingface_hub, its HTTP library and the system raise many types of errors
        raise CheckpointError(
            f"{folder} is complete, but could not be uploaded to {repository}: {type(error).__name__}: {error}. "
            "Push it again with huggingface_hub's `hf upload`"
        ) from None  # the URLs in the error can contain signatures, and a traceback would show them
