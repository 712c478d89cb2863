"""Determines which run a root belongs to, so that the checkpoints of two runs never mix.

The first save writes a small file, `.run.json`, with the identity of the run into the root. Each manifest and the
remote store have the identity, too. A checkpoint of another run is loaded only if the user names it, and is never
replaced or deleted. Checkpoints without an identity belong to the root that they are in. `Ownership` decides which
checkpoints in the root, in a store or on nodes belong to the root.

A root that was moved or mounted elsewhere goes on as the same run. If the original root is still there, its copy
becomes a new run, to which the copied steps belong. See docs/architecture.md.

- Copied root. The file (or, if there is no file, the newest manifest) names a root. If that root is another folder,
  still exists, and has the same id, a new run begins. The parent of the new run is the newest step. The copied steps
  belong to the new run, too, because a user who copies a root wants to go on from the copy, and wants old steps to be
  deleted. An id alone would also claim later saves of the original, so the file keeps the largest number of the copied
  commits. The new identity follows from the copied file, so roles that replace the file at the same time agree on the
  identity. If this host cannot see the original, a copy looks like a moved root, so the original and the copy have the
  same identity.
- Lost file (`cp root/*` leaves it out). The newest manifest names the run, and the oldest manifest of each run names
  the run from which that run came. Once retention has deleted all steps of a run in this chain, nothing names the runs
  before that run.
- New disk. The root is empty, and a store or the nodes have steps. If a root of the same path has saved these steps,
  the new root takes them over, and a warning names their run, because the earlier root may only have been moved. A root
  at another path does not take the steps over, because nothing shows whether the user wants to continue the old
  training, or a new training names the old training's store by mistake. To continue the old training there, copy the
  store's `.run.json` into the root.
- The first upload to a store claims the store, by writing a copy of `.run.json` into it. If two runs claim a store at
  once, both read the file back, and the second run stops. The first run leaves the earlier uploads of the second run
  alone, because these uploads have the second run's id.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import ManifestSummary
from mcore_ckpt.checkpoint.provenance import Run, RunParent, decode_run, encoded_run
from mcore_ckpt.errors import CheckpointCorruptError, CommitError
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io import limits
from mcore_ckpt.io.files import claim_file, read_small, replace_file, sync_dir, sync_file
from mcore_ckpt.ranks.hosts import this_host

logger = logging.getLogger(__name__)

# How many commit numbers a manager reserves. No manager makes this many commits, and there are enough numbers for two
# thousand million managers, one after the other.
_RESERVED = 2**32


@dataclass(frozen=True)
class RootRun:
    """The contents of a root's file.

    Attributes:
        run: the run.
        inherits: the other runs whose steps were in the root when `run` began. Each run's id maps to the largest commit
            number of its steps in the root. These steps belong to `run`, too; later commits of the other runs do not.
        reserved: for each role, the largest number that a commit in a store or on nodes may have, whether or not that
            commit was ever seen.
    """

    run: Run
    inherits: Mapping[str, int] = field(default_factory=dict)
    reserved: Mapping[str, int] = field(default_factory=dict)

    def owns(self, run: Run, number: int) -> bool:
        """True if the commit of `run` with this number belongs to this root's run."""
        return run.id == self.run.id or number <= self.inherits.get(run.id, -1)


def encode(known: RootRun) -> bytes:
    """Returns the bytes of the file."""
    more = {"inherits": dict(known.inherits), "reserved": dict(known.reserved)}
    return fields.encode({**encoded_run(known.run), **more})


def decode(data: bytes) -> RootRun | None:
    """Decodes the result of `encode`; returns None if the data are damaged."""
    with suppress(fields.FieldError):
        record = fields.decode(data)
        inherits, reserved = fields.get_dict(record, "inherits"), fields.as_dict(record.get("reserved", {}), "reserved")
        numbers = ({key: fields.get_int(part, key) for key in part} for part in (inherits, reserved))
        return RootRun(decode_run(record), *numbers)
    return None


