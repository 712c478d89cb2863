"""Puts the whole result of a conversion in place, or nothing. The result is a folder, or roles of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import Manifest
from mcore_ckpt.formats.companions import companions_of
from mcore_ckpt.io.files import make_folders, sync_folders
from mcore_ckpt.io.folder_sizes import sizes_below
from mcore_ckpt.steps import commit, leftovers
from mcore_ckpt.steps.new_folder import Replaceable, check_may_replace, check_space, publish_folder
from mcore_ckpt.steps.new_step import NewStep, check_may_write


class Destination(Protocol):
    """The place for the results of several writers. Each writer has a folder in this place.

    Every process makes a destination with the same arguments, and calls `folder`. Only the coordinator calls the other
    methods, in the order below. It calls `close` even after an error.
    """

    @property
    def path(self) -> Path: ...

    def check(self) -> None:
        """Raises InvalidArgumentError if nothing may be written here. Changes nothing on disk."""

    def open(self, names: Sequence[str], sizes: Iterable[int], mode: int) -> str:
        """Removes leftovers, and makes a folder for each writer in `names`: a staging folder, or a folder inside one.

        `sizes` are the sizes in bytes of all files that will be written, or lower bounds of them. `mode` is the mode of
        new folders (`mode_as`). Returns the id of the attempt.

        Raises:
            InvalidArgumentError, LockedError: nothing may be written here.
            NoRoomError: the files do not fit.
            OSError: a folder cannot be made.
        """

    def folder(self, name: str, attempt: str) -> Path:
        """Returns the folder of a writer."""

    def seal(self) -> None:
        """Makes the names of all files durable, once all files are written. Raises OSError."""

    def publish(self) -> None:
        """Puts everything in place.

        Raises CheckpointError or OSError. After an error, the previous contents are still in place, unless the message
        says otherwise.
        """

    def close(self) -> None:
        """Removes everything that is not in place, and releases all locks."""


class NewFolder:
    """A folder as a destination. A writer's name is the path of the writer's folder, relative to this folder."""

    def __init__(self, path: Path, replaceable: Replaceable) -> None:
        self.path = path
        self.replaceable = replaceable
        self._attempt = ""
        self._exit = ExitStack()

    @property
    def staging(self) -> Path:
        return file_names.staging_dir(self.path, self._attempt)

    def check(self) -> None:
        check_may_replace(self.path, self.replaceable)

    def open(self, names: Sequence[str], sizes: Iterable[int], mode: int) -> str:
        self.check()
        leftovers.remove_sibling_leftovers(self.path)
        check_space(self.path, sizes)
        for parent in reversed(self.path.parents):
            if not parent.exists():
                self._exit.callback(commit.remove_if_empty, parent)
        self._attempt = commit.new_attempt()
        self._exit.callback(commit.remove_folder, self.staging)  # finds nothing once the folder is in place
        commit.open_staging(self.path, self._attempt, mode)
        for name in names:
            make_folders(self.staging, f"{name}/x")
        return self._attempt

    def folder(self, name: str, attempt: str) -> Path:
        return file_names.staging_dir(self.path, attempt) / name

    def seal(self) -> None:
        sync_folders(self.staging)

    def publish(self) -> None:
        publish_folder(self.staging, self.path, self._attempt, self.replaceable)

    def close(self) -> None:
        self._exit.close()


class RolesOfStep:
    """Roles of a step as a destination. Each writer's name is its role.

    While the destination is open, no trainer can save below the root.

    Args:
        force: True to replace checkpoints of these roles that the step already has. A pinned step is never replaced.
        source: the folder of the step that is converted. The files and folders next to the roles in this folder are
            copied (`companions_of`). None to copy nothing.

    Attributes:
        path: the folder of the step; the folder of the role if there is only one role.
        companions: the files and folders that are copied from `source`, by name; empty until the destination is open.
        manifests: the manifests that have been written, by role.
    """

    def __init__(self, root: Path, step: int, roles: Sequence[str], force: bool, source: Path | None = None) -> None:
        self._root, self.step, self.roles, self._force = root, step, tuple(roles), force
        self._source = source
        self.companions: Mapping[str, Path] = {}
        self.manifests: dict[str, Manifest] = {}
        self._exit = ExitStack()
        self._new: NewStep | None = None
        self.path = self.role_dir(self.roles[0]) if len(self.roles) == 1 else file_names.step_dir(root, step)

    def role_dir(self, role: str) -> Path:
        return file_names.step_dir(self._root, self.step) / role

    def check(self) -> None:
        check_may_write(self._root, self.step, self.roles, self._force)

    def open(self, names: Sequence[str], sizes: Iterable[int], mode: int) -> str:
        self.companions = companions_of(self._source)
        new = self._exit.enter_context(NewStep(self._root, self.step, self.roles, self._force, mode=mode))
        self._new = new
        new.check_space([*self._sizes_of_companions(), *sizes])
        new.add_companions(self.companions)
        for name in names:
            new.open(name)
        return new.attempt

    def _sizes_of_companions(self) -> Iterable[int]:
        for path in self.companions.values():
            yield from sizes_below(path).values() if path.is_dir() else [path.stat().st_size]

    def folder(self, name: str, attempt: str) -> Path:
        return file_names.staging_dir(self.role_dir(name), attempt)

    def write_manifest(self, manifest: Manifest) -> None:
        """Adds the step's roles and attempt to a role's manifest, and writes the manifest.

        All other files of the role must be durable. Raises CommitError or OSError.
        """
        assert self._new is not None, "the destination is open"
        self.manifests[manifest.role] = replace(manifest, roles=self.roles, attempt=self._new.attempt)
        self._new.write_manifest(self.manifests[manifest.role])

    def seal(self) -> None:
        """Does nothing: `write_manifest` comes after all files are durable, and makes the manifest durable."""

    def publish(self) -> None:
        assert self._new is not None, "the destination is open"
        self._new.publish()

    def close(self) -> None:
        self._exit.close()
