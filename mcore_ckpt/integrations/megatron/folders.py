"""Which checkpoint of a folder a loop of Megatron-LM goes on from: one of ours, or one that it wrote itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import megatron_dir
from mcore_ckpt.formats import TorchDistFiles, torch_dist_folders
from mcore_ckpt.recover import resumable_steps
from mcore_ckpt.steps import complete_steps, read_tracker

COUNTERS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")


def find(root: Path, role: str, step: int | None) -> dict[str, Any] | None:
    """What to load below a folder, in plain JSON values. One rank looks.

    Args:
        root: the folder of all checkpoints.
        role: of ours.
        step: this one; None for the newest.

    Returns:
        {"step": step} of ours; {"theirs": folder, "state": {...}, "tp", "pp"} of Megatron-LM's; None if there never was
        anything.

    Raises:
        CheckpointNotFoundError: there are checkpoints, but none that is complete; or not the one asked for.
        CheckpointCorruptError: Megatron-LM's cannot be read.
    """
    ours = [status.step for status in complete_steps(root) if role in status.committed]
    # Of Megatron-LM's folders only the one that the tracker names is known to be whole, unless one is asked for.
    tracked = step or read_tracker(root)
    if tracked is not None and tracked not in ours and (step or not ours or ours[-1] < tracked):
        theirs = megatron_dir(root, tracked)
        if theirs.is_dir():
            return {"theirs": str(theirs), **_told_by(theirs)}
    found = resumable_steps(root, (role,), step or None)
    # The newest is the manager's to find: it passes over one that is damaged.
    return {"step": step or None} if found else None


def _told_by(path: Path) -> dict[str, Any]:
    """What all ranks share of it, as `save_checkpoint` of ours would have kept it. Nothing in it is executed."""
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
        # By which it has kept the generators.
        "tp": args.get("tensor_model_parallel_size", 1),
        "pp": args.get("pipeline_model_parallel_size", 1),
    }
