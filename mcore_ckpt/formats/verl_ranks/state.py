"""Reads a rank's training state from the per-rank folders of verl up to 0.4.

The files are read without verl and without megatron's `load_parameter_state` (0.16.1). That function needs Gloo groups
and an optimizer that already has state, and scatters data that each rank can read by itself.

TP, PP, VPP and EP must be the same as at the save. Each rank maps the file of its data-parallel group into memory and
takes its range. These checkpoints do not store the optimizer's step: the user gives it as `assume_optimizer_step`.
Param groups keep the user's values, with learning rates from the scheduler. The gradient scaler starts anew. The
training step is the number in the folder's name, or 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.formats.foreign_pickles import load_safely
from mcore_ckpt.formats.foreign_state import (
    ADAM_KINDS,
    BucketRange,
    ForeignState,
    FoundPart,
    FoundWeight,
    LivePart,
    LiveTraining,
    OwnedRange,
    Writers,
)
from mcore_ckpt.formats.random_states import random_states_of
from mcore_ckpt.formats.step_folders import step_of
from mcore_ckpt.formats.verl_ranks.kind import bare_name, model_file, rank_dirs
from mcore_ckpt.ranks.topology import Topology

_SCHEDULER_FILE = "optimizer_scheduler/optimizer_scheduler.pt"


class VerlRanksState(ForeignState):
    """The training state in one folder of per-rank files.

    Raises CheckpointMismatchError: the checkpoint was saved under another layout.
    """

    def __init__(self, path: Path, training: LiveTraining) -> None:
        self._path = path
        self._training = training
        self._at = training.position.coordinates
        self.step = step_of(path)
        self.nbytes = 0
        self.facts = {}
        _check_ranks(training, path)

    def weights(self) -> list[FoundWeight]:
        name = _rank_dir((self._at.tp, self._at.pp, self._at.ep), self._training.position.topology)
        file = model_file(self._path / "model" / name)
        assert file is not None, "rank_dirs lists only folders with a model file"
        saved = load_safely(file, str(file), mmap=True)
        saved = saved if isinstance(saved, (list, tuple)) else [saved]
        chunks = self._training.state_dicts()
        if len(saved) != len(chunks):
            raise CheckpointMismatchError(
                f"{file}: has {len(saved)} virtual chunks (vpp={len(saved)}), but the model has "
                f"vpp={len(chunks)}: use the layout that the checkpoint was saved with"
            )
        found = [
            weight
            for number, (wanted, tensors) in enumerate(zip(chunks, saved, strict=True))
            for weight in _read_chunk(f"{file}: chunk {number}", wanted, tensors)
        ]
        self.nbytes += sum(weight.loaded.nbytes for weight in found)
        return found

    def optimizer(self, weights: Sequence[FoundWeight]) -> list[FoundPart]:
        step = self._training.step_instead(self._path / "optim")
        self._training.require_distributed()
        parts = [
            FoundPart(list(self._read_part(number, part)), step=step)
            for number, part in enumerate(self._training.parts)
        ]
        self.nbytes += sum(tensor.nbytes for part in parts for by_kind in part.tensors for tensor in by_kind.values())
        return parts

    def _read_part(self, number: int, part: LivePart) -> Iterator[dict[str, torch.Tensor]]:
        if not part.ranges:
            return
        writers = _writers_of(self._training)
        file = self._path / file_names.optimizer_file(*(writers.experts if part.is_of_experts else writers.dense))
        buffers = _buffers_of_part(file, number, len(self._training.parts))
        for owned, where in zip(part.ranges, part.bucket_ranges(), strict=True):
            yield _read_range(file, buffers, owned, where)

    def scheduler(self) -> dict[str, Any] | None:
        file = self._path / _SCHEDULER_FILE
        if not file.is_file():
            return None  # if the trainer has a scheduler, check_scheduler raises an error
        state = load_safely(file, str(file))
        if not isinstance(state, dict):
            raise CheckpointMismatchError(
                f"{file}: wanted the state of an LR scheduler, found a {type(state).__name__}"
            )
        return state

    def rng(self) -> dict[str, Any]:
        file = self._path / file_names.rng_file(*self._at.place)
        if not file.is_file():
            raise CheckpointMismatchError(
                f"{file}: is missing: this rank's random states were not saved (was the data-parallel size "
                "different?). Leave 'extra' out of load_contents to start with fresh random states"
            )
        return random_states_of(load_safely(file, str(file)), self._at.dp, str(file))


def _writers_of(training: LiveTraining) -> Writers:
    assert training.writers is not None, "this kind has needs_writers"
    return training.writers


def _rank_dir(ranks: tuple[int, int, int], topology: Topology) -> str:
    """Returns the folder name that megatron's `get_checkpoint_name` gives a rank.

    The name omits pp and ep of size 1.
    """
    tp, pp, ep = ranks
    return f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if topology.pp > 1 else "") + (f"_{ep:03d}" if topology.ep > 1 else "")


def _check_ranks(training: LiveTraining, path: Path) -> None:
    topology, found = training.position.topology, rank_dirs(path)
    expected = {_rank_dir(ranks, topology) for ranks in _writers_of(training).model}
    if set(found) == expected:
        return
    raise CheckpointMismatchError(
        f"{path / 'model'}: was saved on {_describe(list(found.values()))}, but this training has tp={topology.tp}, "
        f"pp={topology.pp}, ep={topology.ep}: missing {sorted(expected - set(found))[:4]}, unexpected "
        f"{sorted(set(found) - expected)[:4]}. Per-rank checkpoints of verl can be loaded only with the layout that "
        "they were saved with: load this checkpoint with that layout, save with mcore_ckpt, and load the new "
        "checkpoint here"
    )


def _describe(numbers: Sequence[tuple[int, ...]]) -> str:
    sizes = [max(ranks) + 1 for ranks in zip(*numbers, strict=False)]
    names = {1: ("tp",), 2: ("tp", "pp or ep"), 3: ("tp", "pp", "ep")}[len(sizes)]
    return ", ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))


def _read_chunk(where: str, live: Mapping[str, Any], saved: Any) -> Iterator[FoundWeight]:
    if not isinstance(saved, Mapping):
        raise CheckpointMismatchError(f"{where}: wanted a state dict, found a {type(saved).__name__}")
    found = _tensors_of({bare_name(str(name)): value for name, value in saved.items()})
    wanted = _tensors_of(live)
    for name in [*wanted, *found]:
        _check_tensor(where, name, wanted.get(name), found.get(name))
    for name, tensor in wanted.items():
        yield FoundWeight(tensor, found[name].detach())


def _tensors_of(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    # Leave out transformer-engine's _extra_state, which is a pickle. Only delayed scaling needs this state, and delayed
    # scaling begins its history anew.
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and not name.endswith("_extra_state")
    }


def _check_tensor(where: str, name: str, wanted: torch.Tensor | None, found: torch.Tensor | None) -> None:
    wants, finds = (
        "no such tensor" if tensor is None else f"{list(tensor.shape)} {tensor.dtype}" for tensor in (wanted, found)
    )
    if wants != finds:
        raise CheckpointMismatchError(f"{where}: tensor {name}: wanted {wants}, found {finds}")


def _buffers_of_part(file: Path, number: int, parts: int) -> Mapping[Any, Any]:
    """Reads the buffers of chained optimizer `number`. The file has None for each optimizer that another rank wrote."""
    if not file.is_file():
        raise CheckpointMismatchError(
            f"{file}: is missing. verl wrote the optimizer state of a data-parallel group only to the file of the "
            "group's first rank. Some versions did not write the experts' state of every expert-parallel rank, and "
            "this state is lost. Leave 'optimizer' out of load_contents"
        )
    saved = load_safely(file, str(file), mmap=True)
    chained = saved if isinstance(saved, (list, tuple)) else [saved]
    if len(chained) != parts or not isinstance(chained[number], Mapping):
        raise CheckpointMismatchError(
            f"{file}: wanted the states of {parts} chained optimizers, and a dict at position {number}, found "
            f"{[type(state).__name__ for state in chained]}: use the layout and the number of experts of the save"
        )
    buffers: Mapping[Any, Any] = chained[number]
    if not buffers.get("buckets_coalesced"):
        raise CheckpointMismatchError(
            f"{file}: is in the format that megatron wrote before February 2024, which is not supported: load the "
            "checkpoint with a newer megatron and save it again"
        )
    return buffers


def _read_range(
    file: Path, buffers: Mapping[Any, Any], owned: OwnedRange, where: BucketRange
) -> dict[str, torch.Tensor]:
    tensors = buffers.get(where.buffer, {}).get(where.dtype)
    if not isinstance(tensors, Mapping) or any(not isinstance(tensors.get(kind), torch.Tensor) for kind in ADAM_KINDS):
        raise CheckpointMismatchError(
            f"{file}: optimizer state of {owned.name}: wanted buffer {where.buffer} of {where.dtype}, found "
            f"{[(key, list(value)) for key, value in buffers.items() if isinstance(value, Mapping)]}: use the dtypes "
            "of the save"
        )
    first = where.before + where.start
    for kind in ADAM_KINDS:
        if tensors[kind].shape != (where.buffer_numel,):
            raise CheckpointMismatchError(
                f"{file}: optimizer state of {owned.name}: {kind}: wanted a buffer of {where.buffer_numel} elements, "
                f"found {list(tensors[kind].shape)}: use the model, the layout and the bucket size of the save"
            )
    return {kind: tensors[kind][first : first + owned.stop - owned.start] for kind in ADAM_KINDS}
