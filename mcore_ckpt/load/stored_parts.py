"""Gives the parts of a loaded step to the functions that the trainer has attached for them.

Before anything changes, each rank checks that the step has the parts, and reads its share of the files of all parts
that any rank loads. The functions run last, on the trainer's thread, so that no part is loaded without the weights of
the same step.
"""

from __future__ import annotations

import logging
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import FileRecord, Manifest
from mcore_ckpt.checkpoint.provenance import merged
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError
from mcore_ckpt.formats.native.folder import Folder, LocalFolder
from mcore_ckpt.io import tuning
from mcore_ckpt.io.files import make_folders
from mcore_ckpt.io.removal import remove_tree
from mcore_ckpt.io.threads import for_each
from mcore_ckpt.ranks.rounds import Agreement, Record, Runner, decide, done_here
from mcore_ckpt.sharding.plan import runs
from mcore_ckpt.state.attached_parts import AttachedParts, Part, SavedPart, listed, listed_ranks
from mcore_ckpt.state.trainer import Trainer
from mcore_ckpt.state.trainer_functions import call_of_trainer

logger = logging.getLogger(__name__)


class PartsFolder:
    """The folders of parts, as folders of this host. Files of other nodes or a remote store are fetched when needed.

    Args:
        folder: the checkpoint's folder.
        manifest: the checkpoint's manifest.
        runner: runs work under the watch of the disk.
    """

    def __init__(self, folder: Folder, manifest: Manifest, runner: Runner) -> None:
        self._folder, self._runner = folder, runner
        self._records: dict[str, list[FileRecord]] = {}
        for record in manifest.files_of("part"):
            if (place := file_names.parse_part(record.path)) is not None:
                self._records.setdefault(file_names.part_dir(*place[:2]), []).append(record)
        self._places: dict[str, Path] = {}
        self._scratch: Path | None = None
        self._of_step: dict[Path, tuple[int, ...]] = {}

    def folder(self, part: str, rank: int) -> Path:
        """Checks the files that one rank has saved for a part, and returns a folder with these files.

        Raises CheckpointCorruptError, OSError, and HungDiskError.
        """
        path = file_names.part_dir(part, rank)
        if path not in self._places:
            self._places[path] = self._runner.run(partial(self._bring, path))
        return self._places[path]

    def check(self, part: str, rank: int) -> None:
        """Reads the files that one rank has saved for a part, and keeps no copy. Raises the errors of `folder`."""
        records = self._records.get(file_names.part_dir(part, rank), [])
        self._runner.run(partial(self._verify, records))

    def _verify(self, records: list[FileRecord]) -> None:
        if damages := self._folder.verify(records):
            raise CheckpointCorruptError(damages[0].problem)

    def _bring(self, path: str) -> Path:
        records = self._records.get(path, [])
        # A part without files gets a new empty folder. Its folder in the step may be missing, because a copy of a
        # checkpoint has only the files of the manifest.
        if records and isinstance(self._folder, LocalFolder):
            self._verify(records)
            files = (self._folder.place / record.path for record in records)
            self._of_step |= {file: _identity_of(file) for file in files}
            return self._folder.place / path
        if self._scratch is None:
            self._scratch = Path(tempfile.mkdtemp(prefix="mcore_ckpt-parts-"))
            # If another rank fails, nobody calls `close`. Then the folder is removed together with this object.
            self._removal = weakref.finalize(self, remove_tree, self._scratch)
        place = self._scratch
        make_folders(place, f"{path}/{file_names.PART_FILE}")
        for record in records:
            make_folders(place, record.path)
        fetch = self._folder.fetch
        for_each(records, lambda record: fetch(record, place / record.path), tuning.PEER_THREADS)
        return place / path

    def changed(self) -> Path | None:
        """Returns a file of the step that was changed or removed after its check; None if there is no such file."""
        return next((file for file, found in self._of_step.items() if _identity_of(file) != found), None)

    def close(self) -> None:
        """Removes the fetched files."""
        if self._scratch is not None:
            self._removal()


def _identity_of(file: Path) -> tuple[int, ...]:
    with suppress(OSError):
        found = file.lstat()
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
    return ()


