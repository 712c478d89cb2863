"""Verifies committed checkpoints: their structure, sizes and bytes, and that no file or tensor is missing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.damage import Damage, verify_files
from mcore_ckpt.checkpoint.manifest import Manifest
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
from mcore_ckpt.formats.native.stored_tensors import LocalIndexes, StoredTensors
from mcore_ckpt.io.folder_sizes import sizes_of
from mcore_ckpt.sharding.plan import MODEL, PARAM, ShardKey, StoredShard, plan_reads
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.steps import listing as steps
from mcore_ckpt.steps.node_files import NodeFiles, files_among
from mcore_ckpt.steps.read_lock import reading
from mcore_ckpt.tools.examine.progress import Progress, no_progress, summed
from mcore_ckpt.tools.examine.select import check_step
from mcore_ckpt.tools.examine.step_problems import Settled, StepProblems
from mcore_ckpt.tools.examine.what_is import why_none

# A role that is saved again while it is verified is verified at most this many times.
_TRIES = 5


@dataclass(frozen=True)
class VerifiedRole:
    """The result for one role of one step: the files that its manifest lists, and what is damaged.

    In a node's folder of the fast tier, `of_nodes` has the files that are here; other files are not verified.
    """

    path: Path
    files: int
    nbytes: int
    damages: tuple[Damage, ...]
    of_nodes: NodeFiles | None = None


@dataclass(frozen=True)
class Report:
    """The result of `verify`.

    Attributes:
        problems: sentences on incomplete steps and on a wrong tracker.
        under_way: sentences on steps that living trainers are still saving.
        seconds: the duration of the verification.
    """

    roles: tuple[VerifiedRole, ...]
    problems: tuple[str, ...]
    under_way: tuple[str, ...]
    seconds: float

    @property
    def is_sound(self) -> bool:
        """True if nothing is damaged, missing or inconsistent."""
        return not self.problems and not any(verdict.damages for verdict in self.roles)


def verify_role(
    role_dir: Path, deep: bool = False, progress: Callable[[int], None] = lambda nbytes: None
) -> VerifiedRole:
    """Verifies the role in a folder. Reads all files once and, if `deep` is true, the tensors a second time.

    Args:
        deep: True to also open every file with torch (`weights_only=True`) and compare its tensors with the index.
        progress: called on several threads, with the number of bytes that were just read.
    """
    try:
        manifest = read_manifest(role_dir)
    except (CheckpointCorruptError, CheckpointNotFoundError) as error:
        return VerifiedRole(role_dir, 0, 0, (Damage.of(error, file_names.MANIFEST_FILE),))
    of_nodes = _of_nodes(role_dir, manifest)
    files = manifest.files if of_nodes is None else of_nodes.here
    damages = [*_missing_files(role_dir, manifest), *verify_files(role_dir, files, progress)]
    if not damages and (of_nodes is None or of_nodes.is_whole):
        damages += _incomplete_tensors(role_dir, manifest)
    if deep and not damages:
        from mcore_ckpt.tools.examine.verify_deep import as_torch_sees_it

        damages += [damage for file in files for damage in as_torch_sees_it(role_dir, file)]
    return VerifiedRole(role_dir, len(files), sum(file.size for file in files), tuple(damages), of_nodes)


def _of_nodes(role_dir: Path, manifest: Manifest) -> NodeFiles | None:
    if manifest.placement is None:
        return None
    # Count a truncated file as a file that is here, so that it is reported as damaged and not as missing here.
    there = sizes_of(role_dir, (file.path for file in manifest.files))
    return files_among(manifest, (number for number, file in enumerate(manifest.files) if file.path in there))


def verify(path: Path, step: int | None = None, deep: bool = False, progress: Progress = no_progress) -> Report:
    """Verifies all checkpoints at a path, even while a trainer saves there.

    Reports an incomplete step as a problem, and still verifies the roles of this step. A step that a living trainer is
    still saving is reported as under way, and not as a problem. A step that retention deletes meanwhile is left out.

    Args:
        path: the folder of a role, of a step (to verify all its roles), or of all steps (to verify all steps and the
            tracker).
        step: the only step to verify; None for all.
        deep: see `verify_role`.

    Raises:
        InvalidArgumentError: the folder has another step than `step`.
        CheckpointNotFoundError: there is no checkpoint, or it was deleted during the verification.

    Example:
        >>> verify(Path("checkpoints")).is_sound  # doctest: +SKIP
        True
    """
    # The path must end in names, because `_selected` recognizes a role or a step by the names of its folders.
    path = path.resolve() if ".." in path.parts else path.absolute()
    roles, problems = _selected(path, step)
    count = summed(progress, sum(_nbytes(role.path) for role in roles))
    started = time.monotonic()
    verdicts = [verdict for role in roles if (verdict := _verify_undisturbed(role, deep, count)) is not None]
    if not verdicts:
        raise CheckpointNotFoundError(f"{path}: was deleted while it was being verified")
    settled = problems.settle() if problems is not None else Settled()
    return Report(tuple(verdicts), settled.problems, settled.under_way, time.monotonic() - started)


def _verify_undisturbed(role: _Role, deep: bool, progress: Callable[[int], None]) -> VerifiedRole | None:
    """Verifies one role, and starts again if a trainer has saved the step meanwhile. Returns None if the role is gone.

    A save replaces the old checkpoint even if that checkpoint is locked, and retention may delete the step just before
    this function locks the step. Files are then missing, but nothing is damaged.
    """
    verdict = None
    for _ in range(_TRIES):
        role_dir = role.find()
        if role_dir is None:
            return None
        attempt = _attempt(role_dir)
        # Lock one role at a time, so that retention, which skips locked steps, can delete other steps meanwhile.
        with reading([role_dir]):
            try:
                verdict = verify_role(role_dir, deep, progress)
            except CheckpointCorruptError:
                if attempt is not None and _attempt(role_dir) == attempt:
                    raise
                continue
            if not verdict.damages or (os.path.lexists(role_dir) and _attempt(role_dir) == attempt):
                return verdict
    return verdict


def _attempt(role_dir: Path) -> str | None:
    try:
        return read_manifest(role_dir).attempt
    except (CheckpointCorruptError, CheckpointNotFoundError):
        return None


@dataclass(frozen=True)
class _Role:
    """A role to verify. `path` is the role's folder at the time when the steps were listed.

    A save by two renames moves the folder aside for a moment. Then `find` finds the folder by `name` and by the step's
    folder, `step_path`. `step_path` is None if the role is not in a step's folder.
    """

    path: Path
    step_path: Path | None = None
    name: str = ""

    def find(self) -> Path | None:
        """Returns the role's folder now; None if the role is gone."""
        found = self.path
        if self.step_path is not None and not os.path.lexists(found):
            found = steps.step_status(self.step_path).role_dir(self.name)
        return found if os.path.lexists(found) else None