def read_root_run(root: Path) -> RootRun | None:
    """Returns the run in a root's file; None if there is no file, or the file is damaged. Raises OSError."""
    try:
        return decode(read_small(root / file_names.RUN_FILE, limits.SMALL_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except CheckpointCorruptError as error:
        # An OSError may be temporary, so raise it: without a run, the steps of all runs would count.
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        return None


def is_copied(root: Path, run: Run) -> bool:
    """True if the root that a run names is still there, belongs to that run, and is another folder than `root`."""
    original = Path(run.root or root)
    if str(root.resolve()) == str(original):
        return False
    with suppress(OSError):
        known = read_root_run(original)
        return known is not None and known.run.id == run.id and not original.samefile(root)
    return False


@dataclass(frozen=True)
class Ownership:
    """Decides which checkpoints belong to a root, in its own folder, in its store, or on its nodes.

    Attributes:
        known: the run of the root; None if the root has no run.
        path: the path of the root. If the root has no run, the steps that a root of this path has saved belong to it.
            If the root has neither run nor path, all steps belong to it.
        unsigned: the run that owns checkpoints without identity; None if they belong to the root.
    """

    known: RootRun | None = None
    path: str | None = None
    unsigned: Run | None = None

    def owns(self, head: ManifestSummary) -> bool:
        """True if a checkpoint belongs to the root."""
        run = head.run or self.unsigned
        if run is None:
            return True
        if self.known is None:
            return self.path in (None, run.root)
        return self.known.owns(run, head.number)

    def is_of(self, run: Run | None) -> bool:
        """True if the root is known to have this run."""
        return run is not None and self.known is not None and self.known.run.id == run.id

    def check(self, folder: Path, heads: Iterable[ManifestSummary]) -> None:
        """Raises CommitError if a folder that is about to be replaced or removed has a checkpoint of another run."""
        for head in heads:
            if not self.owns(head):
                raise CommitError(
                    f"{folder}: step {head.step} is there already, and belongs to another run ({head.run}): save to "
                    "another folder, or move that step away"
                )


def below(root: Path) -> Ownership:
    """Returns which checkpoints below a root belong to it. Until the root's first save, all checkpoints belong to it.

    Raises OSError.
    """
    return Ownership(read_root_run(root))


def elsewhere(root: Path, home: Path | None = None, claimed: RootRun | None = None) -> Ownership:
    """Returns which checkpoints in a store, or on nodes, a root owns. Raises OSError.

    A root without identity, such as a root on a new disk, takes over the checkpoints that a root of the same path has
    saved. The identity is in `home`, or in the root if `home` is None. `claimed` is the run that has claimed the store.
    """
    known, path = read_root_run(home or root), str(root.resolve())
    if known is not None and is_copied(root, known.run):
        known = None
    if known is None and claimed is not None and claimed.run.root == path:
        known = claimed
    return Ownership(known, path, None if claimed is None else claimed.run)


def whose(run: Run | None) -> str:
    """Says which run owns a checkpoint of another run, and what the user can do."""
    return (
        f"belongs to another run ({run}), so it is neither loaded nor deleted here: to load it, name its path, or its "
        "step in a store"
    )


def forked(root: Path, parent: RunParent) -> Run:
    """Returns the run of a root that begins with a step of another run."""
    return Run(uuid.uuid4().hex, parent, str(root.resolve()), this_host().partition(" ")[0])


def settle(
    home: Path, root: Path, heads: Collection[ManifestSummary], took_over: RootRun | None, parent: RunParent | None
) -> RootRun:
    """Returns the run of a root. Writes the root's file, durably, if it is missing or out of date. Raises OSError.

    Only the process that holds a role's trainer lock calls this function, before the process's first commit.

    Args:
        home: the folder that has the file: the root, or a folder in a node's folder if nothing is saved to the root.
        root: the root.
        heads: the summaries of the manifests in the root and on this node.
        took_over: the run of a store or of nodes, if the training goes on from there; None otherwise.
        parent: the step of another run that was loaded, if the training goes on from there.
    """
    path, where = home / file_names.RUN_FILE, str(root.resolve())
    here = Run(_new_id(path, where), None, where, this_host().partition(" ")[0])
    known = read_root_run(home)
    if known is not None and not is_copied(root, known.run):
        if known.run.root == here.root:
            return known
        known = replace(known, run=_at(here, known.run))
        replace_file(path, encode(known))
        return known
    made = _new(root, known or read_root_run(root), heads, took_over, parent, here)
    if path.exists():  # the file was copied with the root, or is damaged
        replace_file(path, encode(made))
        return made
    try:
        claim_file(path, encode(made))
    except FileExistsError:  # another role was faster
        return read_root_run(home) or made
    sync_file(path)
    sync_dir(home)
    return made


def reserve(home: Path, role: str, last: int) -> None:
    """Reserves commit numbers of a role above the last number that is known. Raises OSError.

    A later training begins above the reserved numbers, so its checkpoints are newer than all earlier checkpoints, even
    checkpoints that the training does not see.
    """
    known = read_root_run(home)
    if known is not None:
        reserved = {**known.reserved, role: last + _RESERVED}
        replace_file(home / file_names.RUN_FILE, encode(replace(known, reserved=reserved)))


def _new(
    root: Path,
    known: RootRun | None,
    heads: Collection[ManifestSummary],
    took_over: RootRun | None,
    parent: RunParent | None,
    here: Run,
) -> RootRun:
    source = known or _named_by(heads, here.root)
    if source is None:
        made = replace(here, parent=parent)
        return RootRun(made) if took_over is None else replace(took_over, run=_at(here, took_over.run))
    if not is_copied(root, source.run):
        return replace(source, run=_at(here, source.run))
    logger.warning("%s: is a copy of %s, so it goes on as a new run", root, source.run.root)
    own = Ownership(known)
    owned = [head for head in heads if head.run is not None and own.owns(head)]
    last = max(owned, key=_order, default=None)
    parent = parent or RunParent(source.run.id, 0 if last is None else last.step)
    return RootRun(replace(here, parent=parent), _largest_numbers(owned))


def _new_id(path: Path, root: str) -> str:
    """Returns the id of a run that replaces the run in a file, or of the first run if there is no file.

    The roles of a copied root may begin at once in several programs. Each program replaces the copied file. The id
    follows from the root's path and from the inode and the change time of the copied file, so all these programs use
    the same id, and no other copy has it.
    """
    try:
        stat = path.stat()
    except OSError:
        return uuid.uuid4().hex
    return uuid.uuid5(uuid.NAMESPACE_URL, f"{root} {stat.st_ino} {stat.st_ctime_ns}").hex


def _named_by(heads: Iterable[ManifestSummary], path: str) -> RootRun | None:
    """Reconstructs a root's lost file, as far as the manifests allow; None if no manifest has a run.

    The result names one run and the runs that it came from. If runs have saved to this path, the result names the run
    with the last commit among these runs. Otherwise, the result names the run with the last commit of all.
    """
    signed = [(head.run, head) for head in sorted(heads, key=_order) if head.run is not None]
    if not signed:
        return None
    by_run: dict[str, list[tuple[Run, ManifestSummary]]] = {}
    for run, head in signed:
        by_run.setdefault(run.id, []).append((run, head))
    last = max((run for run, _ in reversed(signed)), key=lambda run: run.root == path)
    came_from, id = list[ManifestSummary](), last.id
    while there := by_run.pop(id, None):
        came_from += [head for run, head in there if run.id != last.id]
        # The oldest manifest names the parent. Later manifests may name another run, because the training may have
        # loaded a step of that run.
        parent = there[0][0].parent
        id = "" if parent is None else parent.run
    return RootRun(last, _largest_numbers(came_from))


def _largest_numbers(heads: Iterable[ManifestSummary]) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for head in heads:
        if head.run is not None:
            numbers[head.run.id] = max(head.number, numbers.get(head.run.id, 0))
    return numbers


def _order(head: ManifestSummary) -> tuple[int, int]:
    return head.number, head.step


def _at(here: Run, run: Run) -> Run:
    return replace(run, root=here.root, host=here.host)