@dataclass(frozen=True, eq=False)
class PartLoads:
    """The parts that this rank loads from one step.

    Attributes:
        parts: pairs of an attached part that this rank loads, and the saved part of the same name.
        files: the folders of the step's parts.
        attached: all parts that this rank has attached.
        saved: the ranks that have saved each part of the step, as in the manifest.
    """

    parts: tuple[tuple[Part, SavedPart], ...] = ()
    files: PartsFolder | None = None
    attached: AttachedParts = field(default_factory=AttachedParts)
    saved: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)

    @property
    def asked(self) -> dict[str, list[tuple[int, int]]]:
        """For each part, the ranks whose files this rank's function has asked for, as inclusive runs."""
        return {part.name: runs(stored.asked) for part, stored in self.parts}

    def warn_of_left(self, asked: Iterable[Mapping[str, Iterable[tuple[int, int]]]]) -> None:
        """Warns of ranks whose files no function has asked for. `asked` has the property `asked` of each rank.

        If no function has asked for any files of a part, there is no warning: the trainer must want none of them.
        """
        # Each rank of a large training may have asked for the files of all ranks, so merge the runs before expanding
        # them.
        taken: dict[str, set[tuple[int, int]]] = {}
        for of_rank in asked:
            for name, ranks in of_rank.items():
                taken.setdefault(name, set()).update((first, last) for first, last in ranks)
        for name, asked_runs in sorted(taken.items()):
            wanted = set(_ranks_in(merged(list(asked_runs))))
            left = set(_ranks_in(self.saved.get(name, ()))) - wanted
            if wanted and left:
                logger.warning(
                    "part %r: no load function has asked for what these ranks have saved: %s. SavedPart.ranks names "
                    "all ranks that have saved something: deal it out",
                    name,
                    listed_ranks(left),
                )

    def load(self) -> None:
        """Calls the function of each part, on the thread of the trainer.

        Raises CheckpointError: a function raised an error.
        """
        for part, stored in self.parts:
            assert part.load is not None
            try:
                with self.attached.calling(part.name):
                    failure = f"part {part.name!r} could not be loaded"
                    call_of_trainer(partial(part.load, stored), failure, CheckpointError)
            finally:
                self._check_step(part.name)

    def _check_step(self, part: str) -> None:
        """Logs an error if a function has damaged the step. Otherwise only the next load would notice the damage."""
        changed = None if self.files is None else self.files.changed()
        if changed is not None:
            logger.error(
                "%s: the load function of part %r has changed this file, so the step is damaged: let the function copy "
                "what it changes, and save again",
                changed,
                part,
            )

    def close(self) -> None:
        """Removes the files that were fetched from other places."""
        if self.files is not None:
            self.files.close()


NO_PARTS = PartLoads()


def plan_step_parts(trainer: Trainer, folder: Folder, manifest: Manifest, loaded: Set[str]) -> PartLoads:
    """Finds the parts that this rank loads, and reads this rank's share of all parts' files. Changes nothing.

    Args:
        trainer: this rank's trainer.
        folder: the checkpoint's folder.
        manifest: the checkpoint's manifest.
        loaded: the parts that any rank loads. A function may ask for the files of each rank, so the files of all ranks
            are checked.

    Raises:
        CheckpointMismatchError: the step does not have a part that this rank has attached, and that is not optional.
        CheckpointCorruptError: a file is missing or damaged.
    """
    files = PartsFolder(folder, manifest, trainer.agreement.runner)
    rank = trainer.agreement.rank
    found: list[tuple[Part, SavedPart]] = []
    for part in trainer.parts:
        saved_by = manifest.parts.get(part.name)
        if part.load is None or (saved_by is None and part.is_optional):
            continue
        if saved_by is None:
            raise CheckpointMismatchError(
                f"the step has no part {part.name!r}, but it has {listed(manifest.parts)}: attach the part with "
                "optional=True to load steps that were saved without it, or load another step"
            )
        ranks = _ranks_in(saved_by)
        # A resharded step has the parts of all ranks that saved the original step. These may be more ranks than the new
        # layout has.
        world_size = max([manifest.topology.world_size, *(rank + 1 for rank in ranks)])
        own_files, loading = partial(files.folder, part.name), trainer.topology.world_size
        found.append((part, SavedPart(part.name, manifest.step, rank, world_size, ranks, own_files, loading)))
    _warn_of_others(trainer, folder, manifest, loaded)
    own = {part.name for part, _ in found}
    try:
        for name in sorted(loaded & manifest.parts.keys()):
            for saved in _ranks_in(manifest.parts[name]):
                if saved % trainer.topology.world_size == rank:
                    # If this rank loads the part, it keeps the fetched files, because its function may ask for them.
                    (files.folder if name in own else files.check)(name, saved)
    except BaseException:
        files.close()
        raise
    return PartLoads(tuple(found), files, trainer.parts, manifest.parts)


def load_parts_together(agreement: Agreement, topic: str, loads: PartLoads, last: Callable[[], None]) -> None:
    """Lets each rank load its parts, and then call `last`. All ranks must call this function.

    If one rank fails, all ranks raise the same type of error.
    """

    def work() -> None:
        loads.load()
        last()

    def record() -> Record:
        return {**loaded.record(), "asked": loads.asked}

    def combine(records: Sequence[Record]) -> Record:
        loads.warn_of_left([record["asked"] for record in records])
        return {}

    # The functions belong to the trainer, so they must run on the trainer's thread, which is this thread.
    loaded = done_here(work)
    decide(agreement, topic, record, combine)


def _ranks_in(runs: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(rank for first, last in runs for rank in range(first, last + 1))


def _warn_of_others(trainer: Trainer, folder: Folder, manifest: Manifest, loaded: Set[str]) -> None:
    others = [name for name in manifest.parts if name not in loaded]
    if others and trainer.agreement.is_coordinator:
        logger.warning("%s has parts that no rank loads: %s", folder, listed(others))
