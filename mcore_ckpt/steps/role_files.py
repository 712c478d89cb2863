"""Commits and reads a role that consists of plain files, such as a trainer's counters or data position.

Such a role has a manifest like every other role, but no tensors. A step is complete once all its roles are committed,
so a trainer never pairs the weights of one step with the data position of another.
"""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import FileRecord, Manifest, WrittenFile
from mcore_ckpt.checkpoint.plain_files import pickle_plain, read_plain, write_plain
from mcore_ckpt.checkpoint.reading import read_checked, read_manifest
from mcore_ckpt.checkpoint.versions import package_versions
from mcore_ckpt.errors import CheckpointCorruptError, CommitError, UnsupportedError
from mcore_ckpt.io.checksums import crc32
from mcore_ckpt.io.file_copies import copy_checked, copy_hashed, hash_durably, link_file, pieces_of
from mcore_ckpt.io.files import make_folders, sync_dir, sync_file, sync_names, write_file
from mcore_ckpt.ranks.rounds import Agreement, Record
from mcore_ckpt.ranks.topology import RankCoordinates, Topology
from mcore_ckpt.steps import commit
from mcore_ckpt.steps.listing import check_own_step, step_status
from mcore_ckpt.steps.owner import Life
from mcore_ckpt.steps.staged_saves import running_saves
from mcore_ckpt.steps.transaction import check_seen, commit_together, open_together
from mcore_ckpt.steps.work_folders import replaced_checkpoints


class RoleWriter:
    """Writes one rank's files of a role, durably, and records their sizes and CRCs."""

    def __init__(self, folder: Path, kind: str, agreement: Agreement) -> None:
        self._folder = folder
        self._kind = kind
        self.rank = agreement.rank
        self.world_size = agreement.world_size
        self.files: list[WrittenFile] = []

    def write(self, path: str, data: bytes) -> None:
        """Writes one file. Only this rank may write `path`, which is relative to the role's folder. Raises OSError."""
        make_folders(self._folder, path)
        write_file(self._folder / path, [data])
        self.files.append(WrittenFile(path, self._kind, len(data), crc32(data)))

    def write_values(self, path: str, values: Mapping[str, Any]) -> None:
        """Writes plain values and tensors as a `.pt` file, which `torch.load(weights_only=True)` opens.

        Raises OSError, and ValueError if `values` has something other than plain values, or is too large for a small
        file.
        """
        self.files.append(write_plain(self._folder, path, self._kind, pickle_plain(values)))

    def add(self, path: str, source: Path, shares: bool = False) -> None:
        """Takes a file of the trainer, of any size, into the role. Any thread may call this method. Raises OSError.

        With `shares`, the file is hard-linked if the file system can do that, so nobody may write to the file any more.
        Otherwise the file is copied.
        """
        make_folders(self._folder, path)
        target = self._folder / path
        if shares:
            link_file(source, target)
        found = hash_durably(target) if shares else copy_hashed(source, target)
        self.files.append(WrittenFile(path, self._kind, found.size, found.crc32))


class RoleReader:
    """Reads the files of a committed role and checks the size and CRC of each file.

    Raises CheckpointNotFoundError if the folder has no manifest, that is, if nothing is committed there. Raises
    CheckpointCorruptError if the manifest is damaged.

    Example:
        >>> RoleReader(step_path / "recover_info").read("step_info.json", 4096)  # doctest: +SKIP
    """

    def __init__(self, role_dir: Path) -> None:
        self.role_dir = role_dir
        self.manifest = read_manifest(role_dir)
        self._records = {file.path: file for file in self.manifest.files}

    @property
    def world_size(self) -> int:
        """The number of ranks that wrote the role."""
        return self.manifest.topology.world_size

    def read(self, path: str, most: int) -> bytes:
        """Returns the bytes of one file, whose path is relative to the role's folder.

        Raises CheckpointCorruptError: the file is missing, damaged, or has more than `most` bytes.
        """
        return read_checked(self.role_dir, self._record(path), most)

    def read_values(self, path: str) -> dict[str, Any]:
        """Returns the values that `RoleWriter.write_values` wrote. No code in the file is executed.

        Raises CheckpointCorruptError: the file is missing, damaged, or holds something other than plain values.
        """
        return read_plain(self.role_dir, self._record(path))

    def is_same(self, path: str, file: Path) -> bool:
        """True if `file` exists and has the same bytes as a file of the role. Raises OSError."""
        record, own = self._record(path), self.role_dir / path
        try:
            if file.samefile(own):
                return True
            if not file.is_file() or file.stat().st_size != record.size:
                return False
        except (FileNotFoundError, NotADirectoryError):
            return False
        crc = 0
        for piece in pieces_of(file):
            crc = crc32(piece, crc)
        return crc == record.crc32

    def put(self, path: str, target: Path, shares: bool = False) -> None:
        """Gives a file of the role to the trainer as a new file: the reverse of `add`.

        Raises OSError, and CheckpointCorruptError if the file is damaged. Damage is found only if the file is copied,
        not if it is linked (`shares`).
        """
        record = self._record(path)
        if shares:
            link_file(self.role_dir / record.path, target)
        else:
            copy_checked(self.role_dir / record.path, target, record.size, record.crc32)

    def _record(self, path: str) -> FileRecord:
        if path not in self._records:
            raise CheckpointCorruptError(f"{self.role_dir / file_names.MANIFEST_FILE}: does not list {path}")
        return self._records[path]


