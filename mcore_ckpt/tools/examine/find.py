"""Finds the checkpoint at a path, of this package or of another program, and opens a reader for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.model_facts import Facts
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import CheckpointNotFoundError, InvalidArgumentError
from mcore_ckpt.formats.checkpoint_kind import Backend, CheckpointKind
from mcore_ckpt.formats.contract import CheckpointReader
from mcore_ckpt.formats.kinds import NATIVE, kinds_by_name, recognize
from mcore_ckpt.formats.step_folders import number_of, step_folders
from mcore_ckpt.models.config_fields import HfConfig
from mcore_ckpt.models.stated_facts import facts_of_folder
from mcore_ckpt.steps.listing import find_moved_aside, read_tracker
from mcore_ckpt.tools.examine.select import select
from mcore_ckpt.tools.examine.what_is import what_is

# Kinds of paths that are a single checkpoint, in addition to the kinds that `merge` reads.
_ONE_STEP = ("legacy", "huggingface", "adapter")


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint of one role: its folder, and the name of its kind ("native" for this package's format)."""

    path: Path
    kind: str

    @property
    def of_kind(self) -> CheckpointKind:
        """The object that answers questions about checkpoints of this kind."""
        return kinds_by_name()[self.kind]

    @property
    def has_hf_names(self) -> bool:
        """True if the tensors have HuggingFace's names and values, so that a merge only copies them."""
        return self.of_kind.has_hf_names

    def config_dir(self) -> Path:
        """Returns the folder with the checkpoint's `config.json`. Raises CheckpointNotFoundError if there is none."""
        found = file_names.config_dir(self.path)
        if found is None:
            raise CheckpointNotFoundError(
                f"{self.path / file_names.HUGGINGFACE_DIR / 'config.json'}: missing, so the architecture of the model "
                "is not known: name a folder that has this file with --hf_model_path"
            )
        return found


def find_checkpoint(
    path: Path, backend: Backend = "megatron", step: int | None = None, role: str | None = None
) -> FoundCheckpoint:
    """Finds the checkpoint of one role at a path.

    Args:
        path: the folder of a role, of a step (`iter_...` for megatron's own trainer), or of all steps. In a folder of
            all steps, the newest complete step of this package is taken. If all steps are another program's, the step
            that the tracker names is taken, or the only step.
        backend: "fsdp" looks for FSDP shards, "megatron" for every other kind.
        step: the step to take from a folder of all steps; None to choose it as described for `path`.
        role: the role to take from a step; None if the step has only one role.

    Raises:
        InvalidArgumentError: the step has several roles and `role` chooses none of them, the folder has another step
            than `step`, or the folder has FSDP shards and `backend` is "megatron".
        CheckpointNotFoundError: there is no checkpoint.
        CheckpointCorruptError: a manifest is damaged.
    """
    for folder in _places(path, step):
        # Look inside only if the folder itself is not a checkpoint, because folders inside a checkpoint can look like
        # checkpoints: verl has separate trees for model and optimizer.
        inside = [folder] if _foreign_kind(folder, backend) is not None else _folders_in(folder)
        found = [FoundCheckpoint(each, kind) for each in inside if (kind := _foreign_kind(each, backend)) is not None]
        if found:
            return _one(path, found, role)
    if not path.exists() and find_moved_aside(path) is None:
        raise CheckpointNotFoundError(f"{path}{what_is(path).reason.removeprefix(':')}")
    if backend == "fsdp":
        raise CheckpointNotFoundError(
            f"{path}: has no FSDP shards: neither this folder nor a role's folder in it has "
            "model_world_size_*_rank_*.pt: name the folder that has these files, or leave out --backend fsdp"
        )
    if any(recognize(each, "fsdp") for folder in _places(path, step) for each in (folder, *_folders_in(folder))):
        raise InvalidArgumentError(f"{path}: has FSDP shards: read them with --backend fsdp")
    selection = select(path, step)
    # Frameworks also commit roles of plain files (`steps/role_files.py`), whose manifests list no stages. Skip these
    # roles.
    models = [folder for folder in selection.role_dirs if read_manifest(folder).stages]
    return _one(path, [FoundCheckpoint(folder, NATIVE.name) for folder in models or selection.role_dirs], role)


def open_reader(found: FoundCheckpoint, config: HfConfig) -> CheckpointReader:
    """Opens the reader of a checkpoint of any kind.

    `config` is the `config.json` of the model. It gives the shapes of global tensors, which are missing in a folder
    where verl has written one file per rank.

    Raises CheckpointError: the checkpoint is damaged, or belongs to another model.
    """
    return found.of_kind.open(found.path, config)


def facts_of_checkpoint(found: FoundCheckpoint, reader: CheckpointReader) -> Facts:
    """Returns the facts about a checkpoint's model, from the checkpoint itself, or else from its `config.json`."""
    return found.of_kind.facts(reader) or facts_of_folder(found.path)


def _foreign_kind(folder: Path, backend: Backend) -> str | None:
    kind = recognize(folder, backend)
    return None if kind is None or kind is NATIVE else kind.name


def _places(path: Path, step: int | None) -> list[Path]:
    """Returns the folders that may be a foreign checkpoint, or contain its roles: the path, or steps in the path.

    Raises InvalidArgumentError if the path is not a folder of steps although `step` is given. Raises the same error if
    the path has several steps of another program, and neither `step` nor the tracker chooses one of them.
    """
    found = what_is(path)
    if step is not None:
        if found.is_foreign_checkpoint or found.kind in _ONE_STEP:
            raise InvalidArgumentError(f"{path}: is {found.what}, not a folder of steps: leave out --step")
        return [path / name.format(step) for name in ("global_step_{}", "iter_{:07d}")]
    if found.kind != "foreign root":
        return [path]
    steps = step_folders(path)
    tracked = read_tracker(path)
    chosen = [each for each in steps if tracked is not None and number_of(each.name) == tracked]
    if chosen or len(steps) == 1:
        return chosen or steps
    numbers = ", ".join(each.name if (number := number_of(each.name)) is None else str(number) for each in steps)
    raise InvalidArgumentError(f"{path}: has the steps {numbers} of another program: choose one of them with --step")


def _folders_in(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if entry.is_dir()) if path.is_dir() else []


def _one(path: Path, found: list[FoundCheckpoint], role: str | None) -> FoundCheckpoint:
    chosen = [checkpoint for checkpoint in found if role in (None, checkpoint.path.name)]
    if len(chosen) != 1:
        names = ", ".join(checkpoint.path.name for checkpoint in found)
        raise InvalidArgumentError(f"{path}: has the roles {names}: choose one of them with --role")
    return chosen[0]
