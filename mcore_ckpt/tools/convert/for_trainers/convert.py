"""Converts a checkpoint of this package for another trainer: opens it, plans, writes, and puts the result in place."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import CommitError, InvalidArgumentError
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.formats.torch_dist.kind import has_torch_dist
from mcore_ckpt.io.files import replace_file
from mcore_ckpt.ranks.rounds import Agreement, Record, decide
from mcore_ckpt.steps import commit
from mcore_ckpt.steps.new_folder import Replaceable, mode_as
from mcore_ckpt.steps.read_lock import reading
from mcore_ckpt.steps.trainer_lock import ToolLocks
from mcore_ckpt.tools.convert.destinations import NewFolder
from mcore_ckpt.tools.convert.for_trainers.layouts import Layout, Plan, Role, plan_for
from mcore_ckpt.tools.convert.walk import plan_together, write_together
from mcore_ckpt.tools.examine.progress import Progress, no_progress
from mcore_ckpt.tools.examine.select import Selection, select


@dataclass(frozen=True)
class TrainerConversionReport:
    """Report of a conversion. `source` are the folders of the roles, and `path` is the folder of the new step.

    `nbytes` is the size in bytes of all tensors that the processes together have written. `notes` are sentences that
    tell people what the other trainer does not get, and what to do about it.
    """

    source: tuple[Path, ...]
    path: Path
    layout: Layout
    step: int
    nbytes: int
    notes: tuple[str, ...]
    seconds: float


def convert_for_trainer(
    source: Path,
    root: Path,
    layout: Layout,
    agreement: Agreement,
    step: int | None = None,
    role: str | None = None,
    hf_model_path: Path | None = None,
    test: bool = False,
    progress: Progress = no_progress,
    force: bool = False,
) -> TrainerConversionReport:
    """Writes into `root` a step from which another trainer can go on. Every process must call this function.

    The step loads under any parallel layout that chains optimizers in the same way: one for all parameters or, with
    expert parallelism, one for dense parameters and one for experts. The step's folder appears when it is complete, and
    then the tracker names the step. Each process needs a few times SCATTER_BYTES of memory.

    Args:
        source: the folder of a role, of a step, or of all steps (to take the newest complete step).
        root: the folder of the other trainer's checkpoints. It may have other steps, but must not be the folder of
            steps that contains `source`.
        layout: the trainer that will go on from the step.
        agreement: connects this process with the other processes that share the work.
        step: the step to take from a folder of all steps; None for the newest.
        role: the role to convert; None for all roles of the step.
        hf_model_path: the folder with config.json and tokenizer; None to use the checkpoint's own files.
        test: True to read everything back and compare it before the step appears.
        force: True to replace the step in `root` if a conversion wrote that step, and to change a tracker that names
            another step. A pinned step stays.

    Raises:
        LockedError: a trainer of this package saves below `root`.
        InvalidArgumentError: `root` has the step already, or is the root of `source`; the tracker in `root` names
            another step; or the roles do not fit the layout.
        CheckpointError: the checkpoint is damaged or has something that the trainer cannot load, or the step cannot be
            written. All processes raise it, and `root` is as it was, unless the message says that the step is in place
            and only the tracker could not be written.
    """
    started = time.monotonic()
    root = root.absolute()
    selection = _select(agreement, source, step, role)
    with reading(selection.role_dirs):  # keeps a running trainer from deleting the step
        roles, plan = _plan(agreement, selection, root, layout, hf_model_path)
        destination = _StepOfTrainer(root, plan, [each.reader.manifest.role for each in roles], force)
        sources = tuple(each.path for each in roles)
        nbytes = write_together(agreement, plan.writers, destination, mode_as(*sources), progress, test)
    seconds = time.monotonic() - started
    return TrainerConversionReport(sources, destination.path, layout, selection.step, nbytes, plan.notes, seconds)


def _select(agreement: Agreement, source: Path, step: int | None, role: str | None) -> Selection:
    """Lets rank 0 select the roles for all processes.

    Otherwise a trainer's commit could make two processes select different steps.
    """

    def combine(_: Sequence[Record]) -> Record:
        found = select(source, step)
        # Frameworks also commit roles of plain files (`steps/role_files.py`), whose manifests list no stages. Skip
        # these roles.
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


def _plan(
    agreement: Agreement, selection: Selection, root: Path, layout: Layout, hf_model_path: Path | None
) -> tuple[tuple[Role, ...], Plan]:
    def plan() -> tuple[tuple[Role, ...], Plan]:
        for role_dir in selection.role_dirs:
            if root.resolve() in (role_dir, *role_dir.parents[:2]):
                raise InvalidArgumentError(f"{root}: has the checkpoint to convert: name another folder to write to")
        roles = tuple(Role(path, NativeReader.open(path)) for path in selection.role_dirs)
        return roles, plan_for(layout, selection, roles, hf_model_path)

    def identity(planned: tuple[tuple[Role, ...], Plan]) -> Record:
        return {"attempts": [role.reader.manifest.attempt for role in planned[0]]}

    topic = f"planning the conversion of {selection.role_dirs[0]}"
    return plan_together(agreement, topic, plan, identity, "the checkpoint to convert")


class _StepOfTrainer(NewFolder):
    """The folder of a step for another trainer. Trackers name the step once the folder is in place.

    Trainers of this package may use the same root. With `force`, the folder replaces a step that was written for
    another trainer, and trackers that name another step are replaced, too.
    """

    def __init__(self, root: Path, plan: Plan, roles: Sequence[str], force: bool) -> None:
        super().__init__(root / plan.folder, Replaceable(force, "a step for another trainer", has_torch_dist))
        self._root, self._plan, self._roles = root, plan, roles

    def check(self) -> None:
        super().check()
        for name, data in self._plan.trackers.items():
            # Refuse a tracker that names another step, even a step with a smaller number: because a training may have
            # gone back, the step with the smaller number can be the later step.
            if not self.replaceable.force and _differs(self._root / name, data):
                raise InvalidArgumentError(
                    f"{self._root}: {name} names another checkpoint, so trainings would not go on from step "
                    f"{self._plan.step}: name another folder, or let the tracker name this step with --force"
                )
        for other in file_names.step_dirs(self._root).get(self._plan.step, []):
            if file_names.parse_step(self.path.name) is not None and other.name != self.path.name:
                raise InvalidArgumentError(
                    f"{self._root}: has step {self._plan.step} already, in {other}, and a step cannot have two "
                    "folders: name another folder"
                )

    def open(self, names: Sequence[str], sizes: Iterable[int], mode: int) -> str:
        self.check()  # before anything is written
        if not self._root.exists():
            self._exit.callback(commit.remove_if_empty, self._root)
        self._locks = self._exit.enter_context(ToolLocks(self._root, self._roles, mode))
        return super().open(names, sizes, mode)

    def publish(self) -> None:
        self._locks.keep()
        super().publish()
        try:
            for name, data in self._plan.trackers.items():
                replace_file(self._root / name, data)
        except OSError as error:
            raise CommitError(
                f"{self.path}: is complete and in place, but the tracker in {self._root} could not be written: "
                f"{error}: write {self._plan.step} into it"
            ) from error


def _differs(tracker: Path, data: bytes) -> bool:
    try:
        with tracker.open("rb") as file:
            return file.read(len(data) + 9).strip() != data.strip()
    except FileNotFoundError:
        return False