def commit_role(
    agreement: Agreement,
    role_dir: Path,
    step: int,
    roles: Sequence[str] | Callable[[], Sequence[str]],
    write: Callable[[RoleWriter], object],
    *,
    kind: str = "extra",
    before: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
    may_commit: Callable[[], object] = lambda: None,
    stamp: Callable[[Manifest], Manifest] = lambda manifest: manifest,
) -> None:
    """Commits a role that consists of plain files: either all files or none. Every rank must call this function.

    Args:
        agreement: connects this rank with the other ranks that write the role. `ranks.rendezvous` or
            `ranks.single_process_agreement` makes it.
        role_dir: the role's folder in the step's folder. It must lie on a file system that all ranks share.
        step: the step's number.
        roles: the roles that the step consists of, with or without this role. The step is complete once all its roles
            are committed. If `roles` is a function, it is called on rank 0 after all ranks have written.
        write: writes this rank's files. If `write` raises on one rank, all ranks raise.
        kind: the kind of these files in the manifest.
        before: runs on rank 0 before anything is written.
        after: runs on rank 0 once the role is in place. `after` must not raise.
        may_commit: runs on rank 0 right before the role is put in place. If `may_commit` raises, nothing is committed.
        stamp: runs on rank 0, and returns the manifest with the run and the commit of the step's other roles. With
            `stamp`, a step that is saved again after a rollback is complete only once this role is saved again, too.
            Without `stamp`, the caller must call `uncommit_earlier_save` before such a save.

    Raises:
        CommitError: another role of the step is being saved again, and its earlier checkpoint, which would complete the
            step, is still there.
        CheckpointError: the role was not committed. All ranks raise the same type; an OSError becomes a CommitError. An
            earlier checkpoint of the role stays as it was.

    Example:
        >>> def write(files):
        ...     files.write("step_info.json", b'{"epoch": 3}')
        >>> folder = root / "global_steps_7" / "recover_info"  # doctest: +SKIP
        >>> commit_role(agreement, folder, 7, ["actor", "critic"], write)  # doctest: +SKIP
    """
    topic = f"saving {role_dir.name} of step {step}"
    attempt = open_together(agreement, topic, role_dir, prepare=lambda need: before())

    def write_files(staging: Path) -> Record:
        check_seen(staging)
        writer = RoleWriter(staging, kind, agreement)
        write(writer)
        sync_names(staging, [file.path for file in writer.files])
        return {"files": [asdict(file) for file in writer.files]}

    def describe(records: Sequence[Record]) -> Manifest:
        files = [(rank, WrittenFile(**file)) for rank, record in enumerate(records) for file in record["files"]]
        commit.check_files(attempt.staging, files)
        declared = roles() if callable(roles) else roles
        made = files_manifest(role_dir.name, step, declared, attempt.number, files, agreement.world_size)
        return stamp(made)

    def check_and_ask() -> None:
        _check_not_saved_again(role_dir)
        may_commit()

    commit_together(agreement, topic, attempt, write_files, describe, after, check_and_ask)


