"""Finds the checkpoint that a loop like Megatron-LM's resumes from: one of ours, or one of the framework's format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import MANIFEST_FILE, megatron_dir, read_manifest
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, UnsupportedError
from mcore_ckpt.formats import TorchDistFiles, torch_dist_folders
from mcore_ckpt.integrations.kit.arguments import COUNTERS
from mcore_ckpt.recover import resumable_steps
from mcore_ckpt.steps import complete_steps, read_tracker


@dataclass(frozen=True)
class Theirs:
    """A checkpoint in a framework's own format.

    Attributes:
        iteration: the iteration by which the framework would choose it.
        folder: its folder.
        state: what all ranks share, in the form of `LoopCheckpoints.save`.
        tp, pp: the tensor-parallel and pipeline-parallel sizes, which its random number generators fit.
    """

    iteration: int
    folder: Path
    state: dict[str, Any]
    tp: int
    pp: int


# Called with the folder of all checkpoints and the step that was asked for, or None for the newest. Returns a function
# that reads the checkpoint, with its iteration; None if there is none. Only rank 0 calls it.
FindTheirs = Callable[[Path, int | None], "tuple[int, Callable[[], Theirs]] | None"]


def find(root: Path, role: str, step: int | None, find_theirs: FindTheirs) -> dict[str, Any] | None:
    """Returns which checkpoint below a folder to load, as JSON values. Only rank 0 calls it.

    Args:
        root: the folder of all checkpoints, or the folder of one checkpoint of ours, or the folder of one step.
        role: the role in our steps.
        step: the step to load; None for the newest.
        find_theirs: finds a checkpoint in the framework's own format.

    Returns:
        {"step": step} for a step of ours; {"path": folder} for a folder that is a checkpoint of ours;
        {"theirs": folder, "state": {...}, "tp": size, "pp": size} for a checkpoint in the framework's own format; None
        if there never was a checkpoint.

    Raises:
        CheckpointNotFoundError: there are checkpoints, but none is complete; or `step` is given, but missing.
        CheckpointCorruptError: the framework's own checkpoint cannot be read.
    """
    named = next((folder for folder in (root, root / role) if (folder / MANIFEST_FILE).exists()), None)
    if named is not None:
        if step and read_manifest(named).step != step:
            raise CheckpointNotFoundError(f"{root}: is a checkpoint of step {read_manifest(named).step}, not of {step}")
        return {"path": str(named)}
    ours = [status.step for status in complete_steps(root) if role in status.committed]
    theirs = find_theirs(root, step)
    if theirs is not None:
        iteration, read = theirs
        if iteration not in ours and (step or not ours or ours[-1] < iteration):
            found = asdict(read())
            return {"theirs": str(found.pop("folder")), **found}
    # The manager finds the newest step itself, because it skips damaged ones.
    return {"step": step or None} if resumable_steps(root, (role,), step or None) else None


def megatron_checkpoint(root: Path, step: int | None) -> tuple[int, Callable[[], Theirs]] | None:
    """Finds the checkpoint of Megatron-LM's (`iter_0000100`, format torch_dist) that its tracker names, or of a step.

    Of Megatron-LM's folders, only the one that the tracker names is known to be complete. If the caller gives a step,
    its folder is not checked.
    """
    iteration = step or read_tracker(root)
    if iteration is None or not megatron_dir(root, iteration).is_dir():
        return None
    return iteration, lambda: read_megatron_checkpoint(megatron_dir(root, iteration), iteration)


def read_megatron_checkpoint(path: Path, iteration: int) -> Theirs:
    """Reads the state that all ranks share. Never executes code in a file.

    Raises CheckpointCorruptError: a file is missing or damaged.
    """
    common = TorchDistFiles(path, torch_dist_folders(path)).common
    args = vars(common["args"]) if "args" in common else {}
    state = {
        "iteration": common.get("iteration", 0),
        "num_floating_point_operations_so_far": common.get("num_floating_point_operations_so_far", 0),
        "no_save_rng": bool(args.get("no_save_rng", False)),
        **{name: args.get(name, 0) for name in COUNTERS},
    }
    sizes = (args.get(f"{kind}_model_parallel_size", 1) for kind in ("tensor", "pipeline"))
    return Theirs(iteration, path, state, *sizes)


def check_integrity(path: str) -> None:
    """Compares the files of a checkpoint of Megatron-LM's with the SHA-256 digests in it. Every rank calls it.

    Raises:
        CheckpointCorruptError: a file differs, or the checkpoint was saved without `verify_integrity`.
        UnsupportedError: this megatron-core, older than 0.17, cannot check digests.
    """
    from megatron.core.dist_checkpointing import validation
    from megatron.core.dist_checkpointing.core import CheckpointingException

    if not hasattr(validation, "verify_integrity_manifest"):
        raise UnsupportedError(
            f"{path}: args.verify_integrity is set, but this megatron-core cannot check the digests of Megatron-LM's "
            "checkpoints: leave the argument out, or use megatron-core 0.17 or newer"
        )
    try:
        validation.verify_integrity_manifest(path)
    except CheckpointingException as error:
        raise CheckpointCorruptError(
            f"{path}: {error}. To load it unchecked, leave out args.verify_integrity"
        ) from None
