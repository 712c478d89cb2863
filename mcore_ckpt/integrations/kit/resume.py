"""Finds the checkpoint that a loop like Megatron-LM's resumes from: one of ours, or one in the framework's format."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import MANIFEST_FILE, TRACKER_FILE, megatron_dir, read_manifest
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, UnsupportedError
from mcore_ckpt.formats import TorchDistFiles, kind_of, torch_dist_folders
from mcore_ckpt.integrations.kit.arguments import COUNTERS
from mcore_ckpt.recover import resumable_steps
from mcore_ckpt.steps import complete_steps, read_tracker

# Megatron-LM's name for weights without an iteration, as a folder and in the tracker.
_RELEASE = "release"


@dataclass(frozen=True)
class Theirs:
    """A checkpoint in a framework's own format.

    `state` is the state that all ranks share, in the form of `LoopCheckpoints.save`. The saved random states belong to
    the parallel sizes `tp` and `pp`. `weights_alone` tells whether the checkpoint has only weights.
    """

    folder: Path
    state: dict[str, Any]
    tp: int
    pp: int
    weights_alone: bool = False


# A function whose arguments are the folder of all checkpoints and the requested step (None: the newest). It returns the
# checkpoint's iteration, and a function that reads the checkpoint; None if there is no checkpoint. Only rank 0 calls a
# FindTheirs.
FindTheirs = Callable[[Path, int | None], "tuple[int, Callable[[], Theirs]] | None"]


def find(
    root: Path, role: str, step: int | None, find_theirs: FindTheirs, on_nodes: Sequence[int] = ()
) -> dict[str, Any] | None:
    """Returns which checkpoint below a folder to load, as JSON values. Only rank 0 calls this function.

    `root` is the folder of all checkpoints, of one checkpoint of ours, or of one step. Without `step`, the newest
    step is wanted. `on_nodes` lists the steps in the nodes' folders of a fast tier. If `step` is given, `on_nodes`
    lists no other step.

    Returns:
        {"step": step} for a step of ours; {"path": folder} for a folder that is a checkpoint of ours;
        {"theirs": folder, ...} with the other fields of Theirs for a checkpoint in the framework's own format; None if
        there never was a checkpoint.

    Raises:
        CheckpointNotFoundError: there are checkpoints, but none is complete; or `step` is given, but there is no such
            step.
        CheckpointCorruptError: the framework's own checkpoint cannot be read; or no step of ours is complete, and
            files of a committed step are missing.
    """
    named = next((folder for folder in (root, root / role) if (folder / MANIFEST_FILE).exists()), None)
    if named is not None:
        if step is not None and read_manifest(named).step != step:
            raise CheckpointNotFoundError(
                f"{root}: is a checkpoint of step {read_manifest(named).step}, not {step}: leave out the step, "
                "or name the folder of all checkpoints"
            )
        return {"path": str(named)}
    ours = sorted({*on_nodes, *(status.step for status in complete_steps(root) if role in status.committed)})
    theirs = find_theirs(root, step)
    if theirs is not None:
        iteration, read = theirs
        if iteration not in ours and (step is not None or not ours or ours[-1] < iteration):
            found = asdict(read())
            return {"theirs": str(found.pop("folder")), **found}
    # The manager finds the newest step itself, because it also skips damaged steps.
    return {"step": step} if on_nodes or resumable_steps(root, (role,), step) else None


def megatron_checkpoint(root: Path, step: int | None) -> tuple[int, Callable[[], Theirs]] | None:
    """Finds the Megatron-LM checkpoint (format torch_dist) of a given step, or else of the step that the tracker names.

    The root may also be the checkpoint's own folder, such as `iter_0000100`. Only the folder that the tracker names is
    known to be complete. If the caller gives a step or the checkpoint's own folder, nothing checks whether the
    checkpoint is complete.
    """
    own = re.fullmatch(r"iter_(\d{7})|release", root.name)
    if own is not None and step is None and kind_of(root) == "torch_dist":
        return int(own[1] or 0), lambda: read_megatron_checkpoint(root)
    if step is None and _names_release(root):
        return 0, lambda: read_megatron_checkpoint(root / _RELEASE)
    iteration = read_tracker(root) if step is None else step
    if iteration is None or not megatron_dir(root, iteration).is_dir():
        return None
    return iteration, lambda: read_megatron_checkpoint(megatron_dir(root, iteration))


def read_megatron_checkpoint(path: Path) -> Theirs:
    """Reads the state that all ranks share. Never executes code in a file.

    A released checkpoint has only weights, and training begins at iteration 0 with them (as Megatron-LM's
    `load_checkpoint` does, core_r0.16 to main).

    Raises CheckpointCorruptError: a file is missing or damaged.
    """
    common = TorchDistFiles(path, torch_dist_folders(path)).common
    args = vars(common["args"]) if "args" in common else {}
    is_release = path.name == _RELEASE
    state = {
        "iteration": 0 if is_release else common.get("iteration", 0),
        "num_floating_point_operations_so_far": common.get("num_floating_point_operations_so_far", 0),
        "no_save_rng": is_release or bool(args.get("no_save_rng", False)),
        **{name: 0 if is_release else args.get(name, 0) for name in COUNTERS},
    }
    tp, pp = args.get("tensor_model_parallel_size", 1), args.get("pipeline_model_parallel_size", 1)
    return Theirs(path, state, tp, pp, is_release)


def _names_release(root: Path) -> bool:
    """True if the tracker names released weights (slime's `tools/convert_hf_to_torch_dist.py` writes such weights)."""
    try:
        return (root / TRACKER_FILE).read_bytes()[:99].strip() == _RELEASE.encode() and (root / _RELEASE).is_dir()
    except OSError:
        return False


def check_integrity(path: str) -> None:
    """Compares the files of a Megatron-LM checkpoint with its SHA-256 digests. Every rank calls this function.

    Raises:
        CheckpointCorruptError: a file differs, or the checkpoint was saved without `verify_integrity`.
        UnsupportedError: this megatron-core cannot check digests, because it is older than 0.17.
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