def _selected(path: Path, step: int | None) -> tuple[Sequence[_Role], StepProblems | None]:
    """Returns the roles to verify, and the problems of their steps (None if the path is a single role)."""
    if os.path.exists(path / file_names.MANIFEST_FILE) or file_names.parse_step(path.parent.name) is not None:
        above = file_names.parse_step(path.parent.name)
        number = file_names.parse_step(path.name) if above is None else above
        if step is not None:
            # If the role's folder was copied elsewhere, no folder name shows the step, so read the manifest.
            check_step(path, read_manifest(path).step if number is None else number, step)
        role = _Role(path) if above is None else _Role(path, path.parent, path.name)
        where = role.find()
        if where is None or not where.is_dir():
            raise CheckpointNotFoundError(f"{path}: there is no such folder")
        return [role], None
    if step is not None and steps.is_step(path):
        check_step(path, steps.step_status(path).step, step)
    problems = StepProblems(path, step)
    statuses = problems.statuses
    if not any(status.committed or status.declared for status in statuses):
        of = "" if step is None else f" of step {step}"
        raise CheckpointNotFoundError(f"{path}: no checkpoint{of}{why_none(path, step, statuses)}")
    found = [(status, role) for status in statuses for role in sorted(status.committed | _damaged(status))]
    return [_Role(status.role_dir(role), status.path, role) for status, role in found], problems


def _damaged(status: steps.StepStatus) -> set[str]:
    """Returns the roles with an unusable manifest."""
    missing = status.declared - status.committed
    return {role for role in missing if os.path.exists(status.role_dir(role) / file_names.MANIFEST_FILE)}


def _nbytes(role_dir: Path) -> int:
    try:
        manifest = read_manifest(role_dir)
        of_nodes = _of_nodes(role_dir, manifest)
        return manifest.nbytes if of_nodes is None else of_nodes.nbytes
    except (CheckpointCorruptError, CheckpointNotFoundError):
        return 0


def _missing_files(role_dir: Path, manifest: Manifest) -> Iterator[Damage]:
    """Yields a `Damage` for each file that the layout requires from a rank but the manifest does not list."""
    listed = {file.path for file in manifest.files}
    wanted = {file_names.COMMON_FILE: 0} if "optimizer" in manifest.contents else {}
    for rank, at in enumerate(manifest.ranks):
        if "optimizer" in manifest.contents:
            wanted[file_names.optimizer_file(*at.place)] = rank
        if "extra" in manifest.contents:
            wanted[file_names.rng_file(*at.place)] = rank
    for path, rank in wanted.items():
        if path not in listed:
            yield Damage(
                f"{role_dir / file_names.MANIFEST_FILE}: does not list {path}, a file of rank {rank}", path, rank
            )


def _incomplete_tensors(role_dir: Path, manifest: Manifest) -> Iterator[Damage]:
    """Yields a `Damage` for each tensor of which some elements are in no file."""
    stored = StoredTensors(LocalIndexes(role_dir), manifest)
    for name in manifest.tensors:
        files = stored.files(ShardKey(name, PARAM))
        for kind in (MODEL, PARAM, *stored.kinds_in(name, files)):
            key = ShardKey(name, kind)
            yield from _incomplete(role_dir, key, stored.shards(key, stored.files(key)))


def _incomplete(role_dir: Path, key: ShardKey, shards: Sequence[StoredShard]) -> Iterator[Damage]:
    if not shards:
        return
    shapes = {shard.region.global_shape for shard in shards}
    if len(shapes) > 1:
        told = " and ".join(str(list(shape)) for shape in sorted(shapes))
        yield Damage(f"{role_dir}: tensor {key}: has shapes {told} in its files", tensor=str(key))
        return
    missing = plan_reads(Region.whole(shapes.pop()), shards).missing
    if missing:
        files = ", ".join(sorted({shard.file for shard in shards}))
        yield Damage(f"{role_dir}: tensor {key}: {missing} elements are in none of {files}", tensor=str(key))
