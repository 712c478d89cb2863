"""Which checkpoint a path stands for, whatever program wrote it, and what reads its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import CheckpointNotFoundError, InvalidArgumentError
from mcore_ckpt.formats.contract import CheckpointReader
from mcore_ckpt.formats.fsdp.reader import is_fsdp, open_fsdp
from mcore_ckpt.formats.kinds import ForeignKind, kind_of
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.formats.torch_dist.reader import open_torch_dist
from mcore_ckpt.formats.verl_ranks.reader import open_verl_ranks
from mcore_ckpt.models.config_fields import HfConfig
from mcore_ckpt.models.mapping import hf_tensors
from mcore_ckpt.models.registry import model_from_config
from mcore_ckpt.steps.listing import StepStatus, list_steps, step_status
from mcore_ckpt.steps.tracker import warn_if_tracker_differs

Backend = Literal["megatron", "fsdp"]
Kind = Literal["native", "fsdp"] | ForeignKind

# Where a checkpoint may have config.json and tokenizer: ours and verl's today, verl up to 0.4, and beside the weights.
_CONFIG_DIRS = (file_names.HUGGINGFACE_DIR, "hf_config_and_tokenizer", ".", f"../{file_names.HUGGINGFACE_DIR}")


@dataclass(frozen=True)
class Selection:
    """The checkpoints to rewrite: the folders of some or all roles of one step."""

    step: int
    role_dirs: tuple[Path, ...]


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint of one role. `kind`: "native" is one of this package."""

    path: Path
    kind: Kind

    @property
    def has_hf_names(self) -> bool:
        """Whether its tensors are HuggingFace's, and need no conversion."""
        return self.kind == "fsdp"

    def config_dir(self) -> Path:
        """The folder with its `config.json`. Raises CheckpointNotFoundError if it brought none."""
        folders = [self.path / name for name in _CONFIG_DIRS]
        found = next((folder for folder in folders if (folder / "config.json").is_file()), None)
        if found is None:
            raise CheckpointNotFoundError(
                f"{folders[0] / 'config.json'}: missing: it says what model this is; name a folder that has it "
                "(--hf_model_path)"
            )
        return found


def find_checkpoint(
    path: Path, backend: Backend = "megatron", step: int | None = None, role: str | None = None
) -> FoundCheckpoint:
    """The checkpoint that a path stands for.

    Args:
        path: the folder of a role, of a step, or of the steps (the newest complete one of ours); of megatron's trainer
            an `iter_...` folder.
        backend: what wrote it: "fsdp" are FSDP shards, "megatron" everything else.
        step: which one, below a folder of steps.
        role: which one, of a step with several.

    Raises:
        InvalidArgumentError: there are several roles, and none was chosen; or another step; or FSDP shards, and nobody
            said so.
        CheckpointNotFoundError: there is none.
        CheckpointCorruptError: a manifest is damaged.
    """
    kind: Callable[[Path], Kind | None] = kind_of if backend == "megatron" else _fsdp_kind
    found = [FoundCheckpoint(folder, known) for folder in _folders(path, step) if (known := kind(folder)) is not None]
    if found:
        return _one(path, found, role)
    if not path.exists():
        raise CheckpointNotFoundError(f"{path}: there is no such folder")
    if backend == "fsdp":
        raise CheckpointNotFoundError(f"{path}: has no model_world_size_*_rank_*.pt, nor has a folder of a role in it")
    if any(is_fsdp(folder) for folder in _folders(path, step)):
        raise InvalidArgumentError(f"{path}: holds FSDP shards: say so (--backend fsdp)")
    selection = select(path, step)
    # A framework's own part of a step has no stages, and no model (`integrations/parts.py`).
    models = [folder for folder in selection.role_dirs if read_manifest(folder).stages]
    return _one(path, [FoundCheckpoint(folder, "native") for folder in models or selection.role_dirs], role)


def open_reader(found: FoundCheckpoint, config: HfConfig) -> CheckpointReader:
    """Opens the reader of a checkpoint of any kind.

    Args:
        found: the checkpoint.
        config: the `config.json` of its model. Old folders of verl do not say themselves what shapes their tensors
            have.

    Raises:
        CheckpointError: it is damaged, or is not of this model.
    """
    if found.kind == "native":
        return NativeReader.open(found.path)
    if found.kind == "fsdp":
        return open_fsdp(found.path)
    if found.kind == "torch_dist":
        return open_torch_dist(found.path)
    slabs = [slab for tensor in hf_tensors(model_from_config(config)) for slab in tensor.slabs if slab.mcore]
    return open_verl_ranks(
        found.path,
        {slab.mcore: slab.region.global_shape for slab in slabs},
        {slab.mcore: tuple(section.rows for section in slab.sections) for slab in slabs if slab.sections},
    )


def _fsdp_kind(folder: Path) -> Kind | None:
    return "fsdp" if is_fsdp(folder) else None


def _folders(path: Path, step: int | None) -> Iterator[Path]:
    """Where another program's checkpoint may be: there, below it by role, or below it by step and role."""
    folders = [path] if step is None else [path / name.format(step) for name in ("global_step_{}", "iter_{:07d}")]
    for folder in folders:
        yield folder
        if folder.is_dir():
            yield from sorted(entry for entry in folder.iterdir() if entry.is_dir())


def _one(path: Path, found: list[FoundCheckpoint], role: str | None) -> FoundCheckpoint:
    chosen = [checkpoint for checkpoint in found if role in (None, checkpoint.path.name)]
    if len(chosen) != 1:
        there = ", ".join(checkpoint.path.name for checkpoint in found)
        raise InvalidArgumentError(f"{path}: has the roles {there}: say which one (--role)")
    return chosen[0]


def select(source: Path, step: int | None = None) -> Selection:
    """The checkpoints that a path stands for.

    Args:
        source: the folder of a role, of a step (all its roles), or of the steps (the newest complete one).
        step: which one, below a folder of steps.

    Raises:
        InvalidArgumentError: `step` is another one than the folder's.
        CheckpointNotFoundError: there is none, or the step is not complete.
        CheckpointCorruptError: a manifest is damaged.
    """
    # Resolved, so that "." has a name.
    source = source.resolve()
    if (source / file_names.MANIFEST_FILE).exists():
        manifest = read_manifest(source)
        return Selection(_same_step(source, manifest.step, step), (source,))
    number = file_names.parse_step(source.name)
    if number is not None and source.is_dir():
        _same_step(source, number, step)
        return _selection(step_status(source))
    statuses = [status for status in list_steps(source) if step in (None, status.step)]
    complete = [status for status in statuses if status.is_complete]
    if not complete:
        what = "no complete checkpoint" if step is None else f"no complete checkpoint of step {step}"
        reasons = "".join(f"\n  {status.reason}" for status in reversed(statuses))
        raise CheckpointNotFoundError(f"{source}: {what}{reasons}")
    if step is None:
        warn_if_tracker_differs(source, complete)
    return _selection(complete[-1])


def _same_step(source: Path, found: int, wanted: int | None) -> int:
    if wanted not in (None, found):
        raise InvalidArgumentError(f"{source} is of step {found}, not {wanted}")
    return found


def _selection(status: StepStatus) -> Selection:
    if not status.is_complete:
        raise CheckpointNotFoundError(status.reason)
    return Selection(status.step, tuple(map(status.role_dir, sorted(status.committed))))
