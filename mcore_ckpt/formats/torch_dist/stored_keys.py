"""Finds the keys of tensors in a torch_dist checkpoint that numbers its layers differently from the live model.

A GPTModel's checkpoint fits a HybridModel that runs the same parts, and a HybridModel's checkpoint fits such a
GPTModel. The two models number their layers differently (`sharding/counterparts.py`). Only GPTModel stores one tensor,
with an axis of layers, for all layers that have the same structure. megatron-core 0.19 itself can load only a
GPTModel's checkpoint into a HybridModel (`gpt_checkpoint_interop.py`), and only without multi-token prediction.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.formats.foreign_state import MegatronShard
from mcore_ckpt.formats.torch_dist.files import TorchDistFiles, WantedPart
from mcore_ckpt.formats.torch_dist.keys import Place
from mcore_ckpt.sharding.counterparts import Layers, find_counterparts, layers_of
from mcore_ckpt.sharding.synonyms import synonyms

# The beginning of a key of the optimizer's state (`DistributedOptimizer.sharded_param_state_fully_reshardable`).
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.\w+\.")
# A longer axis is not accepted as an axis of layers, because damaged metadata may state any size.
_MOST_LAYERS = 10_000
_SHARED = re.compile(r"decoder\.layers\.(?!\d+\.)(.+)")
_NUMBERED = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


class StoredKeys:
    """Maps megatron's keys for the live model to the keys of one checkpoint.

    Args:
        layers: all layers of the live model.

    Attributes:
        layer_mismatch: why the layers of the checkpoint and of the model cannot be matched; None if they can be
            matched.
        are_other_layers: True if the checkpoint has the model's parts in layers with other numbers.
    """

    def __init__(self, files: TorchDistFiles, layers: Layers) -> None:
        self._files = files
        self._counterparts = find_counterparts(layers, layers_of(_numbered_names(files)))
        self.layer_mismatch = self._counterparts.layer_mismatch
        self.are_other_layers = bool(self._counterparts.stored)

    def has(self, key: str) -> bool:
        """Returns True if the checkpoint has the tensor that has this key in the live model."""
        return self._files.has_tensor(self.place(key).key)

    def read(self, shard: MegatronShard) -> torch.Tensor:
        """Reads the box that a shard of the live model describes into `shard.data`, and returns `shard.data`.

        Raises:
            CheckpointMismatchError: the stored tensor is missing, or has another shape or dtype.
            CheckpointCorruptError: the tensor cannot be read, or some elements are not stored.
        """
        place = self.place(shard.key)
        axes = shard.prepend_axis_num + len(place.index)
        memory = shard.data[(None,) * axes] if axes else shard.data
        shape, offset = (*place.lengths, *shard.global_shape), (*place.index, *shard.global_offset)
        self._files.read(WantedPart(place.key, shape, offset, memory, shard.allow_shape_mismatch))
        return shard.data

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Adds `layer_mismatch`, unless it is None, to a CheckpointMismatchError of the `with` block."""
        try:
            yield
        except CheckpointMismatchError as error:
            if self.layer_mismatch is None:
                raise
            raise CheckpointMismatchError(f"{error} ({self.layer_mismatch})") from error

    def place(self, key: str) -> Place:
        """Returns the stored place of the tensor that has this key in the live model.

        If the checkpoint lacks the tensor, returns a place with the same key, under which nothing is stored.
        """
        if not self.are_other_layers:
            return Place(key, (), ())
        match = _STATE.match(key)
        prefix = match[0] if match else ""
        for name in synonyms(self._counterparts.stored_name(key.removeprefix(prefix))):
            if self._files.has_tensor(prefix + name):
                return Place(prefix + name, (), ())
            layer = _NUMBERED.fullmatch(name)
            shared = "" if layer is None else f"{prefix}decoder.layers.{layer[2]}"
            if layer is not None and self._files.has_tensor(shared):
                return Place(shared, (int(layer[1]),), (self._files.size_of(shared)[0],))
        return Place(key, (), ())


def _numbered_names(files: TorchDistFiles) -> Iterator[str]:
    """Yields the names of all tensors of the model, with a number for each layer."""
    for key in files.names:
        name = _STATE.sub("", key, count=1)
        match, size = _SHARED.fullmatch(name), files.size_of(key)
        if match and size and size[0] <= _MOST_LAYERS:
            yield from (f"decoder.layers.{number}.{match[1]}" for number in range(size[0]))
        else:
            yield name
