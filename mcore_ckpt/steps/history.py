"""Knows the run of one trainer, and from which checkpoint it goes on. So it gives each commit its number and parent.

Only rank 0 uses it, under the role's lock, when it makes a manifest.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import Manifest, ManifestSummary
from mcore_ckpt.checkpoint.provenance import Commit, Run, RunParent
from mcore_ckpt.errors import RemoteError
from mcore_ckpt.io.files import make_folder
from mcore_ckpt.steps import runs
from mcore_ckpt.steps.branches import Position, commit_of
from mcore_ckpt.steps.listing import list_steps, step_status
from mcore_ckpt.steps.remote_steps import RemoteSteps


class Head(Protocol):
    """What this module needs of a manifest, wherever it is."""

    @property
    def step(self) -> int: ...
    @property
    def role(self) -> str: ...
    @property
    def commit(self) -> Commit | None: ...


class RunHistory:
    """What one manager knows of its run and of its place among the commits.

    Args:
        root: the folder of the steps.
        role: the role that is saved.
        home: the folder that has the identity of the run: the root, or a node's folder if nothing is in the root.
        node_folder: this node's folder of the fast tier; None without one.
        remote: the steps in the remote store; None without one.
    """

    def __init__(
        self,
        root: Path,
        role: str,
        home: Path,
        node_folder: Path | None = None,
        remote: RemoteSteps | None = None,
    ) -> None:
        self._root, self._role, self._home, self._remote = root, role, home, remote
        self._folders = [home] if node_folder in (None, home) else [home, node_folder]
        self._lock = threading.Lock()  # a drain and a save can be at their manifests at once
        self._position = Position()
        self._run: Run | None = None
        self._took_over: Run | None = None
        self._parent: RunParent | None = None

    def go_on_from(self, other: RunHistory) -> None:
        """Continues where another manager of the same training has stopped."""
        self._position, self._parent, self._took_over = other._position, other._parent, other._took_over

    def seen(self, heads: Iterable[Head]) -> None:
        """Notes checkpoints that may be nowhere else, such as those in a store or on other nodes."""
        for head in heads:
            number = commit_of(head.step, [head.commit]).number
            self._position = self._position.seen(number, number if head.role == self._role else 0)

    def loaded(self, manifest: Manifest, named: bool) -> None:
        """Notes that the training goes on from a checkpoint.

        Args:
            manifest: its manifest.
            named: True if it was named by a path that is not below the root.
        """
        known = runs.read_root_run(self._home)
        is_own = not named or (known is not None and manifest.run is not None and manifest.run.id == known.run.id)
        if is_own:
            self._position = self._position.at(manifest.step, manifest.commit, manifest.attempt)
            self._took_over = manifest.run
            self._parent = None if manifest.run is None else manifest.run.parent
        else:
            # Numbers of another run say nothing here.
            self._position = replace(self._position, parent=manifest.attempt, branch=())
            self._took_over = None
            self._parent = RunParent("" if manifest.run is None else manifest.run.id, manifest.step)

    def stamp(self, manifest: Manifest, role_dir: Path) -> Manifest:
        """Returns the manifest of a save with its run and its commit. Raises OSError.

        Args:
            manifest: the manifest.
            role_dir: where it will be. Beside it may be other roles of the step.
        """
        with self._lock:
            run = self._settled()
            others = [
                head.commit.number
                for head in _beside(role_dir)
                if head.role != self._role and head.commit is not None and _id(head) == run.id
            ]
            commit = self._position.next(max(others, default=None))
            return replace(manifest, run=replace(run, parent=self._parent or run.parent), commit=commit)

    def committed(self, manifest: Manifest) -> None:
        """Notes that a save is committed."""
        assert manifest.commit is not None
        with self._lock:
            self._position = self._position.after(manifest.commit, manifest.attempt)

    def _settled(self) -> Run:
        if self._run is None:
            make_folder(self._home)
            heads = [head for folder in self._folders for status in list_steps(folder) for head in status.heads]
            self.seen(heads)
            if self._remote is not None and self._position.parent is not None and not heads:
                # The root is on a new disk. Perhaps only one step was asked for, and the store has later ones.
                with suppress(RemoteError):
                    self.seen(head for step in self._remote.steps() for head in step.found.values())
            self._run = runs.settle(self._home, self._root, heads, self._took_over, self._parent).run
        return self._run


def _beside(role_dir: Path) -> list[ManifestSummary]:
    step_path = role_dir.parent
    return [] if file_names.parse_step(step_path.name) is None else step_status(step_path).heads


def _id(head: ManifestSummary) -> str | None:
    return None if head.run is None else head.run.id
