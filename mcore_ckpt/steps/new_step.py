"""Lets a tool write a step into a root as a trainer does: the tool holds the locks, and replaces only what it may.

A step that `reshard` or `convert` writes into a used root is not a commit of the root's training. Such a step takes the
commit number and the branch of the step before it, or of the first step if no step is before it. So a later step stays
the newest, and no step is given up. A step that `collect` writes keeps the commit number that it got on the nodes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import Manifest
from mcore_ckpt.checkpoint.provenance import Run
from mcore_ckpt.errors import InvalidArgumentError, LockedError
from mcore_ckpt.io.access import FOLDER_MODE, mode_in
from mcore_ckpt.io.file_copies import copy_durably
from mcore_ckpt.io.files import sync_dir
from mcore_ckpt.io.removal import remove_tree
from mcore_ckpt.steps import choice, commit, leftovers, tracker
from mcore_ckpt.steps.listing import StepStatus, holds_something, list_steps, step_status
from mcore_ckpt.steps.new_folder import check_not_pinned, check_space
from mcore_ckpt.steps.read_lock import unread
from mcore_ckpt.steps.trainer_lock import ToolLocks

_COMPANIONS_DIR = "beside"


class NewStep:
    """A step that a tool writes into a root. A `with` block commits all of `roles`, or none of them.

    Until the block ends, no trainer and no other tool can save these roles below the root.

    Args:
        root: the folder of the steps.
        step: the step's number.
        roles: the roles that the tool writes.
        force: True to replace checkpoints of these roles that the step already has. A pinned step is never replaced.
        run: the run that the checkpoints belong to; None if they belong to no run, and so to the root.
        mode: the mode of a new root, before the umask is applied.
        path: the step's folder; None for the usual folder.
        is_flat: True if the step's folder is itself the folder of its only role.

    Attributes:
        attempt: the id of this write.
        path: the step's folder.

    Raises:
        InvalidArgumentError: the step is pinned, already has one of `roles`, has a role of another run, or has a folder
            with another name.
        LockedError: a trainer saves below the root, another tool writes one of the roles, or a checkpoint that would be
            replaced is being read.

    Example:
        >>> with NewStep(root, 10, ["actor"]) as new:  # doctest: +SKIP
        ...     staging = new.open("actor")
        ...     new.write_manifest(manifest)
        ...     new.publish()
    """

    def __init__(
        self,
        root: Path,
        step: int,
        roles: Sequence[str],
        force: bool = False,
        run: Run | None = None,
        mode: int = FOLDER_MODE,
        path: Path | None = None,
        is_flat: bool = False,
    ) -> None:
        self._root = root.absolute()
        self.path = file_names.step_dir(self._root, step) if path is None else path.absolute()
        self._is_flat = is_flat
        self._step = step
        self._roles = tuple(roles)
        self._force = force
        self._run = run
        self._mode = mode
        self._staged: dict[Path, Path] = {}
        self._companions_staging: list[Path] = []
        self._exit = ExitStack()
        self._locks = ToolLocks(self._root, self._roles, mode)
        self.attempt = commit.new_attempt()

    def __enter__(self) -> NewStep:
        self._check()  # before anything is made
        with ExitStack() as stack:
            if not self._root.exists():
                stack.callback(commit.remove_if_empty, self._root)
            stack.enter_context(self._locks)
            self._mode = mode_in(self._root, self._mode)
            for role in self._roles:
                # A killed tool may have left its folders. `alone` is False, because tools of older versions hold no
                # lock.
                leftovers.remove_leftovers(self._root, role, alone=False)
            self._check()
            with self._unread():
                pass
            self._exit = stack.pop_all()
        return self

    def check_space(self, sizes: Iterable[int]) -> None:
        """Checks that files of these sizes fit, as `new_folder.check_space` does."""
        check_space(self.path, sizes)

    def role_dir(self, role: str) -> Path:
        """Returns the folder of a role."""
        return self.path if self._is_flat else self.path / role

    def open(self, role: str) -> Path:
        """Makes the staging folder of a role. Raises OSError."""
        role_dir = self.role_dir(role)
        self._staged[role_dir] = commit.open_staging(role_dir, self.attempt, self._mode)
        return self._staged[role_dir]

    def add_companions(self, companions: Mapping[str, Path]) -> None:
        """Copies the files that a trainer keeps next to the roles of a step.

        `publish` puts the copies in place with the roles.

        Raises InvalidArgumentError if the step has such an entry already and `force` is not set, and OSError.
        """
        for name in companions:
            if os.path.lexists(self.path / name) and not self._force:
                raise InvalidArgumentError(
                    f"{self.path / name}: is there already: name another folder to write to, or replace it with --force"
                )
        if companions:
            staging = commit.open_staging(self.path / self._roles[0], commit.new_attempt(), self._mode)
            self._companions_staging.append(staging)
        for name, source in companions.items():
            copy_durably(source, self._companions_staging[0] / _COMPANIONS_DIR / name)

    def write_manifest(self, manifest: Manifest) -> None:
        """Writes the manifest of an opened role, durably. Raises what `commit.write_manifest` does.

        A checkpoint of a run keeps its commit. Any other checkpoint gets the place of its step among the steps below
        the root, so the checkpoint is not the newest if there are later steps.
        """
        if self._run is None:
            others = [status for status in list_steps(self._root) if status.committed]
            manifest = replace(manifest, run=None, commit=choice.by_step(self._step, others))
        commit.write_manifest(self._staged[self.role_dir(manifest.role)], manifest)

    def publish(self) -> None:
        """Puts all opened roles in place, and moves the tracker. Each opened role must have its manifest.

        Raises InvalidArgumentError if the step has been pinned meanwhile. Raises LockedError if somebody has begun to
        read the step or has taken the locks over. Raises CommitError if the root is another folder by now, and OSError.
        """
        self._check()
        with self._unread():
            self._locks.keep()
            self._publish_companions()
            for role_dir, staging in self._staged.items():
                commit.publish(staging, role_dir, self.attempt)
        self._staged.clear()
        tracker.move_tracker(self._root)

    def _publish_companions(self) -> None:
        for new in (path for staging in self._companions_staging for path in (staging / _COMPANIONS_DIR).iterdir()):
            old = self.path / new.name
            remove_tree(old) if old.is_dir() and not old.is_symlink() else old.unlink(missing_ok=True)
            new.rename(old)
        if self._companions_staging:
            sync_dir(self.path)

    @contextmanager
    def _unread(self) -> Iterator[None]:
        """Raises LockedError if a role that would be replaced is being read, or a training goes on from it.

        During the `with` block, nobody can begin to read these roles or to go on from them.
        """
        role_dirs = map(self.role_dir, self._roles)
        replaced = [role_dir for role_dir in role_dirs if (role_dir / file_names.MANIFEST_FILE).exists()]
        with unread(replaced) as alone:
            if not alone:
                raise LockedError(
                    f"{self.path}: is being read, or a training has loaded it and has not saved since. No tool "
                    "replaces such a step: wait until nobody uses it any more, or name another folder to write to"
                )
            yield

    def _check(self) -> None:
        check_may_write(self._root, self._step, self._roles, self._force, self._run, self.path)

    def __exit__(self, *error: object) -> None:
        for staging in (*self._companions_staging, *self._staged.values()):
            commit.discard(staging)
        self._exit.close()


def check_may_write(
    root: Path,
    step: int,
    roles: Sequence[str],
    force: bool = False,
    run: Run | None = None,
    step_path: Path | None = None,
) -> None:
    """Checks that a tool may write roles of a step: it replaces only what `force` allows, and mixes no runs.

    `step_path` is the folder that the step will have; None for the usual folder.

    Raises InvalidArgumentError if the step is pinned, already has one of `roles`, has a role of another run, or has a
    folder with another name. Raises InvalidArgumentError also if the root is in a step, or if the root's tracker
    belongs to another program. Raises OSError if the step cannot be read.
    """
    _check_root(root, force)
    new = step_path or file_names.step_dir(root, step)
    for path in file_names.step_dirs(root).get(step, []):
        check_not_pinned(path)
        status = step_status(path)
        if path.name != new.name or status.flat is not None:
            if holds_something(status):
                raise InvalidArgumentError(
                    f"{root}: step {step} is there already, as {path}, which no tool replaces or adds to: name another "
                    "folder"
                )
            continue
        there = [role for role in roles if role in status.aside or _has_entries(path / role)]
        if there and not force:
            raise InvalidArgumentError(
                f"{path / there[0]}: is there already: name another folder to write to, or replace it with --force"
            )
    for status in list_steps(root, step):
        _check_one_run(status, roles, run)


def _check_root(root: Path, force: bool) -> None:
    for folder in (root, *root.parents):
        if file_names.parse_step(folder.name) is not None and folder.is_dir() and step_status(folder).committed:
            raise InvalidArgumentError(
                f"{root}: is in the step {folder}, and would be deleted with it: name a folder outside of it"
            )
    path = root / file_names.TRACKER_FILE
    if not force and os.path.lexists(path) and not any(status.committed for status in list_steps(root)):
        raise InvalidArgumentError(
            f"{path}: there is no step of this package next to this file, so another program's checkpoints are here, "
            "and that program would start from the new step: name another folder, or let the tracker name the new step "
            "with --force"
        )


def _check_one_run(status: StepStatus, roles: Sequence[str], run: Run | None) -> None:
    """Raises InvalidArgumentError if a role that stays in a step belongs to another run than the written roles."""
    for role, head in status.says.items():
        is_own = role in status.committed if run is None else head.run is None or head.run.id == run.id
        if role not in roles and not is_own:
            raise InvalidArgumentError(
                f"{status.role_dir(role)}: belongs to {head.run}, but {roles[0]} to {run or 'the run of this folder'}, "
                "and no step can belong to two runs: name another folder to write to"
            )


def _has_entries(folder: Path) -> bool:
    try:
        return any(folder.iterdir())
    except FileNotFoundError:
        return folder.is_symlink()
    except NotADirectoryError:
        return True
