"""Rewrites the roles of a step under another layout. All roles appear together, once all roles are written."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import Manifest
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import CheckpointError, CommitError, InvalidArgumentError
from mcore_ckpt.formats.huggingface.tokenizer_size import tokens_in
from mcore_ckpt.formats.native.folder import LocalFolder
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.ranks.rounds import Alone
from mcore_ckpt.ranks.topology import Topology
from mcore_ckpt.steps.later_metrics import metrics_of
from mcore_ckpt.steps.new_folder import mode_as
from mcore_ckpt.steps.read_lock import reading
from mcore_ckpt.tools.convert.destinations import RolesOfStep
from mcore_ckpt.tools.convert.reshard.attention_heads import check_heads, config_of_checkpoint
from mcore_ckpt.tools.convert.reshard.carried_files import plan_carried_files, write_made
from mcore_ckpt.tools.convert.reshard.planner import Planner
from mcore_ckpt.tools.convert.reshard.role_writer import Identity, PlainRoleWriter, RoleWriter
from mcore_ckpt.tools.convert.reshard.saved_tensors import saved_tensors
from mcore_ckpt.tools.convert.reshard.target import SavedLayout, WantedLayout, resolve
from mcore_ckpt.tools.convert.walk import Writers, write_together
from mcore_ckpt.tools.examine.progress import Progress, no_progress
from mcore_ckpt.tools.examine.select import Selection


@dataclass(frozen=True)
class RoleReport:
    """The report of one role: the role's folder and layout before (`source`, `saved`) and after (`path`, `written`).

    `reseeded` is True if the random number generators start from the saved seed instead of their saved states.
    """

    role: str
    source: Path
    path: Path
    saved: Topology
    written: Topology
    nbytes: int
    files: int
    reseeded: bool


@dataclass(frozen=True)
class ReshardReport:
    """The report of one reshard: the roles that have a model, and the copied files next to the roles (`beside`)."""

    step: int
    roles: tuple[RoleReport, ...]
    seconds: float
    beside: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(role.nbytes for role in self.roles)


def reshard(
    selection: Selection, root: Path, wanted: WantedLayout, progress: Progress = no_progress, force: bool = False
) -> ReshardReport:
    """Rewrites a step into another folder of steps, under another layout.

    A reshard checks as much as it can before it writes a byte. During the reshard, no trainer can save below `root`. If
    the CRC of a block is wrong, the reshard stops and removes what it has written.

    Args:
        selection: the checkpoints to rewrite, from `select`.
        root: the folder of all steps to write into. It must not be the root of `selection`.
        force: True to replace checkpoints of the same step and roles, once all roles are written. A pinned step stays.

    Raises:
        InvalidArgumentError: the sizes contradict each other, or the new checkpoint would replace the source, a pinned
            checkpoint, or any checkpoint if `force` is False.
        LockedError: a trainer saves below `root`.
        CheckpointError: the checkpoint is damaged or does not fit the layout, or the new checkpoint cannot be written.
            After the error, `root` has no new complete step.

    Example:
        >>> reshard(select(Path("ckpt")), Path("ckpt_tp4"), WantedLayout(tp=4))  # doctest: +SKIP
    """
    with reading(selection.role_dirs):  # keeps a running trainer from deleting the step
        return _reshard(selection, root.absolute(), wanted, force, progress)


def _reshard(selection: Selection, root: Path, wanted: WantedLayout, force: bool, progress: Progress) -> ReshardReport:
    started = time.monotonic()
    found = {source: read_manifest(source) for source in selection.role_dirs}
    _check_root(found, selection.step, root)
    roles = sorted(manifest.role for manifest in found.values())
    destination = RolesOfStep(root, selection.step, roles, force, _step_of(selection))
    destination.check()
    resharded = {
        source: _writer(source, manifest, destination, wanted) for source, manifest in found.items() if manifest.stages
    }
    writers: Writers = [
        *(
            (manifest.role, PlainRoleWriter(source, manifest, destination))
            for source, manifest in found.items()
            if not manifest.stages
        ),
        *((found[source].role, writer) for source, writer in resharded.items()),
    ]
    try:
        write_together(Alone(), writers, destination, mode_as(*found), progress)
    except OSError as error:
        raise CommitError(f"{root}: step {selection.step} could not be written: {error}") from error
    reports = tuple(_report(source, found[source], destination) for source in resharded)
    return ReshardReport(selection.step, reports, time.monotonic() - started, tuple(destination.companions))


def _step_of(selection: Selection) -> Path | None:
    """Returns the step's folder that has the selected roles; None if the roles are not in a step's folder."""
    role_dir = selection.role_dirs[0]
    return next((each for each in (role_dir, role_dir.parent) if file_names.parse_step(each.name) is not None), None)


def _check_root(found: Mapping[Path, Manifest], step: int, root: Path) -> None:
    for source, manifest in found.items():
        role_dir = file_names.step_dir(root, step) / manifest.role
        if root.resolve() in (source.parent, source.parent.parent) or (role_dir.exists() and role_dir.samefile(source)):
            raise InvalidArgumentError(f"{root}: has the checkpoint to reshard: name another folder to write to")


def _writer(source: Path, manifest: Manifest, destination: RolesOfStep, wanted: WantedLayout) -> RoleWriter:
    reader, saved = NativeReader(LocalFolder(source), manifest), SavedLayout(manifest.topology, manifest.stages)
    try:
        tensors = list(saved_tensors(reader))
        target = resolve(wanted, saved, any(tensor.expert for tensor in tensors))
        check_heads(manifest.model or {}, config_of_checkpoint(source), tensors, manifest.topology, target.topology)
        planner = Planner(reader, saved, manifest.contents, tensors, target, wanted)
        planner.regions.check_tokens(tokens_in(source / file_names.HUGGINGFACE_DIR))
        planned = planner.files()
        carried = plan_carried_files(source, reader, target.topology)
    except CheckpointError as error:
        raise type(error)(f"{source}: {error}") from error
    # Keep the megatron version of the training, because this process may have another megatron, or no megatron.
    versions = {name: version for name, version in manifest.versions.items() if name == "megatron_core"}
    identity = Identity(
        manifest.role,
        manifest.contents,
        versions,
        manifest.adapters,
        manifest.model,
        metrics_of(source, manifest),
        manifest.dropped,
        manifest.parts,
    )
    return RoleWriter(
        *(reader, reader.read, planned, target, identity, destination),
        write_others=partial(write_made, carried),
        copies=carried.copies,
        source=source,
    )


def _report(source: Path, saved: Manifest, destination: RolesOfStep) -> RoleReport:
    written = destination.manifests[saved.role]
    return RoleReport(
        role=saved.role,
        source=source,
        path=destination.role_dir(saved.role),
        saved=saved.topology,
        written=written.topology,
        nbytes=written.nbytes,
        files=len(written.files),
        reseeded=bool(saved.files_of("rng")) and not written.topology.has_generators_of(saved.topology),
    )
