"""Parts of a step that a trainer attaches to its manager, such as a replay buffer or prompts in flight."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import CheckpointMismatchError, InvalidArgumentError, InvalidStateError, InvalidTypeError
from mcore_ckpt.sharding.plan import runs


@dataclass(frozen=True)
class HandOver:
    """A file or folder that the trainer gives away with a save.

    No byte is copied if the file system can share blocks or supports links.

    The file or folder is removed when the save has been committed. If the process dies just before the removal, the
    next start of a manager removes the files that are linked to the step. Files that were copied, and files that share
    blocks with the step, then stay. If the save fails, all files stay. Nobody may change the files after the call of
    `save`: a file may be linked to the step until the file is removed, and a change would damage the step. Everyone who
    may read the step may read the files that are given away, even if these files were closed to others before. If a
    file has a second name elsewhere, the file's mode does not change: if the step needs another mode, the file's bytes
    are copied.

    Attributes:
        path: the file or folder. A symbolic link is refused, and so is a folder that contains a symbolic link.
    """

    path: str | os.PathLike[str]


@dataclass(frozen=True, eq=False)
class SavedPart:
    """A part of a step, as a load passes it to the `load` function of the part.

    Attributes:
        name: the part's name.
        step: the step's number.
        rank: this rank.
        world_size: the number of ranks that saved the step.
        ranks: the ranks that saved something for this part, ascending. The training may have more or fewer ranks now.
        loading: the number of ranks that load the step; None if this number is `world_size`.
        asked: the ranks whose files have been asked for with `folder` or `read`.
    """

    name: str
    step: int
    rank: int
    world_size: int
    ranks: tuple[int, ...]
    _folder_of: Callable[[int], Path]
    loading: int | None = None
    asked: set[int] = field(default_factory=set)

    def folder(self, rank: int | None = None) -> Path:
        """Returns the folder with the files that a rank has saved.

        Do not change these files, and do not use them after the load.

        Args:
            rank: one of `ranks`. None stands for the only rank in `ranks` or, if several ranks have saved something,
                for this rank. If several ranks have saved something, and the training has more or fewer ranks now, None
                is not allowed.

        Raises:
            CheckpointMismatchError: the rank has saved nothing for this part, or is None although None is not allowed.
            CheckpointCorruptError: a file is missing or damaged.
        """
        chosen = self._own() if rank is None else rank
        if chosen not in self.ranks:
            raise CheckpointMismatchError(
                f"part {self.name!r} of step {self.step}: rank {chosen} has saved nothing for it, but these "
                f"ranks have: {listed_ranks(self.ranks)}. Pass one of them"
            )
        self.asked.add(chosen)
        return self._folder_of(chosen)

    def _own(self) -> int:
        if len(self.ranks) == 1:
            return self.ranks[0]
        if self.loading not in (None, self.world_size):
            raise CheckpointMismatchError(
                f"part {self.name!r} of step {self.step}: was saved by {self.world_size} ranks, and {self.loading} "
                f"ranks load it, so what belongs to which rank is not known. These ranks have saved something: "
                f"{listed_ranks(self.ranks)}. Pass one of them to folder() or read(), and deal out all of them"
            )
        return self.rank

    def read(self, rank: int | None = None) -> bytes:
        """Returns the bytes that a rank has saved as bytes or as one file.

        Raises the errors of `folder`, and CheckpointMismatchError if the rank has saved something else.
        """
        folder = self.folder(rank)
        entries = list(folder.iterdir())
        if len(entries) != 1 or not entries[0].is_file():
            raise CheckpointMismatchError(f"{folder}: does not have exactly one file: use folder() instead of read()")
        return entries[0].read_bytes()


# The content of a part: bytes, the path of a file or folder to copy, a HandOver, or None. A part's function returns
# the content, or a second function, which is called while the training continues and returns the content.
Content = Any
Save = Callable[[Path], Content]
Load = Callable[[SavedPart], object]


@dataclass(frozen=True, eq=False)
class Part:
    """A part as one rank has attached it. See `CheckpointManager.attach`."""

    name: str
    save: Save | Content
    load: Load | None
    is_optional: bool


@dataclass(frozen=True, eq=False)
class AttachedParts:
    """The parts that are attached to a manager on this rank.

    Attributes:
        declared: the parts that each step must have (`CheckpointConfig.parts`). If no parts are declared, a step has
            the parts that are attached.
    """

    declared: tuple[str, ...] = ()
    _by_name: dict[str, Part] = field(default_factory=dict)
    _thread: threading.local = field(default_factory=threading.local)

    def __iter__(self) -> Iterator[Part]:
        return iter(self._by_name.values())

    @property
    def saved(self) -> tuple[str, ...]:
        """The names of the parts that this rank saves."""
        return tuple(part.name for part in self if part.save is not None)

    def attach(self, part: Part) -> None:
        """Adds a part. Raises InvalidArgumentError if its name cannot be used, or is used already."""
        file_names.check_part(part.name)
        if self.declared and part.name not in self.declared:
            raise InvalidArgumentError(
                f"part {part.name!r} is not in CheckpointConfig.parts, which has {listed(self.declared)}: add it there"
            )
        alike = [name for name in self._by_name if name != part.name and name.lower() == part.name.lower()]
        if alike:
            raise InvalidArgumentError(
                f"part {part.name!r} differs from part {alike[0]!r} only in upper and lower case, and some file "
                "systems treat both names as one: use another name"
            )
        if part.name in self._by_name:
            raise InvalidArgumentError(f"part {part.name!r} is attached already: detach it first")
        self._by_name[part.name] = part

    @contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """Records for `refuse` that this thread is in a function of the part `name`."""
        self._thread.part = name
        try:
            yield
        finally:
            self._thread.part = None

    def refuse(self, call: str) -> None:
        """Raises InvalidStateError if this thread is in a function of a part. `call` is the name of the refused call.

        If the call were allowed, the manager would call the function again and again, and a save within a load could
        mix parts of two steps.
        """
        part = getattr(self._thread, "part", None)
        if part is not None:
            raise InvalidStateError(
                f"the function of part {part!r} calls {call} of its own manager, which would call the function again: "
                "make this call outside the function"
            )

    def detach(self, name: str) -> None:
        """Removes a part. Raises InvalidArgumentError if no part has this name."""
        if self._by_name.pop(name, None) is None:
            raise InvalidArgumentError(f"no part {name!r} is attached; attached parts: {listed(list(self._by_name))}")


def part_of(name: str, save: object, load: object, is_optional: bool) -> Part:
    """Returns a part from the arguments of `CheckpointManager.attach`. Raises the errors that `attach` documents."""
    if save is None and load is None:
        raise InvalidArgumentError(f"part {name!r} has neither save nor load: pass save, load or both")
    if load is not None and not callable(load):
        raise InvalidTypeError(f"load of part {name!r} is {load!r}: use a function with one argument, the saved part")
    if not callable(save):
        check_content(name, save)
    return Part(name, save, load, is_optional)


def check_content(name: str, content: Content) -> None:
    """Raises InvalidTypeError or InvalidArgumentError if a part cannot have this content."""
    if not isinstance(content, (bytes, bytearray, memoryview, str, os.PathLike, HandOver, type(None))):
        raise InvalidTypeError(
            f"part {name!r} is a {type(content).__name__}: use bytes, the path of a file or folder, a HandOver of one, "
            "or a function that writes into the folder that it gets"
        )
    path = content.path if isinstance(content, HandOver) else content
    if not isinstance(path, (bytes, bytearray, memoryview, str, os.PathLike, type(None))):
        raise InvalidTypeError(
            f"part {name!r} is a HandOver of a {type(path).__name__}: use the path of a file or folder"
        )
    # Refuse an empty path, because it would mean the current folder of the process.
    if isinstance(path, str) and (not path or "\0" in path):
        raise InvalidArgumentError(f"part {name!r} has the path {path!r}: name a file or folder")


def listed(names: Iterable[str]) -> str:
    """Returns the names of parts for a message."""
    return ", ".join(map(repr, names)) or "none"


def listed_ranks(ranks: Iterable[int]) -> str:
    """Returns ranks for a message."""
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in runs(ranks))
