"""Tells which files of a checkpoint one node's folder of the fast tier has, and which nodes have the other files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from mcore_ckpt.checkpoint.manifest import FileRecord, Manifest
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
from mcore_ckpt.steps.listing import StepStatus, newest_complete
from mcore_ckpt.steps.node_steps import files_here


@dataclass(frozen=True)
class NodeFiles:
    """The files of one role's checkpoint that one node's folder has.

    Attributes:
        here: the files that are here, in their full size.
        elsewhere: the other files, each with the names of the nodes that have it or will get it.
        nodes: how many nodes have written files of the checkpoint.
        whole_nodes: how many of these nodes have all their files here.
    """

    here: tuple[FileRecord, ...]
    elsewhere: tuple[tuple[FileRecord, tuple[str, ...]], ...]
    nodes: int
    whole_nodes: int

    def __str__(self) -> str:
        count = len(self.here) + len(self.elsewhere)
        return f"{self.whole_nodes} of {self.nodes} nodes' files ({len(self.here)} of {count} files)"

    @property
    def is_whole(self) -> bool:
        """True if all files are here, so that the folder is a checkpoint by itself."""
        return not self.elsewhere

    @property
    def nbytes(self) -> int:
        """The size of the files that are here, in bytes."""
        return sum(file.size for file in self.here)

    def by_nodes(self) -> list[tuple[tuple[str, ...], list[FileRecord]]]:
        """Groups the files that are not here by the names of the nodes that have them."""
        found: dict[tuple[str, ...], list[FileRecord]] = {}
        for file, names in self.elsewhere:
            found.setdefault(names, []).append(file)
        return list(found.items())


def files_of_node(role_dir: Path, manifest: Manifest) -> NodeFiles | None:
    """Returns which files of a checkpoint a folder has; None if the checkpoint was not saved into the fast tier."""
    return None if manifest.placement is None else files_among(manifest, files_here(role_dir, manifest))


def files_among(manifest: Manifest, here: Iterable[int]) -> NodeFiles:
    """Returns the files of a checkpoint that has a placement. `here` has the positions of the files that are here."""
    placement, there = manifest.placement, frozenset(here)
    assert placement is not None
    # Each file counts only for the node that has written it, and not for the nodes that have copies of it.
    writers = {nodes[0] for nodes in placement.by_file}
    partly = {nodes[0] for position, nodes in enumerate(placement.by_file) if position not in there}
    return NodeFiles(
        here=tuple(file for position, file in enumerate(manifest.files) if position in there),
        elsewhere=tuple(
            (file, tuple(placement.nodes[node] for node in placement.by_file[position]))
            for position, file in enumerate(manifest.files)
            if position not in there
        ),
        nodes=len(writers),
        whole_nodes=len(writers - partly),
    )


def as_in_folder(root: Path, statuses: Sequence[StepStatus]) -> list[StepStatus]:
    """Returns the steps of a folder. In a node's folder of the fast tier, one node's files make a step complete.

    If a root has a step of the fast tier, somebody has copied the step there from one node, and the copy is only a part
    of the step.

    Raises OSError like `newest_complete`.
    """
    return [replace(each, in_node_folder=True) for each in statuses] if is_node_folder(root, statuses) else [*statuses]


def is_node_folder(root: Path, statuses: Sequence[StepStatus]) -> bool:
    """True if these steps, and the root's newest whole step, if any, are of the fast tier.

    False if none of these steps is committed.
    """
    if not any(status.committed for status in statuses) or not all(map(_is_placed, statuses)):
        return False
    whole = newest_complete(root)
    return whole is None or _is_placed(whole)


def _is_placed(status: StepStatus) -> bool:
    with suppress(CheckpointCorruptError, CheckpointNotFoundError):
        return all(read_manifest(status.role_dir(role)).placement is not None for role in status.committed)
    return False


def check_not_of_one_node(role_dirs: Sequence[Path]) -> None:
    """Raises CheckpointNotFoundError if a role's files are only partly here, because other nodes have the rest."""
    for role_dir in role_dirs:
        found = files_of_node(role_dir, read_manifest(role_dir))
        if found is not None and not found.is_whole:
            raise CheckpointNotFoundError(
                f"{role_dir}: is one node's part of a checkpoint, with {found}: put the folders of all nodes together "
                "with `mcore-ckpt collect NODEFOLDER... DST`, and use DST"
            )
