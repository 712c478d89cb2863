"""Finds the checkpoint that a Megatron-LM loop resumes from. It is one of ours, or one that Megatron-LM wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import megatron_dir
from mcore_ckpt.errors import CheckpointCorruptError, UnsupportedError
from mcore_ckpt.formats import TorchDistFiles, torch_dist_folders
from mcore_ckpt.recover import resumable_steps
from mcore_ckpt.steps import complete_steps, read_tracker

COUNTERS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")


def find(root: Path, role: str, step: int | None) -> dict[str, Any] | None:
    """Returns which checkpoint below a folder to load, as JSON values. Only rank 0 calls it.

    Args:
        root: the folder of all checkpoints.
        role: the role in our steps.
        step: the step to load; None for the newest.

    Returns:
        {"step": step} for a step of ours; {"theirs": folder, "state": {...}, "tp": size, "pp": size} for a checkpoint
        of Megatron-LM's; None if there never was a checkpoint.

    Raises:
        CheckpointNotFoundError: there are checkpoints, but none is complete; or `step` is given, but missing.
        CheckpointCorruptError: Megatron-LM's checkpoint cannot be read.
    """
    ours = [status.step for status in complete_steps(root) if role in status.committed]
    # Of Megatron-LM's folders, only the one that the tracker names is known to be complete. If the caller gives a step,
    # its folder is not checked.
    tracked = step or read_tracker(root)
    if tracked is not None and tracked not in ours and (step or not ours or ours[-1] < tracked):
        theirs = megatron_dir(root, tracked)
        if theirs.is_dir():
            return {"theirs": str(theirs), **_state_of_theirs(theirs)}
    found = resumable_steps(root, (role,), step or None)
    # The manager finds the newest step itself, because it skips damaged ones.
    return {"step": step or None} if found else None


def _state_of_theirs(path: Path) -> dict[str, Any]:
    """Returns the state that all ranks share, in the form of our `save_checkpoint`. Never executes code in a file."""
    common = TorchDistFiles(path, torch_dist_folders(path)).common
    args = vars(common["args"]) if "args" in common else {}
    state = {
        "iteration": common.get("iteration", 0),
        "num_floating_point_operations_so_far": common.get("num_floating_point_operations_so_far", 0),
        "no_save_rng": bool(args.get("no_save_rng", False)),
        **{name: args.get(name, 0) for name in COUNTERS},
    }
    return {
        "state": state,
        # The saved random number generators fit only these sizes.
        "tp": args.get("tensor_model_parallel_size", 1),
        "pp": args.get("pipeline_model_parallel_size", 1),
    }


def check_integrity(path: str) -> None:
    """Compares the files of Megatron-LM's checkpoint with the SHA-256 digests in it. Every rank calls it.

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
