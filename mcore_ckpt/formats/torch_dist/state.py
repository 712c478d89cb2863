"""Reads a rank's training state from a torch_dist checkpoint that megatron's trainer or verl wrote.

megatron's `sharded_state_dict` describes which part of which tensor a rank holds, but this package reads the files
itself. This package does not call `dist_checkpointing.load` (0.16.1), for two reasons. First, that function executes
the pickles in `.metadata` and in every sharded object (`FileSystemReader.read_metadata` and
`DefaultLoadPlanner.load_bytes` of torch 2.13). Second, loading the optimizer in this way fails with torch's Adam:
`sharded_state_dict(is_loading=True)` fails an assertion before the optimizer's first step, and
`load_parameter_state_from_fully_reshardable` looks for a `step` of each parameter
(`_set_main_param_and_optimizer_states`), but the checkpoint stores the step in the param groups.

The model loads under any layout. Random states load only under the same tensor- and pipeline-parallel sizes and, with
expert parallelism, only with the same number of replicas.
`optimizer_state.py` says under which layouts the optimizer's state loads. Padding rows of the vocabulary that the
checkpoint lacks keep their fresh values.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.formats.foreign_state import ForeignState, FoundPart, FoundWeight, LiveTraining, ModelTensor
from mcore_ckpt.formats.random_states import random_states_of
from mcore_ckpt.formats.step_folders import step_of
from mcore_ckpt.formats.torch_dist.arguments import arguments_in, facts_of_arguments
from mcore_ckpt.formats.torch_dist.files import OPTIMIZER_KEY, TorchDistFiles
from mcore_ckpt.formats.torch_dist.kind import torch_dist_folders
from mcore_ckpt.formats.torch_dist.optimizer_state import MAIN_NAMES, read_optimizer
from mcore_ckpt.formats.torch_dist.stored_keys import StoredKeys
from mcore_ckpt.ranks.rounds import Record, same_everywhere
from mcore_ckpt.sharding.synonyms import synonyms

# The arguments of megatron's trainer that say that weights were quantized.
_QUANTIZED = ("fp8_param_gather", "fp8_param", "fp4_param_gather", "fp4_param")


class TorchDistState(ForeignState):
    """The state in one torch_dist folder, or in the `dist_ckpt` folders that verl writes below a role's folder.

    The step is the checkpoint's `iteration`. If there is no `iteration`, the step is the number in the folder's name,
    or 0.
    """

    def __init__(self, path: Path, training: LiveTraining) -> None:
        self._path = path
        self._training = training
        self._files = TorchDistFiles(path, torch_dist_folders(path))
        self._keys = StoredKeys(self._files, training.layers)
        step, arguments = self._files.common.get("iteration"), arguments_in(self._files.common)
        self.step = step if isinstance(step, int) else step_of(path)
        self.nbytes = 0
        self.facts = facts_of_arguments(arguments)
        self.was_quantized = any(bool(arguments.get(name)) for name in _QUANTIZED)

    def weights(self) -> list[FoundWeight]:
        tensors, contents = self._tensors, self._training.contents
        has_some = "optimizer" in contents and self._missing(tensors) < len(tensors)
        if "model" not in contents and not has_some:
            return []
        with self._keys.explained():
            found = [self._read_weight(tensor) for tensor in tensors]
        self.nbytes = self._files.nbytes
        return found

    @cached_property
    def _tensors(self) -> Sequence[ModelTensor]:
        """The model's tensors that are to be loaded, under the names that the checkpoint uses.

        The names depend on flags that newer megatron versions store in the checkpoint (`content_metadata`), and on
        whether the layers were homogeneous, which not every checkpoint records. So this property tries the names for
        homogeneous layers and the names for other layers, and uses the list with fewer names that are missing in the
        checkpoint.
        """
        saved = self._files.common.get("content_metadata")
        flags = {key: each for key, each in saved.items() if isinstance(each, bool)} if isinstance(saved, dict) else {}
        choices: list[dict[str, bool]] = [flags, {**flags, "non_homogeneous_layers": True}]
        found = min(map(self._training.sharded, choices), key=self._missing)
        return self._training.chosen(found, self._files.names)

    def _missing(self, tensors: Sequence[ModelTensor]) -> int:
        return sum(not self._keys.has(tensor.key) for tensor in tensors)

    def _read_weight(self, tensor: ModelTensor) -> FoundWeight:
        # Padding rows of the vocabulary that the checkpoint lacks keep their values.
        memory = torch.empty(tensor.live.shape, dtype=tensor.live.dtype, device="cpu")
        if not tensor.is_quantized:
            memory.copy_(tensor.live.detach())
        return FoundWeight(tensor.live, tensor.fill(tensor.key, memory, self._keys.read))

    def optimizer(self, weights: Sequence[FoundWeight]) -> list[FoundPart]:
        found = read_optimizer(self._files, self._keys, self._training, self._tensors, weights)
        self.nbytes = self._files.nbytes
        return found

    def scheduler(self) -> dict[str, Any] | None:
        common = self._files.common
        found: dict[str, Any] | None = common.get("opt_param_scheduler", common.get("lr_scheduler"))
        return found

    def rng(self) -> dict[str, Any]:
        """Reads this rank's random states.

        The states are stored by pipeline and tensor rank and, under expert parallelism, also by replica.
        """
        at, sizes = self._training.position.coordinates, self._training.position.topology
        replica = at.dp * sizes.cp + at.cp
        by_replica = f"{at.pp}.{at.tp}.{replica}_{sizes.pp}.{sizes.tp}.{sizes.dp * sizes.cp}"
        names = [f"rng_state/shard_{place}" for place in (f"{at.pp}.{at.tp}_{sizes.pp}.{sizes.tp}", by_replica)]
        there = self._files.object_keys("rng_state/")
        key = next((name for name in names if name in there), None)
        if key is None:
            raise CheckpointMismatchError(
                f"{self._path}: random states: wanted {names[0]}, found {there[:4] or 'none'}: random states can be "
                "loaded only with the saved tensor and pipeline sizes. Leave 'extra' out of load_contents to start "
                "with fresh random states"
            )
        return random_states_of(self._files.read_object(key), at.dp, f"{self._path}: {key}")

    def report(self) -> Record:
        return {"names": self._files.digest(), "read": self._files.positions_read()}

    def check(self, reports: Sequence[Record]) -> None:
        """Refuses a checkpoint with a tensor that no rank reads, because the load would drop this tensor silently."""
        same_everywhere([{"names": report["names"]} for report in reports], f"{self._path}: the tensors seen there")
        left = self._files.names_not_in([report["read"] for report in reports])
        read = {_numbered(name) for name in set(self._files.names) - set(left)}
        with self._keys.explained():
            for name in left:
                # `convert` writes a norm under several names, one for each layer spec, and a main parameter under both
                # of megatron's names. A tensor counts as read if one of its names is read.
                if not any(synonym in read for synonym in synonyms(_numbered(name))):
                    self._check_not_wanted(name)

    def _check_not_wanted(self, name: str) -> None:
        kind = "optimizer" if OPTIMIZER_KEY.match(name) else "model"
        if kind in self._training.contents:
            why = " (is the parameter frozen now?)" if kind == "optimizer" else ""
            raise CheckpointMismatchError(
                f"{self._path}: tensor {name}: is in the checkpoint, but this training has no such tensor{why}"
            )


def _numbered(name: str) -> str:
    """Gives all keys of a tensor one form: one name for main parameters, and a layer number, which `synonyms` needs.

    A key that all layers share gets the number 0.
    """
    main, other = MAIN_NAMES
    name = re.sub(rf"\boptimizer\.state\.{other}\.", f"optimizer.state.{main}.", name)
    return re.sub(r"\blayers\.(?!\d)", "layers.0.", name)
