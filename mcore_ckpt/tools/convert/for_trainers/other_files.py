"""Writes the files of a step that are neither weights nor state: files of the trainer, and configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.formats.contract import FileReport, FileToWrite
from mcore_ckpt.io.file_copies import pieces_of
from mcore_ckpt.io.files import inside, make_folders, write_file


@dataclass(frozen=True, eq=False)
class OtherFiles:
    """Copies files of the step `source` to the same paths, and writes texts.

    It satisfies `formats.contract.CheckpointWriter`. `files` is empty, because only the coordinator writes, in
    `finish`.
    """

    source: Path
    copies: Sequence[str] = ()
    texts: Mapping[str, str] = field(default_factory=dict)

    files: Sequence[FileToWrite] = ()

    def write(self, numbers: Sequence[int], folder: Path, progress: Callable[[int], None]) -> list[FileReport]:
        return []

    def finish(self, reports: Sequence[FileReport], folder: Path) -> None:
        for name in self.copies:
            make_folders(folder, name)
            # A file of the step may be a link to a file in the step.
            write_file(folder / name, pieces_of(inside(self.source, name)))
        for name, text in self.texts.items():
            write_file(folder / name, [text.encode()])

    def check(self, folder: Path, part: int, parts: int) -> None:
        for name in self.copies[part::parts]:
            pairs = zip_longest(pieces_of(inside(self.source, name)), pieces_of(folder / name))
            if any(wanted != found for wanted, found in pairs):
                raise CheckpointMismatchError(
                    f"{folder / name}: the written bytes differ from those in {self.source}: check the disks and "
                    "convert again"
                )
