"""Finds the root and the step that a path of verl's trainers belongs to."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.checkpoint import parse_step, step_root


@dataclass(frozen=True)
class Place:
    """The root and the step that one `local_path` belongs to.

    Attributes:
        folder: the folder that the path names.
        root: the folder of all steps and of the tracker. PPO saves to `<root>/global_step_{N}/actor`, SFT to
            `<root>/global_step_{N}` itself.
        step_path: the step's folder; None if the path is not in a step.
    """

    folder: Path
    root: Path
    step_path: Path | None

    @staticmethod
    def of(local_path: str | os.PathLike[str], role: str) -> Place:
        """Returns the root and the step to which a path of this role belongs."""
        folder = Path(os.path.abspath(local_path))
        step_path = folder if parse_step(folder.name) is not None else folder.parent
        step = parse_step(step_path.name)
        root = None if step is None else step_root(folder, role, step)
        return Place(folder, folder.parent, None) if root is None else Place(folder, root, step_path)

    @property
    def step(self) -> int | None:
        """The step's number; None if the path is not in a step."""
        return None if self.step_path is None else parse_step(self.step_path.name)

    @property
    def is_flat(self) -> bool:
        """True if the step's folder is also the folder of its only role, as in SFT."""
        return self.folder == self.step_path

    def in_step(self, step: int) -> Place | None:
        """Returns the same place in another step of the root; None if this place is not in a step."""
        if self.step_path is None:
            return None
        # Keep the prefix of this step's folder name, because verl finds only steps with that prefix.
        step_path = self.root / f"{self.step_path.name.removesuffix(str(self.step))}{step}"
        return Place(step_path / self.folder.relative_to(self.step_path), self.root, step_path)


def remote_root(hdfs_path: str) -> str:
    """Returns the URL of the folder of all steps, given the path of a step or of a role in a step."""
    folder = hdfs_path.rstrip("/")
    # verl treats a path without a scheme as a local folder (`hdfs_io.copy`).
    url = folder if "://" in folder else Path(os.path.abspath(folder)).as_uri()
    above, _, name = url.rpartition("/")
    return above if parse_step(name) is not None else above.rpartition("/")[0]
