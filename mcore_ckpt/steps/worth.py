"""Determines what a step is worth: whole, only claimed by its manifests, or partial.

A manifest is written last, so a step that has all manifests was whole once. Only a look at its files shows whether the
step still is whole: an interrupted copy may lack the files in subfolders but have the manifest, and an interrupted
deletion may leave the manifest. All code that loads, deletes, uploads or shows steps uses this module, for steps below
a root, on nodes and in a store.

The look takes one listing of each folder and the sizes of the files. No file except the manifest is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_ckpt.checkpoint import file_names, manifest_text
from mcore_ckpt.checkpoint.manifest import Manifest, ManifestSummary
from mcore_ckpt.checkpoint.reading import manifest_bytes, parse_manifest
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
from mcore_ckpt.io import tuning
from mcore_ckpt.io.folder_sizes import sizes_of
from mcore_ckpt.io.threads import results_of
from mcore_ckpt.steps.branches import StepCommit, commit_of

# How many files a message names.
_NAMED = 3
# A message adds this if the files that are here belong to one node.
_PART = (
    "; what is here is one node's part of a checkpoint: put the folders of all nodes together with `mcore-ckpt collect`"
)
# How many times, at most, to look at a checkpoint that is replaced or moved during each look.
_LOOKS = 3


class Worth(Enum):
    """What a step is worth."""

    WHOLE = "whole"
    CLAIMED = "claimed"
    PARTIAL = "partial"


@dataclass(frozen=True)
class Lack:
    """The files (`paths`) that a role's checkpoint lacks, or that have another size than in its manifest.

    `place` is the role's folder, or its URL in a remote store, and `problem` says what is wrong, for messages.
    """

    place: Path | str
    problem: str
    paths: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.place}: {self.problem}"


class Weighed:
    """One step below a root (`StepStatus`), in a remote store (`RemoteStep`) or on nodes (`NodeStep`)."""

    if TYPE_CHECKING:  # properties that each kind of step has; `lacks` and `reason` raise OSError or RemoteError

        @property
        def step(self) -> int: ...
        @property
        def committed(self) -> frozenset[str]: ...
        @property
        def declared(self) -> frozenset[str]: ...
        @property
        def problems(self) -> tuple[str, ...]: ...
        @property
        def pinned(self) -> bool: ...
        @property
        def heads(self) -> Sequence[ManifestSummary]: ...
        @property
        def lacks(self) -> tuple[Lack, ...]: ...
        @property
        def reason(self) -> str: ...

    @property
    def where(self) -> Path | str:
        """The name of the step in messages."""
        return file_names.step_name(self.step)

    @property
    def is_of_other_run(self) -> bool:
        """True if the step has roles that belong to another run."""
        return False

    @cached_property
    def commit(self) -> StepCommit:
        """The place of the step among all commits, by its committed roles (`heads`)."""
        return commit_of(self.step, (head.commit for head in self.heads))

    @property
    def claims(self) -> Sequence[ManifestSummary]:
        """The summaries of all manifests of the step, including the manifests of replaced attempts."""
        return self.heads

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of the committed roles, by name. If roles share a metric, the first role's value counts."""
        last_first = sorted(self.heads, key=lambda head: head.role, reverse=True)
        return {name: value for head in last_first for name, value in head.metrics.items()}

    @property
    def dropped(self) -> frozenset[str]:
        """The contents that retention has removed from one of the step's roles, such as "optimizer"."""
        return frozenset(word for head in self.heads for word in head.dropped)

    def has_lost(self, needed: Mapping[str, Collection[str]]) -> bool:
        """True if retention has removed contents that are needed. `needed` has the needed contents of each role."""
        return any(word in needed.get(head.role, ()) for head in self.heads for word in head.dropped)

    @property
    def given_up(self) -> frozenset[str]:
        """The roles whose branch another role has given up.

        The other role has saved the step again, and these roles have not. A role without a commit number, such as a
        role of plain files, is not compared.
        """
        commit = self.commit
        return frozenset(head.role for head in self.heads if head.commit and commit.has_given_up(head.commit.number))

    @cached_property
    def missing(self) -> frozenset[str]:
        """The declared roles that still have to commit to the step, or to commit to it again."""
        return self.declared - self.committed | self.given_up

    def why_missing(self, verb: str) -> str:
        """Says which roles are missing, and why. `verb` is "committed" or "uploaded"."""
        again, never = ", ".join(sorted(self.given_up)), ", ".join(sorted(self.missing - self.given_up))
        reasons = [f"not {verb} by {never}"] if never else []
        reasons += [f"not {verb} again by {again}, which is of a branch that was given up"] if again else []
        return "; ".join(reasons)

    @property
    def is_claimed(self) -> bool:
        """True if all declared roles have manifests, and all these manifests are of one branch.

        Looks at no other files.
        """
        return bool(self.committed) and not self.missing

    @property
    def worth(self) -> Worth:
        """What the step is worth."""
        if not self.is_claimed:
            return Worth.PARTIAL
        return Worth.CLAIMED if self.lacks else Worth.WHOLE

    @property
    def is_complete(self) -> bool:
        """True if the step is whole: every role has its manifest, and all files that the manifests list."""
        return self.worth is Worth.WHOLE


