"""Lets a tool write a step into a root as a trainer does: under the trainers' locks, and over nothing unasked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import InvalidArgumentError
from mcore_ckpt.steps import commit, leftovers, tracker
from mcore_ckpt.steps.listing import holds_something, step_status
from mcore_ckpt.steps.new_folder import check_not_pinned, check_space
from mcore_ckpt.steps.trainer_lock import ToolLocks


class NewStep:
    """A step that a tool writes into a root. A `with` block ends with all of its roles committed, or with none.

    Until the block ends, no trainer and no other tool can save these roles below the root.

    Args:
        root: the folder of the steps.
        step: the step's number.
        roles: the roles that the tool writes.
        force: True to replace checkpoints of these roles that the step already has. A pinned step is never replaced.

    Attributes:
        attempt: the id of this write.

    Raises:
        InvalidArgumentError: the step is pinned, has a role already, or has a folder with another name.
        LockedError: a trainer saves below the root, or another tool writes one of the roles.

    Example:
        >>> with NewStep(root, 10, ["actor"]) as new:  # doctest: +SKIP
        ...     staging = new.open("actor")
        ...     new.publish()
    """

    def __init__(self, root: Path, step: int, roles: Sequence[str], force: bool = False) -> None:
        self._root = root.absolute()
        self._step = step
        self._roles = tuple(roles)
        self._force = force
        self._staged: dict[Path, Path] = {}
        self._exit = ExitStack()
        self.attempt = commit.new_attempt()

    def __enter__(self) -> NewStep:
        check_may_write(self._root, self._step, self._roles, self._force)  # before anything is made
        with ExitStack() as stack:
            if not self._root.exists():
                stack.callback(commit.remove_if_empty, self._root)
            stack.enter_context(ToolLocks(self._root, self._roles))
            for role in self._roles:
                # A killed run may have left its folders. `alone=False`, because tools of older versions hold no lock.
                leftovers.remove_leftovers(self._root, role, alone=False)
            check_may_write(self._root, self._step, self._roles, self._force)
            self._exit = stack.pop_all()
        return self

    def check_space(self, sizes: Iterable[int]) -> None:
        """Checks that files of these sizes fit, as `new_folder.check_space` does."""
        check_space(file_names.step_dir(self._root, self._step), sizes)

    def open(self, role: str) -> Path:
        """Makes the staging folder of a role. Raises OSError."""
        role_dir = file_names.step_dir(self._root, self._step) / role
        self._staged[role_dir] = commit.open_staging(role_dir, self.attempt)
        return self._staged[role_dir]

    def publish(self) -> None:
        """Puts all opened roles in place, which have their manifests, and moves the tracker.

        Raises InvalidArgumentError if the step has been pinned meanwhile, and OSError.
        """
        check_may_write(self._root, self._step, self._roles, self._force)
        for role_dir, staging in self._staged.items():
            commit.publish(staging, role_dir, self.attempt)
        self._staged.clear()
        tracker.move_tracker(self._root)

    def __exit__(self, *error: object) -> None:
        for staging in self._staged.values():
            commit.discard(staging)
        self._exit.close()


def check_may_write(root: Path, step: int, roles: Sequence[str], force: bool = False) -> None:
    """Checks that a tool may write roles of a step: it replaces nothing, or what `force` allows.

    Raises:
        InvalidArgumentError: the step is pinned, has a role already, or has a folder with another name.
        OSError: the step cannot be read.
    """
    new = file_names.step_dir(root, step)
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


def _has_entries(folder: Path) -> bool:
    try:
        return any(folder.iterdir())
    except FileNotFoundError:
        return folder.is_symlink()
    except NotADirectoryError:
        return True
