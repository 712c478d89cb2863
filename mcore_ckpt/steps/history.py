"""Tracks the run of a trainer and the checkpoint to go on from, and gives each commit its number and parent.

Only rank 0 uses this module. Rank 0 makes manifests only while it holds the role's lock.

A new number is one more than the largest number that rank 0 has seen. Rank 0 sees the numbers in the root and on its
node at the start, the numbers on other nodes at a load, and the numbers of its own commits. Lost nodes may come back,
and a store may have steps that the root lacks. So a training that saves to its nodes or to a store reserves numbers in
`.run.json`, and the next training begins above the reserved numbers. (If a training asked the store at each start, a
save would have to wait for the store.) A role that commits to a step takes the number of the step's other roles, if
that number is higher than the role's own last number. If two roles choose the same number for two steps at the same
time, the higher step counts as the later commit, so no harm is done.

A load also notes the commit numbers of the other roles' later checkpoints. The training gives these commits up, so none
of its roles may share such a number. Otherwise, a checkpoint that one role saves now and a checkpoint that another role
saved before the restart would look like one step. Therefore all roles of a training must load before one of them saves.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import Manifest, ManifestSummary
from mcore_ckpt.checkpoint.provenance import Run, RunParent
from mcore_ckpt.errors import RemoteError
from mcore_ckpt.io.files import make_folder
from mcore_ckpt.steps import runs
from mcore_ckpt.steps.branches import Position
from mcore_ckpt.steps.listing import list_steps, step_status
from mcore_ckpt.steps.read_lock import reading
from mcore_ckpt.steps.remote_steps import RemoteSteps
from mcore_ckpt.steps.runs import Ownership, RootRun
from mcore_ckpt.steps.same_root import SameRoot

logger = logging.getLogger(__name__)

# The run of a checkpoint that has no identity and is not in the root, on this node or in the store. No root owns such a
# checkpoint.
_UNKNOWN = RootRun(Run(""))


class RunHistory:
    """The run of one manager, and its place among the commits.

    `home` is the folder with the identity of the run: the root, or a folder in the node's folder if nothing is saved to
    the root.
    """

    def __init__(
        self, root: Path, role: str, home: Path, node_folder: Path | None = None, remote: RemoteSteps | None = None
    ) -> None:
        self._root, self._role, self._home, self._remote = root, role, home, remote
        self._folders = [home] if node_folder is None else [home, node_folder]
        self._lock = threading.Lock()  # a drain and a save can make their manifests at the same time
        self._position = Position()
        self._run: Run | None = None
        self._took_over: RootRun | None = None
        self._parent: RunParent | None = None
        # The checkpoint that was loaded or saved last, and its folder or URL.
        self._last: tuple[ManifestSummary, Path | str] | None = None
        self._stamped: Path | None = None  # the folder of the last manifest
        self._hold_lock = threading.Lock()  # a drain and a save can end `hold` at the same time
        self._held = ExitStack()
        # The largest commit number that was known when `_held` began. Saves that begin later have larger numbers.
        self._held_at = 0
        self._same_home = SameRoot(home)

    def go_on_from(self, other: RunHistory) -> None:
        """Goes on from the last checkpoint that another manager of the training has loaded or saved, in any root."""
        if other._last is not None:
            self._go_on(*other._last, [])
        if (other._root, other._role) == (self._root, self._role):
            self._position = other._position
        elif other._root == self._root:
            self._position = self._position.seen(other._position.last, 0)
        with other._hold_lock:
            held = other._held.pop_all()
        self._hold(held)

    def hold(self) -> None:
        """Protects the loaded checkpoint, if it is in the root, from deletion and replacement until `release`.

        The training may have no other checkpoint to go back to. A program that only loads needs no trainer lock, so
        this method takes a read lock, which lets another training start.
        """
        held = ExitStack()
        if self._last is not None:
            # A checkpoint that was loaded from the nodes may be in the root, too. Then the copy in the root is
            # protected.
            step = file_names.step_dir(self._root, self._last[0].step) / self._role
            place = self._last[1]
            is_here = isinstance(place, Path) and _is_below(self._root, place)
            held.enter_context(reading([Path(place) if is_here else step]))
        self._hold(held)

    def release(self) -> None:
        """Ends `hold`, because the training is over, or goes on from another checkpoint."""
        self._hold(ExitStack())

    def _hold(self, held: ExitStack) -> None:
        with self._hold_lock:
            before, self._held = self._held, held
            self._held_at = max(self._position.last, self._position.of_role)
        before.close()

    def warn_of_pins(self) -> None:
        """Warns of pinned steps after the loaded step, because the training may save them again. Raises nothing."""
        if self._last is None:
            return
        last = self._last[0].step
        with suppress(OSError):
            pinned = [each for each in list_steps(self._root) if each.pinned and each.step > last]
            for step in (each.step for each in pinned if self._role in each.committed):
                logger.warning(
                    "%s: step %d is pinned, but the training goes on from step %d, and replaces it if it saves step %d "
                    "again: to keep what is there, call `mcore-ckpt branch %s %d NEWROOT` before",
                    self._root,
                    step,
                    last,
                    step,
                    self._root,
                    step,
                )

    def in_root(self, head: ManifestSummary) -> None:
        """Notes that a checkpoint of the role is committed. Ends `hold` if that save began after the load.

        An earlier step may also be copied from the nodes and committed after the load. Its commit does not end `hold`:
        even if that step goes on from the loaded checkpoint, the training does not go on from that step.
        """
        with self._hold_lock:
            has_gone_on = head.commit is not None and head.commit.number > self._held_at
            ended = self._held.pop_all() if has_gone_on else ExitStack()
        ended.close()

    def seen(self, heads: Iterable[ManifestSummary]) -> None:
        """Notes the commit numbers of checkpoints, which may be only in a store, or only on other nodes."""
        for head in heads:
            self._position = self._position.seen(head.number, head.number if head.role == self._role else 0)

    def loaded(self, head: ManifestSummary, place: Path | str) -> None:
        """Notes that the training goes on from a checkpoint. `place` is its folder, or its URL in the store."""
        together = self._together(isinstance(place, str))
        self._go_on(head, place, together)
        if together and self._position.branch:
            self._position = self._position.seen(0, max(each.number for each in together))

    def _together(self, with_store: bool) -> list[ManifestSummary]:
        """Returns all roles' checkpoints that have a commit number, in the steps that include this role.

        Raises nothing, because the checkpoint is loaded already, and the other ranks go on.
        """
        heads: list[ManifestSummary] = []
        try:
            heads += self._heads()
            if with_store and self._remote is not None:
                heads += (head for step in self._remote.steps() for head in step.found.values())
        except (OSError, RemoteError) as error:
            logger.warning("what other roles have saved after the loaded step is not known, because of %s", error)
        steps_of_role = {each.step for each in heads if self._role in each.roles}
        return [each for each in heads if each.step in steps_of_role and each.commit is not None]

    def _go_on(self, head: ManifestSummary, place: Path | str, together: Sequence[ManifestSummary]) -> None:
        """Moves the position to a checkpoint. `together` are the checkpoints that `_together` returns."""
        settled = self._elsewhere(place)
        own = runs.below(self._root) if _is_below(self._root, place) else settled
        self._last = head, place
        if own.owns(head):
            others = [each.commit for each in together if each.step == head.step and each.role != self._role]
            self._position = self._position.at(head.step, head.commit, head.attempt, others)
            self._took_over = own.known or (None if head.run is None else RootRun(head.run))
            if own is settled and head.run is not None and runs.read_root_run(self._home) is None:
                logger.warning(
                    "%s: has no run yet, so the training goes on as %s, which a root at this path began, and will "
                    "delete old steps of that run. It has loaded step %d of that run from %s. If the earlier folder "
                    "was moved and another training still uses it, stop this training and start it with another path "
                    "and another store",
                    self._root,
                    head.run,
                    head.step,
                    place,
                )
            # The copied steps in a copied root name the parent of the run that wrote them, not of this run. So take the
            # parent only from a step that this run wrote.
            self._parent = head.run.parent if head.run is not None and settled.is_of(head.run) else None
        else:
            # The commit numbers of another run do not count in this run, so begin with an empty branch.
            self._position = replace(self._position, parent=head.attempt, branch=())
            self._took_over = None
            self._parent = RunParent(_id(head) or "", head.step)

    def _elsewhere(self, place: Path | str) -> Ownership:
        """Returns which of the checkpoints at a place outside the root belong to the root."""
        claimed: RootRun | None = None
        if isinstance(place, str):
            with suppress(RemoteError):  # raise nothing: the checkpoint is loaded already, and the other ranks go on
                claimed = None if self._remote is None else self._remote.claimed()
        elif not any(_is_below(folder, place) for folder in self._folders):
            claimed = _UNKNOWN
        return runs.elsewhere(self._root, self._home, claimed)

    def check_may_replace(self, role_dir: Path, heads: Iterable[ManifestSummary]) -> None:
        """Raises CommitError if a folder, below the root or elsewhere, has a checkpoint of another run.

        Raises OSError.
        """
        own = runs.below(self._root) if _is_below(self._root, role_dir) else runs.elsewhere(self._root, self._home)
        own.check(role_dir, heads)

    def stamp(self, manifest: Manifest, role_dir: Path) -> Manifest:
        """Returns the manifest of a save to `role_dir`, with its run and its commit filled in. Raises OSError."""
        with self._lock:
            run = self._settled()
            if self._stamped is not None:
                # Another role may have saved the step of the last manifest again, with a number that this role does not
                # know. So look at that step again.
                self._position = self._position.seen(self._largest_of_others(self._stamped, run) or 0, 0)
            self._stamped = role_dir
            commit = self._position.next(self._largest_of_others(role_dir, run))
            return replace(manifest, run=replace(run, parent=self._parent or run.parent), commit=commit)

    def _largest_of_others(self, role_dir: Path, run: Run) -> int | None:
        """Returns the largest commit number that the other roles of a step have in this run; None if there is none."""
        heads = [head for head in _manifests_of_step(role_dir) if head.role != self._role and _id(head) == run.id]
        return max((head.commit.number for head in heads if head.commit is not None), default=None)

    def committed(self, manifest: Manifest) -> None:
        """Notes that a save is committed."""
        assert manifest.commit is not None
        with self._lock:
            self._position = self._position.after(manifest.commit, manifest.attempt)
            self._last = manifest.head, file_names.step_dir(self._root, manifest.step)

    def _settled(self) -> Run:
        if self._run is None:
            self._same_home.check()
            make_folder(self._home)
            heads = self._heads()
            self.seen(heads)
            if self._remote is not None and self._position.parent is not None and not heads:
                # The root is on a new disk. If the user has named the step to load, the store may have later steps, so
                # note their commit numbers, too.
                with suppress(RemoteError):
                    self.seen(head for step in self._remote.steps() for head in step.found.values())
            known = runs.settle(self._home, self._root, heads, self._took_over, self._parent)
            self._position = self._position.seen(known.reserved.get(self._role, 0), 0)
            if self._remote is not None or len(self._folders) > 1:
                runs.reserve(self._home, self._role, self._position.last)
            self._run = known.run
        return self._run

    def _heads(self) -> list[ManifestSummary]:
        """Returns the summaries of this training's manifests in the root and on this node."""
        own = runs.elsewhere(self._root, self._home)
        found = ((folder, head) for folder in self._folders for each in list_steps(folder) for head in each.heads)
        return [head for folder, head in found if folder == self._root or own.owns(head)]


def _is_below(folder: Path, place: Path | str) -> bool:
    return isinstance(place, Path) and folder.resolve() in place.resolve().parents


def _manifests_of_step(role_dir: Path) -> list[ManifestSummary]:
    step_path = role_dir.parent
    return [] if file_names.parse_step(step_path.name) is None else step_status(step_path).heads


def _id(head: ManifestSummary) -> str | None:
    return None if head.run is None else head.run.id