def look_at_all(steps: Iterable[Weighed]) -> None:
    """Looks at the files of all steps that are claimed, many at a time. Raises OSError or RemoteError."""
    results_of([step for step in steps if step.is_claimed], lambda step: step.lacks, tuning.LOOK_THREADS)


def lack_of(role_dir: Path, find_again: Callable[[], Path] | None = None, in_node_folder: bool = False) -> Lack | None:
    """Finds the files that a role's manifest lists and that are missing or cut. Returns None if there are none.

    Args:
        role_dir: the role's folder.
        find_again: returns the role's folder if a save has replaced or moved it during the look.
        in_node_folder: True in a node's folder of the fast tier, where other nodes have other files by design. In such
            a folder, the result is None if all files that one of the nodes has written are here.

    Raises OSError: a folder cannot be listed because of an error that may be temporary.
    """
    lack = None
    for _ in range(_LOOKS):
        data, lack = _look(role_dir, in_node_folder)
        if lack is None:
            return None
        before, role_dir = role_dir, role_dir if find_again is None else find_again()
        if role_dir == before and _data(role_dir) == data:
            return lack
    return lack


def _look(role_dir: Path, in_node_folder: bool) -> tuple[bytes | None, Lack | None]:
    try:
        path, data = manifest_bytes(role_dir)
        sizes = manifest_text.decode_sizes(data)
        manifest = parse_manifest(data, path) if sizes is None else None
    except CheckpointNotFoundError:
        return None, Lack(role_dir, "its manifest is gone, because the step was deleted or is being replaced")
    except CheckpointCorruptError as error:
        return None, Lack(role_dir, str(error).removeprefix(f"{role_dir}/"))
    if manifest is not None:
        sizes = {file.path: file.size for file in manifest.files}
    assert sizes is not None
    there = sizes_of(role_dir, sizes)
    lack = compare(role_dir, sizes, there)
    if manifest is not None and lack is not None and _has_part_of_a_node(manifest, lack):
        return data, None if in_node_folder else replace(lack, problem=lack.problem + _PART)
    return data, lack


def _data(role_dir: Path) -> bytes | None:
    try:
        return manifest_bytes(role_dir)[1]
    except (CheckpointNotFoundError, CheckpointCorruptError):
        return None


def compare(place: Path | str, wanted: Mapping[str, int], there: Mapping[str, int]) -> Lack | None:
    """Compares the sizes in a manifest (`wanted`) with the sizes at `place` (`there`), by path. Ignores other files."""
    wrong = [path for path, size in wanted.items() if there.get(path) != size]
    if not wrong:
        return None
    sizes = {path: f"{there[path]} of {wanted[path]} bytes" if path in there else "missing" for path in wrong[:_NAMED]}
    named = ", ".join(f"{path} ({size})" for path, size in sizes.items())
    more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
    problem = f"the manifest is here, but {len(wrong)} of its {len(wanted)} files are missing or cut: {named}{more}"
    return Lack(place, problem, tuple(wrong))


def _has_part_of_a_node(manifest: Manifest, lack: Lack) -> bool:
    """True if the checkpoint is of the fast tier, and all files that one of the nodes has written are here."""
    if manifest.placement is None:
        return False
    wrong = set(lack.paths)
    files = zip(manifest.files, manifest.placement.by_file, strict=True)
    lacking = {nodes[0] for file, nodes in files if file.path in wrong}
    return len(lacking) < len(manifest.placement.nodes)
