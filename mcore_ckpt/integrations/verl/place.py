"""Where a path of verl's trainers is: which step it is a part of, and below which root."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.checkpoint import parse_step, step_root


@dataclass(frozen=True)
class Place:
    """One `local_path`.

    Attributes:
        folder: what it names.
        root: the folder of the steps, where the tracker is. PPO saves to `<root>/global_step_{N}/actor`, SFT to
            `<root>/global_step_{N}` itself.
        step_path: the step's folder; None for a path that is no step's.
    """

    folder: Path
    root: Path
    step_path: Path | None

    @staticmethod
    def of(local_path: str | os.PathLike[str], role: str) -> Place:
        folder = Path(os.path.abspath(local_path))
        step_path = folder if parse_step(folder.name) is not None else folder.parent
        step = parse_step(step_path.name)
        root = None if step is None else step_root(folder, role, step)
        return Place(folder, folder.parent, None) if root is None else Place(folder, root, step_path)

    @property
    def step(self) -> int | None:
        return None if self.step_path is None else parse_step(self.step_path.name)

    @property
    def is_flat(self) -> bool:
        """SFT's: a step of one model."""
        return self.folder == self.step_path

    def in_step(self, step: int) -> Place | None:
        """The same place in another step of the root; None if this one is in none."""
        if self.step_path is None:
            return None
        # By verl's name of it: what is not called so it does not find.
        step_path = self.root / f"{self.step_path.name.removesuffix(str(self.step))}{step}"
        return Place(step_path / self.folder.relative_to(self.step_path), self.root, step_path)


def remote_root(hdfs_path: str) -> str:
    """The URL of the folder of steps, from that of one role in a step (`trainer.default_hdfs_dir` and the like)."""
    folder = hdfs_path.rstrip("/")
    # verl copies to a path without a scheme as to a local folder (`hdfs_io.copy`).
    url = folder if "://" in folder else Path(os.path.abspath(folder)).as_uri()
    above, _, name = url.rpartition("/")
    return above if parse_step(name) is not None else above.rpartition("/")[0]
