"""Converts a checkpoint of this package for another trainer: opens it, plans, writes, and puts the result in place."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import CheckpointMismatchError, CommitError, InvalidArgumentError
from mcore_ckpt.formats.huggingface.assets import write_config
from mcore_ckpt.formats.huggingface.side_files import CONFIG_FILE, copy_side_files
from mcore_ckpt.formats.huggingface.writer import write_index, write_weights
from mcore_ckpt.formats.kinds import is_way_back
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.formats.torch_dist.files import TorchDistFiles, WantedPart
from mcore_ckpt.formats.torch_dist.writer import Slice, file_name, write_rest, write_slices
from mcore_ckpt.io.file_copies import pieces_of
from mcore_ckpt.io.files import inside, make_folders, replace_file, sync_folders, write_file
from mcore_ckpt.ranks.rounds import Agreement, Record, decide, same_everywhere
from mcore_ckpt.sharding.assignment import share_of
from mcore_ckpt.steps import commit
from mcore_ckpt.steps.new_folder import Replaceable, check_may_replace, mode_as, open_new_folder, publish_folder
from mcore_ckpt.steps.read_lock import reading
from mcore_ckpt.steps.trainer_lock import ToolLocks
from mcore_ckpt.tools.convert.for_trainers.layouts import Export, Layout, Plan, Role, Tree, plan_for
from mcore_ckpt.tools.convert.for_trainers.tensors import read_slice
from mcore_ckpt.tools.convert.from_huggingface import Progress
from mcore_ckpt.tools.examine.select import Selection, select

# With two threads, one file is read while another is written.
_THREADS = 2


@dataclass(frozen=True)
class WayBackReport:
    """Report of a conversion.

    Attributes:
        source: the folders of the roles.
        path: the folder of the new step.
        layout: the trainer that can go on from it.
        step: the step.
        nbytes: the size in bytes of all tensors that the processes together have written.
        notes: sentences about what the other trainer does not get, for people.
        seconds: how long the conversion took.
    """

    source: tuple[Path, ...]
    path: Path
    layout: Layout
    step: int
    nbytes: int
    notes: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, eq=False)
class _Job:
    """An opened and planned conversion."""

    roles: tuple[Role, ...]
    plan: Plan

    def reader_of(self, tree: Tree) -> NativeReader:
        """Returns the reader of the role that a folder belongs to. The folders of several roles begin with its name."""
        return next(
            (role.reader for role in self.roles if tree.folder.startswith(f"{role.reader.manifest.role}/")),
            self.roles[0].reader,
        )


def convert_back(
    source: Path,
    root: Path,
    layout: Layout,
    agreement: Agreement,
    step: int | None = None,
    role: str | None = None,
    hf_model_path: Path | None = None,
    test: bool = False,
    progress: Progress = lambda done, total: None,
    force: bool = False,
) -> WayBackReport:
    """Writes a step into `root` for another trainer, which goes on from it. Every process must call it.

    Any parallel layout can load it that has the same chain of optimizers (dense, or dense and expert). The step's
    folder appears when it is complete, and then the tracker names it. The processes divide the files among themselves,
    and each needs a few times SCATTER_BYTES of memory.

    Args:
        source: the folder of a role, of a step, or of all steps (to take the newest complete one).
        root: the folder of the other trainer's checkpoints. It may have other steps, but must not be the folder that
            is read.
        layout: the trainer that is to go on.
        agreement: connects this process with the other processes that share the work.
        step: the step to take from a folder of all steps; None for the newest.
        role: the role to convert; None for all roles of the step.
        hf_model_path: the folder with config.json and tokenizer; None to use those of the checkpoint.
        test: True to read everything back and compare it before the step appears.
        progress: called with the number of bytes that this process has written and the number that it will write.
        force: True to replace the step in `root`, if it is a converted one, and a tracker that names another one. A
            pinned step stays.

    Raises:
        LockedError: a trainer of this package saves below `root`.
        InvalidArgumentError: `root` has the step already, its tracker names another one, it is the folder that is read,
            or the roles do not fit the layout.
        CheckpointError: the checkpoint is damaged, has something that the trainer cannot load, or the step cannot be
            written. All processes raise it, and `root` is as it was, unless the message says that the step is in place
            and only the tracker could not be written.

    Example:
        >>> convert_back(Path("ckpt"), Path("megatron"), "megatron", rendezvous("convert", 60.0))  # doctest: +SKIP
    """
    started = time.monotonic()
    root = root.absolute()
    selection = _select(agreement, source, step, role)
    with reading(selection.role_dirs):  # a trainer that still runs could delete the step
        job = _plan(agreement, selection, root, layout, hf_model_path)
        path, replaceable = root / job.plan.folder, Replaceable(force, "a step for another trainer", is_way_back)
        with ExitStack() as stack:  # on the coordinator it holds the root
            if agreement.is_coordinator and not root.exists():
                stack.callback(commit.remove_if_empty, root)
            mode = mode_as(*(role.path for role in job.roles))
            locks = ToolLocks(path.parent, [each.reader.manifest.role for each in job.roles], mode)
            attempt = _open(agreement, stack, locks, job, path, replaceable)
            staging = file_names.staging_dir(path, attempt)
            if agreement.is_coordinator:
                stack.callback(commit.discard, staging)  # does nothing once it is in place
            nbytes = _write(agreement, job, staging, progress)
            if test:
                _test(agreement, job, staging)
            _publish(agreement, locks, job.plan, staging, path, attempt, replaceable)
    sources = tuple(each.path for each in job.roles)
    return WayBackReport(sources, path, layout, selection.step, nbytes, job.plan.notes, time.monotonic() - started)


# -- plan -------------------------------------------------------------------------------------------------


def _select(agreement: Agreement, source: Path, step: int | None, role: str | None) -> Selection:
    """Selects the roles on rank 0, because the newest step can be another one a moment later."""

    def combine(_: Sequence[Record]) -> Record:
        found = select(source, step)
        # Frameworks also commit roles of plain files (`steps/role_files.py`), whose manifests list no stages.
        models = [path for path in found.role_dirs if read_manifest(path).stages]
        chosen = [path for path in models if role in (None, path.name, read_manifest(path).role)]
        if not models:
            raise InvalidArgumentError(f"{found.role_dirs[0].parent}: no role of step {found.step} has a model")
        if not chosen:
            names = ", ".join(path.name for path in models)
            raise InvalidArgumentError(f"{source}: has {names}, not {role}: choose one of them with --role")
        return {"step": found.step, "roles": [str(path) for path in chosen]}

    found = decide(agreement, f"finding a checkpoint in {source}", dict, combine)
    return Selection(int(found["step"]), tuple(map(Path, found["roles"])))


def _plan(agreement: Agreement, selection: Selection, root: Path, layout: Layout, hf_model_path: Path | None) -> _Job:
    found: list[_Job] = []

    def work() -> Record:
        for role_dir in selection.role_dirs:
            if root.resolve() in (role_dir, *role_dir.parents[:2]):
                raise InvalidArgumentError(
                    f"{root}: the checkpoint is read from this folder: name another folder to write to"
                )
        roles = tuple(Role(path, NativeReader.open(path)) for path in selection.role_dirs)
        plan = plan_for(layout, selection, roles, hf_model_path)
        for tree in plan.trees:
            tree.contents.describe()  # which raises if it cannot be done
        found.append(_Job(roles, plan))
        return {"attempts": [role.reader.manifest.attempt for role in roles], "sizes": [w.nbytes for w in _sizes(plan)]}

    def combine(records: Sequence[Record]) -> Record:
        same_everywhere(records, "the checkpoint to convert", CommitError)
        return {}

    decide(agreement, f"planning the conversion of {selection.role_dirs[0]}", work, combine)
    return found[0]


@dataclass(frozen=True)
class _Size:
    """A file of the plan: which one of which tree (or export, after all trees), and its size in bytes."""

    owner: int
    number: int
    nbytes: int


def _sizes(plan: Plan) -> list[_Size]:
    of_trees = [
        _Size(owner, number, sum(each.nbytes for each in file))
        for owner, tree in enumerate(plan.trees)
        for number, file in enumerate(tree.contents.files)
    ]
    of_exports = [
        _Size(len(plan.trees) + owner, number, file.nbytes)
        for owner, export in enumerate(plan.exports)
        for number, file in enumerate(export.job.plan.files)
    ]
    return of_trees + of_exports


def _open(
    agreement: Agreement, stack: ExitStack, locks: ToolLocks, job: _Job, path: Path, replaceable: Replaceable
) -> str:
    def combine(_: Sequence[Record]) -> Record:
        _check_free(job, path, replaceable)
        mode = mode_as(*(role.path for role in job.roles))
        stack.enter_context(locks)
        _check_free(job, path, replaceable)
        attempt = open_new_folder(path, (each.nbytes for each in _sizes(job.plan)), replaceable, mode)
        staging = file_names.staging_dir(path, attempt)
        for folder in (*(tree.folder for tree in job.plan.trees), *(export.folder for export in job.plan.exports)):
            make_folders(staging, f"{folder}/x")
        return {"attempt": attempt}

    return str(decide(agreement, f"opening {path}", dict, combine)["attempt"])


def _check_free(job: _Job, path: Path, replaceable: Replaceable) -> None:
    check_may_replace(path, replaceable)
    for name, data in job.plan.trackers.items():
        # Which step is the later one is not known: a training may have gone back.
        if not replaceable.force and _differs(path.parent / name, data):
            raise InvalidArgumentError(
                f"{path.parent}: {name} names another checkpoint, and a training that goes on from that one would go "
                f"on from step {job.plan.step}: name another folder, or let it name this step with --force"
            )
    for other in file_names.step_dirs(path.parent).get(job.plan.step, []):
        if file_names.parse_step(path.name) is not None and other.name != path.name:
            raise InvalidArgumentError(
                f"{path.parent}: step {job.plan.step} is there already, as {other}, beside which this tool writes "
                "nothing: name another folder"
            )


def _differs(tracker: Path, data: bytes) -> bool:
    try:
        with tracker.open("rb") as file:
            return file.read(len(data) + 9).strip() != data.strip()
    except FileNotFoundError:
        return False


# -- write ------------------------------------------------------------------------------------------------


def _write(agreement: Agreement, job: _Job, staging: Path, progress: Progress) -> int:
    sizes = _sizes(job.plan)
    mine = [sizes[n] for n in share_of([size.nbytes for size in sizes], agreement.rank, agreement.world_size)]
    total = sum(size.nbytes for size in mine)

    def work() -> Record:
        done = 0
        places: list[Record] = []
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="way-back") as pool:
            for size, written in zip(mine, pool.map(partial(_write_file, job, staging), mine), strict=True):
                places.append({"owner": size.owner, "number": size.number, "places": written})
                done += size.nbytes
                progress(done, total)
        return {"written": places}

    def combine(records: Sequence[Record]) -> Record:
        places: dict[int, dict[int, list[list[int]]]] = {}
        for each in (each for record in records for each in record["written"]):
            places.setdefault(each["owner"], {})[each["number"]] = each["places"]
        for owner, tree in enumerate(job.plan.trees):
            write_rest(tree.contents, places.get(owner, {}), staging / tree.folder)
        for export in job.plan.exports:
            _finish_export(export, staging / export.folder)
        for name, path in job.plan.copies.items():
            make_folders(staging, name)
            # A file of the step may be a link, and must not lead out of the step.
            step_path = path.parents[len(Path(name).parts) - 1]
            write_file(staging / name, pieces_of(inside(step_path, name)))
        for name, text in job.plan.texts.items():
            write_file(staging / name, [text.encode()])
        sync_folders(staging)
        return {}

    decide(agreement, f"writing {staging}", work, combine, CommitError)
    return sum(size.nbytes for size in sizes)


def _write_file(job: _Job, staging: Path, size: _Size) -> list[list[int]]:
    trees = job.plan.trees
    if size.owner < len(trees):
        tree = trees[size.owner]
        path = staging / tree.folder / file_name(size.number)
        return write_slices(tree.contents.files[size.number], path, partial(read_slice, job.reader_of(tree)))
    export = job.plan.exports[size.owner - len(trees)]
    write_weights(export.job.plan, [size.number], export.job.reader, staging / export.folder, lambda nbytes: None)
    return []


def _finish_export(export: Export, folder: Path) -> None:
    job = export.job
    write_index(job.plan, folder)
    copy_side_files(job.config_dir, folder, without=(CONFIG_FILE,), quantized=False)
    write_config(folder, job.model, job.plan.dtype, job.plan.has_mtp)


def _test(agreement: Agreement, job: _Job, staging: Path) -> None:
    """Reads what was written, and compares it with the checkpoint bit for bit. Each process takes a part of it."""

    def work() -> Record:
        for tree in job.plan.trees:
            folder = staging / tree.folder
            written, reader = TorchDistFiles(folder, [folder]), job.reader_of(tree)
            slices = [each for file in tree.contents.files for each in file]
            for each in slices[agreement.rank :: agreement.world_size]:
                _compare(written, reader, each)
            for key in tree.contents.objects:
                written.read_object(key)
        return {}

    decide(agreement, f"testing {staging}", work, lambda _: {})


def _compare(written: TorchDistFiles, reader: NativeReader, each: Slice) -> None:
    wanted = read_slice(reader, each)
    for key in each.keys:
        found = torch.empty_like(wanted)
        written.read(WantedPart(key, each.global_shape, each.offsets, found))
        if not torch.equal(found.view(-1).view(torch.uint8), wanted.view(-1).view(torch.uint8)):
            raise CheckpointMismatchError(
                f"{written.path}: tensor {key}: the written bits differ from {each.tensor} of {reader.place}: check "
                "the disks and convert again"
            )


def _publish(
    agreement: Agreement,
    locks: ToolLocks,
    plan: Plan,
    staging: Path,
    path: Path,
    attempt: str,
    replaceable: Replaceable,
) -> None:
    def act() -> None:
        locks.keep()
        publish_folder(staging, path, attempt, replaceable)
        try:
            for name, data in plan.trackers.items():
                replace_file(path.parent / name, data)
        except OSError as error:
            raise CommitError(
                f"{path}: is complete and in place, but the tracker in {path.parent} could not be written: {error}: "
                f"write {plan.step} into it"
            ) from error

    decide(agreement, f"putting {path} in place", dict, lambda _: {}, act=act)