def seal_role(folder: Path, role: str, step: int, paths: Sequence[str], kind: str = "extra") -> None:
    """Makes the files of another program durable, and lists them in a manifest next to them.

    Afterwards `RoleReader` and `mcore-ckpt verify` check these files. The folder should not have its final name yet:
    the caller renames it once this function has returned. `paths` are relative to the folder.

    Raises:
        UnsupportedError: a file has a name that a manifest cannot list. The files are durable, but nothing lists them.
        OSError: the files are not durable, or a file changes during the call.
        CommitError: the manifest could not be read back.
    """
    if problem := file_names.problem_of_names(folder, paths):
        for path in paths:
            sync_file(folder / path)
        sync_names(folder, paths)
        sync_dir(folder)
        raise UnsupportedError(f"role {role!r}: {problem}")
    hashed = {path: hash_durably(folder / path) for path in paths}
    sync_names(folder, list(hashed))
    files = [(0, WrittenFile(path, kind, each.size, each.crc32)) for path, each in hashed.items()]
    commit.write_manifest(folder, files_manifest(role, step, [role], commit.new_attempt(), files, world_size=1))


def uncommit_role(role_dir: Path) -> None:
    """Undoes a role's commit, if any, by deleting its manifest. Then the step is not complete. Raises OSError."""
    # The manifests of replaced checkpoints go first. Otherwise a power loss in between would leave one of these
    # checkpoints as the role's checkpoint.
    for folder in (*replaced_checkpoints(role_dir), role_dir):
        with suppress(FileNotFoundError):
            (folder / file_names.MANIFEST_FILE).unlink()
            sync_dir(folder)


def uncommit_earlier_save(step_path: Path, role: str, driver_role: str) -> None:
    """Undoes an earlier save of a step, before a role of this step is saved again.

    A step is saved again after a rollback, or after a crash that left it incomplete. Without this function the step
    would be complete as soon as it has all roles, although the roles come from different saves. An earlier save of
    `role` is undone, too, because a new async save of `role` may commit after the driver. The role of plain files
    (`driver_role`) is removed first, because it is saved again last.

    The caller holds a lock, so that a second trainer does not undo what the first trainer has saved.

    Raises CommitError if the step belongs to another run, and OSError.
    """
    if step_path.is_dir():
        check_own_step(step_path)
    for folder in (step_path / driver_role, step_path / role):
        uncommit_role(folder)
    with suppress(FileNotFoundError):
        shutil.rmtree(step_path / driver_role)


def _check_not_saved_again(role_dir: Path) -> None:
    """Raises CommitError if another role of the step is being saved again, and its earlier checkpoint is still there.

    The new role would complete the step with that earlier checkpoint.
    """
    step_path = role_dir.parent
    saves = [save for save in running_saves(step_path.parent, [step_path]) if save.staging.parent == step_path]
    if not saves:  # also if the folder is not a step yet, such as NeMo-RL's temporary folder
        return
    status = step_status(step_path)
    attempts = {head.role: head.attempt for head in status.heads if head.role in status.committed - {role_dir.name}}
    for save in saves:
        # A committed save does not count: its staging folder holds the checkpoint that the save has replaced.
        if save.role in attempts and attempts[save.role] != save.attempt and save.life is not Life.DEAD:
            raise CommitError(
                f"{step_path / save.role}: {save.by} is saving this role again, and its earlier checkpoint is still "
                f"there, so the step would be complete with that checkpoint and the new {role_dir.name}: commit "
                f"{role_dir.name} after that save, or call uncommit_earlier_save before it"
            )


def roles_begun(step_path: Path) -> frozenset[str]:
    """Returns the roles of a step that are committed or have a staging folder. Raises OSError."""
    folders = [file_names.parse_work_dir(entry.name) for entry in step_path.iterdir()]
    staged = {folder.role for folder in folders if folder is not None and folder.purpose == "staging"}
    return step_status(step_path).committed | staged


def files_manifest(
    role: str, step: int, roles: Sequence[str], attempt: str, files: Sequence[tuple[int, WrittenFile]], world_size: int
) -> Manifest:
    """Returns the manifest of a role that has files and no tensors.

    The step consists of `roles`, with or without this role. `files` has the rank that wrote each file, and the file.
    """
    return Manifest(
        step=step,
        role=role,
        roles=tuple(dict.fromkeys([*roles, role])),
        attempt=attempt,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions=package_versions(),
        contents=(),
        topology=Topology(world_size=world_size, dp=world_size),
        ranks=tuple(RankCoordinates(dp=rank) for rank in range(world_size)),
        stages=(),
        tensors=(),
        files=tuple(FileRecord(file.path, file.kind, rank, file.size, file.crc32) for rank, file in files),
    )
