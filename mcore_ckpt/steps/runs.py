"""Says which run a root belongs to, so that the checkpoints of two runs never mix.

A root has a small file with the identity of its run, which the first save makes. Each manifest has the identity, too,
and so has the remote store. What is of another run is never loaded unless it is named, never replaced and never
deleted. Checkpoints without an identity belong to the root that they are in.

A root that was moved or mounted elsewhere goes on as the same run. A copy of a root that is still there becomes a new
run, with the copied steps as its own. See docs/architecture.md.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import ManifestSummary
from mcore_ckpt.checkpoint.provenance import Run, RunParent, decode_run, encoded_run
from mcore_ckpt.errors import CheckpointCorruptError, CommitError
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io import limits
from mcore_ckpt.io.files import claim_file, read_small, replace_file, sync_dir, sync_file
from mcore_ckpt.ranks.hosts import this_host
from mcore_ckpt.steps.branches import commit_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RootRun:
    """The contents of a root's file.

    Attributes:
        run: the run.
        inherits: the ids of other runs whose steps were in the root when the run began. They belong to it, too.
    """

    run: Run
    inherits: tuple[str, ...] = ()

    @property
    def ids(self) -> frozenset[str]:
        """The ids whose steps in the root belong to the run."""
        return frozenset({self.run.id, *self.inherits})


def encode(known: RootRun) -> bytes:
    """Returns the bytes of the file."""
    return fields.encode({**encoded_run(known.run), "inherits": list(known.inherits)})


def decode(data: bytes) -> RootRun | None:
    """Returns what `encode` has encoded; None if the data are damaged."""
    with suppress(fields.FieldError):
        record = fields.decode(data)
        return RootRun(decode_run(record), fields.get_names(record, "inherits"))
    return None


def read_root_run(root: Path) -> RootRun | None:
    """Returns the run of a root, as its file says it; None if there is no file, or none that can be read."""
    try:
        return decode(read_small(root / file_names.RUN_FILE, limits.SMALL_BYTES))
    except (OSError, CheckpointCorruptError):
        return None


def is_copied(root: Path, run: Run) -> bool:
    """True if the root that a run was made with is still there, and is another folder."""
    original = Path(run.root or root)
    if str(root.resolve()) == str(original):
        return False
    known = read_root_run(original)
    with suppress(OSError):
        return known is not None and known.run.id == run.id and not original.samefile(root)
    return False


def own_ids(root: Path) -> frozenset[str] | None:
    """Returns the ids of the runs whose steps in a root belong to it. None: all, as in a root without identity."""
    known = read_root_run(root)
    return None if known is None or is_copied(root, known.run) else known.ids


def whose(run: Run | None) -> str:
    """Says whose a checkpoint is that belongs to another run, and what to do."""
    return (
        f"belongs to another run ({run}), so it is neither loaded nor deleted here: to load it, name its path, or its "
        "step in a store"
    )


def check_own(root: Path, folder: Path, heads: Iterable[ManifestSummary]) -> None:
    """Raises CommitError if a folder that is about to be replaced or removed has a checkpoint of another run."""
    ids = own_ids(root)
    for head in heads:
        if ids is not None and head.run is not None and head.run.id not in ids:
            raise _not_replaced(folder, head)


def check_same_run(folder: Path, head: ManifestSummary, run: Run | None) -> None:
    """Raises CommitError if what is in a folder belongs to another run than what is about to replace it."""
    if head.run is not None and run is not None and head.run.id != run.id:
        raise _not_replaced(folder, head)


def _not_replaced(folder: Path, head: ManifestSummary) -> CommitError:
    return CommitError(
        f"{folder}: step {head.step} is there already, and belongs to another run ({head.run}): save to another "
        "folder, or move that step away"
    )


def in_store(root: Path, store: Run | None, own: RootRun | None) -> Run | None:
    """Returns the run whose steps in a store or on nodes belong to a root; None if only those without identity do.

    Args:
        root: the root.
        store: the run that the store or the nodes belong to.
        own: the run of the root. A root without identity, such as one on a new disk, takes over the run of a store that
            was filled from a root of the same path.
    """
    if own is not None and not is_copied(root, own.run):
        return own.run
    return store if store is not None and store.root == str(root.resolve()) else None


def settle(
    home: Path, root: Path, heads: Collection[ManifestSummary], took_over: Run | None, parent: RunParent | None
) -> RootRun:
    """Returns the run of a root, and writes its file, durably, if it is missing or not true any more.

    Only the process that holds a role's trainer lock calls it, before its first commit.

    Args:
        home: the folder that has the file: the root, or a node's folder if nothing is saved to the root.
        root: the root.
        heads: what the manifests in these folders say.
        took_over: the run of a store or of nodes, if the training goes on from there; None otherwise.
        parent: the step of another run that was loaded, if the training goes on from there.

    Raises OSError.
    """
    here = Run("", None, str(root.resolve()), this_host().partition(" ")[0])
    path, known = home / file_names.RUN_FILE, read_root_run(home)
    if known is not None and not is_copied(root, known.run):
        if known.run.root == here.root:
            return known
        known = replace(known, run=_at(here, known.run))
        replace_file(path, encode(known))
        return known
    made = _new(root, known or read_root_run(root), heads, took_over, parent, here)
    if path.exists():  # a copy's, or damaged
        replace_file(path, encode(made))
        return made
    try:
        claim_file(path, encode(made))
    except FileExistsError:  # another role was faster
        return read_root_run(home) or made
    sync_file(path)
    sync_dir(home)
    return made


def _new(
    root: Path,
    known: RootRun | None,
    heads: Collection[ManifestSummary],
    took_over: Run | None,
    parent: RunParent | None,
    here: Run,
) -> RootRun:
    identified = [head for head in heads if head.run is not None]
    last = max(identified, key=_order, default=None)
    source = known.run if known is not None else last.run if last is not None else None
    if source is not None and is_copied(root, source):
        parent = parent or RunParent(source.id, 0 if last is None else last.step)
        logger.warning("%s: is a copy of %s, so it goes on as a new run", root, source.root)
        ids = {head.run.id for head in identified if head.run is not None}
        inherited = {*ids, source.id, *(known.inherits if known is not None else ())}
        return RootRun(replace(here, id=uuid.uuid4().hex, parent=parent), tuple(sorted(inherited)))
    if known is not None:
        return replace(known, run=_at(here, known.run))
    if source is not None:
        inherits = () if source.parent is None or not source.parent.run else (source.parent.run,)
        return RootRun(_at(here, source), inherits)
    if took_over is not None:
        return RootRun(_at(here, took_over))
    return RootRun(replace(here, id=uuid.uuid4().hex, parent=parent))


def _order(head: ManifestSummary) -> tuple[int, int]:
    return commit_of(head.step, [head.commit]).number, head.step


def _at(here: Run, run: Run) -> Run:
    return replace(run, root=here.root, host=here.host)
