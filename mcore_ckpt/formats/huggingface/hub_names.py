"""Reads the names of models on the HuggingFace hub. `hub.py` finds their folders."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from mcore_ckpt.errors import InvalidArgumentError

# "./owner/name", "owner/name/" and "name" are paths.
_NAME = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@([^@\s]+))?", re.ASCII)


@dataclass(frozen=True)
class HubModel:
    """A model on the HuggingFace hub.

    Attributes:
        repository: "owner/name".
        revision: a branch, a tag or a commit; None for the main branch.
    """

    repository: str
    revision: str | None = None

    @staticmethod
    def parse(name: str | os.PathLike[str]) -> HubModel | None:
        """Returns the model that a name stands for, without looking for a folder; None if the name can only be a path.

        Example:
            >>> HubModel.parse("Qwen/Qwen3-0.6B@main"), HubModel.parse("./Qwen/Qwen3-0.6B")
            (HubModel(repository='Qwen/Qwen3-0.6B', revision='main'), None)
        """
        match = _NAME.fullmatch(os.fspath(name))
        return None if match is None else HubModel(*match.groups())

    @staticmethod
    def find(name: str | os.PathLike[str]) -> HubModel | None:
        """Returns the model that a name stands for; None if a folder has this name, or the name can only be a path."""
        return None if os.path.exists(name) else HubModel.parse(name)

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"


def with_revision(name: str | os.PathLike[str], revision: str | None) -> str:
    """Adds a revision to a name. Returns the name unchanged if the revision is None.

    Raises:
        InvalidArgumentError: there is a folder of this name, the hub cannot have such a name, or the name already has a
            revision.

    Example:
        >>> with_revision("Qwen/Qwen3-0.6B", "main")
        'Qwen/Qwen3-0.6B@main'
    """
    name = os.fspath(name)
    if revision is None:
        return name
    model = HubModel.find(name)
    if model is None or model.revision is not None:
        why = "is not the name of a model on the hub" if model is None else "names a revision already"
        raise InvalidArgumentError(f"revision {revision!r}: {name} {why}: leave out the revision")
    return f"{name}@{revision}"
