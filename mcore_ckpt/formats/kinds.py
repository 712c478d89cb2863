"""Lists the kinds of checkpoints, and finds the kind of a folder.

To add a kind, add a room of `formats/` and an object to `KINDS`. All code that reads other programs' checkpoints asks
this list.
"""

from __future__ import annotations

from pathlib import Path

from mcore_ckpt.formats.checkpoint_kind import Backend, CheckpointKind
from mcore_ckpt.formats.fsdp.kind import Fsdp
from mcore_ckpt.formats.huggingface.kind import HuggingFace
from mcore_ckpt.formats.native.kind import Native
from mcore_ckpt.formats.torch_dist.kind import TorchDist
from mcore_ckpt.formats.verl_ranks.kind import VerlRanks

NATIVE = Native()

# A folder is of the first kind that recognizes the folder. The native kind is the first, because a folder with our
# manifest is ours, whatever else the folder contains.
KINDS: tuple[CheckpointKind, ...] = (NATIVE, TorchDist(), VerlRanks(), Fsdp(), HuggingFace())


def recognize(folder: Path, backend: Backend | None = None) -> CheckpointKind | None:
    """Returns the kind of a folder; None if the folder has no checkpoint of a known kind that `backend` writes.

    Raises CheckpointError: this process has no permission to read the file that tells the kind.
    """
    wanted = (kind for kind in KINDS if backend in (None, kind.backend))
    return next((kind for kind in wanted if kind.recognizes(folder)), None)


def kinds_by_name() -> dict[str, CheckpointKind]:
    return {kind.name: kind for kind in KINDS}


def kind_of(path: Path) -> str | None:
    """Returns the kind of a folder that another program's megatron training wrote, such as "torch_dist".

    Returns None if this package or an unknown program wrote the folder.

    Raises CheckpointError: this process has no permission to read the file that tells the kind.

    Example:
        >>> kind_of(Path("/nowhere")) is None
        True
    """
    found = recognize(path, "megatron")
    return None if found is None or found is NATIVE else found.name
