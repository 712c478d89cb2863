"""Moves the value head of a critic between checkpoints of verl's own manager and ours.

mbridge saves verl's critics. It calls the head `lm_head.weight`, with one row, and writes the config of a language
model (verl 0.9.1 with mbridge 0.15). HuggingFace's name for it is `score.weight`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.manager import CheckpointManager

_HEAD = "lm_head.weight"
# The tensors that `load_hf` then ignores: the folder's head, and the model's.
IGNORED = (_HEAD, "output_layer.weight")


def value_head_file(folder: Path) -> Path | None:
    """Returns the file of a HuggingFace folder that has a critic's head as verl writes it; None if there is none."""
    from safetensors import safe_open  # verl needs it, too

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            if _HEAD in opened.keys() and opened.get_slice(_HEAD).get_shape()[0] == 1:  # noqa: SIM118  # not a dict
                return file
    return None


def fill_value_head(manager: CheckpointManager, chunks: Sequence[Any], optimizer: Any, file: Path) -> None:
    """Fills the model's head from the file. Every rank calls it; the ranks of the last stage have a head.

    Args:
        manager: connects the ranks.
        chunks: the model.
        optimizer: the optimizer whose main parameters are set from the head; None to leave them.
        file: the result of `value_head_file`.

    Raises CheckpointMismatchError: the head does not fit the model. The head has not changed.
    """
    from safetensors import safe_open

    read: list[tuple[Any, Any]] = []

    def request() -> dict[str, Any]:
        for head in _heads(chunks):
            with safe_open(file, framework="pt") as opened:
                saved = opened.get_tensor(_HEAD)
            if saved.shape != head.shape:
                raise CheckpointMismatchError(
                    f"{file}: tensor {_HEAD}: wanted {list(head.shape)}, found {list(saved.shape)}: choose the "
                    "checkpoint of a critic of this size"
                )
            read.append((head, saved))
        return {"file": str(file)}

    manager.agree("reading a critic's head", request, dict)
    for head, saved in read:
        head.data.copy_(saved)
    if optimizer is not None:
        optimizer.reload_model_params()


def _heads(chunks: Sequence[Any]) -> list[Any]:
    named = [(name, parameter) for chunk in chunks for name, parameter in chunk.named_parameters()]
    return [parameter for name, parameter in named if name.endswith("output_layer.weight")]
