"""Reads the parts of a checkpoint that verl's own manager keeps outside of the `torch_dist` shards.

- HuggingFace weights, which verl writes by default.
- The adapters of verl 0.7: a file per rank. verl 0.8 and newer have adapters in `torch_dist` shards.
- The value head of a critic. mbridge, which saves verl's critics, calls the head `lm_head.weight`, with one row, and
  writes the config of a language model (verl 0.9.1 with mbridge 0.15). HuggingFace calls such a head `score.weight`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.errors import CheckpointMismatchError, UnsupportedError
from mcore_ckpt.formats import TorchDistFiles, kind_of, load_safely, torch_dist_folders
from mcore_ckpt.manager import CheckpointManager
from mcore_ckpt.ranks import read_topology
from mcore_ckpt.state import process_groups_of

# The folders of HuggingFace weights in verl 0.9 (`get_hf_model_checkpoint_path`), and in verl 0.5 to 0.8.
_WEIGHTS = ("model/huggingface", "huggingface")
_ADAPTERS = "adapter_checkpoint"  # the folder that `save_adapter_checkpoint` fills
_HEAD = "lm_head.weight"
# The names of a critic's head in a HuggingFace folder and in megatron's model. `load_hf` ignores both tensors.
HEADS = (_HEAD, "output_layer.weight")

_Pairs = Iterable[tuple[torch.Tensor, torch.Tensor]]


def huggingface_weights(folder: Path) -> Path | None:
    """Returns the folder of the HuggingFace weights; None if there is none, or if `torch_dist` shards hold the model.

    With a bridge and without `use_dist_checkpointing`, verl writes no shards of the model. For a model with adapters,
    verl writes only shards of the adapters.

    Raises CheckpointCorruptError: the list of shards is damaged.
    """
    if kind_of(folder) != "torch_dist":
        return None
    weights = next((folder / name for name in _WEIGHTS if any((folder / name).glob("*.safetensors"))), None)
    return None if weights is None or _has_model(folder) else weights


def _has_model(folder: Path) -> bool:
    names = TorchDistFiles(folder, torch_dist_folders(folder)).names
    # Names of optimizer state begin with `optimizer.`, or with `chained_0.optimizer.` in a chained optimizer.
    return not all("optimizer" in name.split(".")[:2] for name in names)


def adapter_folder(folder: Path) -> Path | None:
    """Returns the folder of the files with each rank's adapters; None if there is none."""
    files = folder / _ADAPTERS
    return files if kind_of(folder) == "torch_dist" and files.is_dir() else None


def value_head_file(folder: Path) -> Path | None:
    """Returns the file of a HuggingFace folder that has a critic's head under verl's name; None if there is none."""
    from safetensors import safe_open  # verl depends on safetensors

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            if _HEAD in opened.keys() and opened.get_slice(_HEAD).get_shape()[0] == 1:  # noqa: SIM118  # not a dict
                return file
    return None


def fill_adapters(manager: CheckpointManager, chunks: Sequence[Any], optimizer: Any, folder: Path) -> None:
    """Fills the model's adapters from an `adapter_folder`. The parallel layout must be the same as at the save.

    Every rank calls this function. Also sets the optimizer's main parameters from the adapters, unless `optimizer` is
    None.

    Raises:
        CheckpointMismatchError: a file does not fit the model. Nothing has changed.
        CheckpointCorruptError: a file is missing or damaged. Nothing has changed.
        UnsupportedError: the model has virtual stages.
    """

    def read() -> _Pairs:
        if len(chunks) > 1:
            raise UnsupportedError(
                f"{folder}: verl 0.7 saves only the first virtual stage's adapters (`save_adapter_checkpoint`), so "
                "the adapters of the other stages are lost: load a checkpoint without virtual stages"
            )
        return _read_adapters(chunks[0], folder / f"{_rank_name(chunks)}_adapter.pt")

    _fill(manager, "reading verl's adapters", {"folder": str(folder)}, read, optimizer)


def fill_value_head(manager: CheckpointManager, chunks: Sequence[Any], optimizer: Any, file: Path) -> None:
    """Fills the model's head from a `value_head_file`. Only ranks of the last stage have a head.

    Every rank calls this function. Also sets the optimizer's main parameter from the head, unless `optimizer` is None.

    Raises CheckpointMismatchError: the head does not fit the model. The head has not changed.
    """
    _fill(manager, "reading a critic's head", {"file": str(file)}, lambda: _read_heads(chunks, file), optimizer)


def _fill(
    manager: CheckpointManager, topic: str, question: dict[str, str], read: Callable[[], _Pairs], optimizer: Any
) -> None:
    """Copies saved tensors into live tensors, once all ranks have read their saved tensors."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def request() -> dict[str, str]:
        pairs.extend(read())
        return question

    manager.agree(topic, request, dict)
    for live, saved in pairs:
        live.data.copy_(saved)
    if optimizer is not None:
        optimizer.reload_model_params()


def _read_adapters(chunk: Any, file: Path) -> _Pairs:
    """Returns each adapter with its saved tensor. Unwraps the chunk, because the file has names without wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    found = load_safely(file, str(file))
    saved = found.get("adapter_state_dict") if isinstance(found, Mapping) else None
    live = {name: parameter for name, parameter in chunk.named_parameters() if parameter.requires_grad}
    if not isinstance(saved, Mapping) or saved.keys() != live.keys():
        names = sorted(map(str, live.keys() ^ (saved.keys() if isinstance(saved, Mapping) else set())))
        raise CheckpointMismatchError(
            f"{file}: its adapters are not the ones that the model trains: the file or the model lacks "
            f"{', '.join(names[:3])} (verl 0.7 saves only adapters): build the model with the file's adapters"
        )
    for name, tensor in saved.items():
        if not isinstance(tensor, torch.Tensor) or (tensor.shape, tensor.dtype) != (live[name].shape, live[name].dtype):
            raise CheckpointMismatchError(
                f"{file}: tensor {name}: wanted {list(live[name].shape)} {live[name].dtype}, found "
                f"{list(getattr(tensor, 'shape', ()))} {getattr(tensor, 'dtype', type(tensor).__name__)}: load it "
                "under the parallel layout that it was saved with"
            )
    return [(live[name], tensor) for name, tensor in saved.items()]


def _rank_name(chunks: Sequence[Any]) -> str:
    """Returns the name of this rank's file in verl 0.7 (`_get_rank_checkpoint_path`)."""
    at, sizes = read_topology(process_groups_of(chunks))
    stage, experts = f"_{at.pp:03d}" if sizes.pp > 1 else "", f"_{at.ep:03d}" if sizes.ep > 1 else ""
    return f"mp_rank_{at.tp:02d}{stage}{experts}"


def _read_heads(chunks: Sequence[Any], file: Path) -> _Pairs:
    from safetensors import safe_open

    named = [(name, parameter) for chunk in chunks for name, parameter in chunk.named_parameters()]
    for head in (parameter for name, parameter in named if name.endswith("output_layer.weight")):
        with safe_open(file, framework="pt") as opened:
            saved = opened.get_tensor(_HEAD)
        if saved.shape != head.shape:
            raise CheckpointMismatchError(
                f"{file}: tensor {_HEAD}: wanted {list(head.shape)}, found {list(saved.shape)}: choose the "
                "checkpoint of a critic of this size"
            )
        yield head, saved
