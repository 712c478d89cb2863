"""Copies a committed step of the fast tier to the root, while the training continues, and commits it there.

Each rank copies the files that it has written, from its node's folder. No byte of the training state is read again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import FileRecord, Manifest, WrittenFile
from mcore_ckpt.fast.transaction import committed_manifest
from mcore_ckpt.io import tuning
from mcore_ckpt.io.disk_space import Need
from mcore_ckpt.io.file_copies import copy_checked
from mcore_ckpt.io.files import make_folders, sync_names
from mcore_ckpt.io.threads import for_each
from mcore_ckpt.ranks.rounds import Agreement, Record
from mcore_ckpt.save.context import SaveContext
from mcore_ckpt.save.root_commit import commit_to_root, old_steps, upload
from mcore_ckpt.state.trainer import Trainer
from mcore_ckpt.steps import commit, tracker
from mcore_ckpt.steps.space_watch import Saving
from mcore_ckpt.steps.transaction import Attempt, check_seen, open_together, opening_of
from mcore_ckpt.steps.upload_queue import UploadHandle

logger = logging.getLogger(__name__)


def is_own_name(trainer: Trainer, step: int, role_dir: Path) -> bool:
    """True if this package, and not the trainer, has chosen the name of a role's folder in the root."""
    return role_dir == file_names.step_dir(trainer.root, step) / trainer.role


@dataclass(frozen=True, eq=False)
class Drain:
    """The copy of one step to the root, on this rank. This class implements `fast.drains.Draining`.

    Attributes:
        attempt: the step in this node's folder.
        saving: what is saved to the root.
        prepare: takes the root's lock and checks the free space, on rank 0.
    """

    context: SaveContext
    agreement: Agreement
    attempt: Attempt
    saving: Saving
    prepare: Callable[[Saving, Need], None]

    def run(self) -> tuple[UploadHandle | None, Callable[[], None] | None]:
        trainer, step = self.context.trainer, self.saving.step
        topic = f"copying step {step} of {trainer.role} to {trainer.root}"
        try:
            manifest = self.agreement.runner.run(partial(committed_manifest, self.attempt))
        except BaseException as error:
            self.agreement.fail_next_round(topic, error, opening_of(self.attempt.number))
            raise
        mine = [file for file in manifest.files if file.rank == trainer.agreement.rank]
        need = Need.of((file.path, file.size) for file in mine)
        opened = open_together(
            self.agreement,
            topic,
            self.saving.role_dir,
            prepare=partial(self.prepare, self.saving),
            need=need,
            number=self.attempt.number,
            folder_mode=partial(trainer.folder_mode, self.saving.role_dir),
        )
        exports = "hf_model" in trainer.config.save_contents

        def copy(staging: Path) -> Record:
            return {"files": [msgspec.to_builtins(file) for file in self._copy(staging, mine, exports)]}

        def describe(_: Sequence[Record]) -> Manifest:
            files = _copied(manifest.files, exports)
            commit.check_files(opened.staging, ((file.rank, _written(file)) for file in files))
            return replace(manifest, placement=None, files=files)

        move_tracker = partial(self._move_tracker, opened.role_dir)
        commit_to_root(self.context, self.agreement, topic, opened, copy, describe, move_tracker)
        too_old = old_steps(self.context, self.agreement, self.saving)
        return upload(self.context, self.saving), None if too_old is None else too_old.delete

    def _move_tracker(self, role_dir: Path) -> None:
        # If the trainer names the folders, each commit on the nodes moves the tracker (`nodes._track`). The tracker may
        # name a newer step by now, so leave it alone.
        if is_own_name(self.context.trainer, self.saving.step, role_dir):
            tracker.move_tracker(self.context.trainer.root, self.saving.step, seen=role_dir)

    def _copy(self, staging: Path, mine: Sequence[FileRecord], exports: bool) -> list[WrittenFile]:
        self.context.lock.check_root()
        check_seen(staging)
        files = _copied(mine, exports)
        for file in files:
            make_folders(staging, file.path)

        def copy(file: FileRecord) -> None:
            copy_checked(self.attempt.role_dir / file.path, staging / file.path, file.size, file.crc32)

        for_each(files, copy, min(tuning.PEER_THREADS, max(1, len(files))))
        sync_names(staging, [file.path for file in files])
        self.context.lock.check_root()
        return [_written(file) for file in files]


def _copied(files: Sequence[FileRecord], exports: bool) -> tuple[FileRecord, ...]:
    # If the step gets a HuggingFace model in the root, the export writes the assets there, so they are not copied.
    return tuple(file for file in files if not (exports and file.kind == "huggingface"))


def _written(file: FileRecord) -> WrittenFile:
    return WrittenFile(file.path, file.kind, file.size, file.crc32, file.index)
