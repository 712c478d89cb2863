"""Defines how a load asks for a training's state in another program's checkpoint, and how this state is returned.

A load describes what its rank trains (`LiveTraining`). Each kind of checkpoint that stores a training's state has
its own subclass of `ForeignState` (`torch_dist/state.py`, `verl_ranks/state.py`), which answers with CPU tensors and
plain values. The subclass knows the format of its kind. It knows none of the trainer's objects, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from mcore_ckpt.checkpoint.model_facts import Facts
from mcore_ckpt.errors import CheckpointMismatchError, UnsupportedError
from mcore_ckpt.formats.contract import RankPosition
from mcore_ckpt.ranks.rounds import Record
from mcore_ckpt.sharding.counterparts import Layers
from mcore_ckpt.sharding.plan import PARAM

ADAM_KINDS = (PARAM, "exp_avg", "exp_avg_sq")

Place = tuple[int, int, int, int]
"""The coordinates of a rank: (pp, tp, cp, dp)."""


class MegatronShard(Protocol):
    """The fields of megatron's ShardedTensor that say which box of which stored tensor fills `data`."""

    key: str
    data: torch.Tensor
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    prepend_axis_num: int
    allow_shape_mismatch: bool


class ModelTensor(Protocol):
    """A live tensor of the model, and where megatron's `sharded_state_dict` puts it."""

    @property
    def name(self) -> str:
        """The tensor's name in the module's state dict."""

    @property
    def key(self) -> str:
        """The tensor's key in a torch_dist checkpoint."""

    @property
    def live(self) -> torch.Tensor:
        """The tensor."""

    @property
    def is_quantized(self) -> bool:
        """True if the live tensor is quantized, so that its bytes must not be read."""

    def keys(self, key: str) -> list[str]:
        """Returns the keys of the tensor's parts; only `key`, the whole tensor's key, if the tensor has no parts."""

    def fill(self, key: str, memory: torch.Tensor, read: Callable[[MegatronShard], torch.Tensor]) -> torch.Tensor:
        """Reads each part with `read`, and returns a filled CPU tensor of the live tensor's shape.

        `read` fills either the parts of `memory` or copies of these parts. The method returns `memory`, or, if there
        are copies, a new tensor that joins the copies.
        """


@dataclass(frozen=True)
class BucketRange:
    """The place of an owned range in megatron's gradient buffers, in elements. Padding at bucket ends is not counted.

    Attributes:
        buffer: the buffer's index in the optimizer's `gbuf_ranges`.
        dtype: megatron's key for the buffer: (parameter dtype, gradient dtype).
        bucket: the bucket's index in the buffer.
        start: the range's offset in the whole bucket, of which each data-parallel rank has only a part.
        numel: the number of elements in the bucket.
        before: the number of elements in the buffer's earlier buckets.
        buffer_numel: the number of elements in the buffer.
    """

    buffer: int
    dtype: Any
    bucket: int
    start: int
    numel: int
    before: int
    buffer_numel: int


@dataclass(frozen=True, eq=False)
class OwnedRange:
    """A parameter, and its flat range `[start, stop)`, in elements, for which this rank owns optimizer state.

    Attributes:
        has_bound_state: whether the optimizer also has state whose shape differs from the parameter's shape.
    """

    name: str
    parameter: torch.Tensor
    start: int
    stop: int
    has_bound_state: bool


@dataclass(frozen=True, eq=False)
class LivePart:
    """One of the chained optimizers.

    Attributes:
        class_name: the name of the optimizer's class in megatron.
        kind_name: the kind of state that the optimizer keeps, for messages.
        moments: the kinds of moments that the optimizer keeps for each parameter.
        has_step: whether the optimizer counts steps.
        is_empty: whether the optimizer has no parameters.
        group_index: megatron's `data_parallel_group_idx`; None unless the optimizer is a DistributedOptimizer.
        ranges: the ranges that this rank owns.
        bucket_ranges: a function that returns the place of each of `ranges` in megatron's buffers, if the optimizer is
            a DistributedOptimizer.
    """

    class_name: str
    kind_name: str
    moments: tuple[str, ...]
    has_step: bool
    is_empty: bool
    is_distributed: bool
    group_index: int | None
    param_groups: Sequence[Mapping[str, Any]]
    ranges: Sequence[OwnedRange]
    bucket_ranges: Callable[[], Sequence[BucketRange]]

    @property
    def is_of_experts(self) -> bool:
        return any(group.get("is_expert_parallel") for group in self.param_groups)


@dataclass(frozen=True)
class Writers:
    """The ranks that have written this rank's state if the checkpoint was saved under the present layout.

    Attributes:
        dense: the place of the first rank of this rank's data-parallel group.
        experts: the place of the first rank in the group of ranks that have this rank's experts.
        model: the (tp, pp, ep) of every rank.
    """

    dense: Place
    experts: Place
    model: frozenset[tuple[int, int, int]]


@dataclass(frozen=True, eq=False)
class LiveTraining:
    """Describes the model and the optimizers of one rank, which a load fills.

    Attributes:
        contents: the words of `load_contents`.
        position: the layout, and this rank's place in it.
        writers: the ranks that wrote this rank's state; None if the kind of checkpoint does not need them
            (`CheckpointKind.needs_writers`).
        parts: the chained optimizers; empty if the optimizer is not to be loaded.
        assumed_step: the config's `assume_optimizer_step`.
        state_dicts: a function that returns the state dict of each chunk, with live tensors.
        sharded: a function that returns the model's tensors, as `sharded_state_dict` describes them. The function's
            argument is the metadata for `sharded_state_dict`: flags by name.
        chosen: a function that takes tensors of the model and the names in the checkpoint, and returns only the
            tensors that the load fills.
    """

    contents: Collection[str]
    position: RankPosition
    writers: Writers | None
    layers: Layers
    parts: Sequence[LivePart]
    assumed_step: int | None
    state_dicts: Callable[[], Sequence[Mapping[str, Any]]]
    sharded: Callable[[Mapping[str, bool]], Sequence[ModelTensor]]
    chosen: Callable[[Sequence[ModelTensor], Collection[str]], Sequence[ModelTensor]]

    def require_distributed(self) -> None:
        """Raises UnsupportedError unless all parts with parameters are DistributedOptimizers.

        Callers use this method for state that only a DistributedOptimizer can load.
        """
        for part in self.parts:
            if not part.is_empty and not part.is_distributed:
                raise UnsupportedError(
                    f"{part.class_name}: this checkpoint's optimizer state can be loaded only into "
                    "DistributedOptimizer: set use_distributed_optimizer=True, or leave 'optimizer' out of "
                    "load_contents"
                )

    def step_instead(self, where: Path) -> int:
        """Returns the config's `assume_optimizer_step`, for checkpoints that do not store the optimizer's step.

        Raises:
            CheckpointMismatchError: the config does not set `assume_optimizer_step`.
        """
        if self.assumed_step is None:
            raise CheckpointMismatchError(
                f"{where}: has no step count of the optimizer, and without this count, Adam's bias correction would be "
                "wrong. Set CheckpointConfig(assume_optimizer_step=N) to the number of steps that the optimizer had "
                "done when the checkpoint was saved (it can differ from the trainer's step), or leave 'optimizer' out "
                "of load_contents"
            )
        return self.assumed_step


@dataclass(frozen=True, eq=False)
class FoundWeight:
    """A live tensor of the model, and the CPU tensor to copy into it.

    `rounding` names both dtypes if the values were rounded; otherwise None.
    """

    live: torch.Tensor
    loaded: torch.Tensor
    rounding: str | None = None


@dataclass(frozen=True, eq=False)
class FoundPart:
    """The stored state of one chained optimizer.

    Attributes:
        tensors: for each owned range, flat CPU tensors by kind: the main parameter (PARAM) and the moments.
        param_groups: the stored param groups; None if no param groups are stored.
        step: the number of steps; None if the optimizer counts no steps.
        grad_scaler: the gradient scaler's state, or None.
    """

    tensors: Sequence[Mapping[str, torch.Tensor]]
    param_groups: Sequence[Mapping[str, Any]] | None = None
    step: int | None = None
    grad_scaler: Mapping[str, Any] | None = None


class ForeignState:
    """The state of a training in one checkpoint. Each rank reads its part into host memory.

    Each kind of checkpoint that stores the state of a training has a class that derives from this class. Every method
    raises CheckpointMismatchError if the checkpoint does not fit, CheckpointCorruptError if a file is missing, is
    damaged or contains something other than data, and UnsupportedError if the state has an unsupported form.

    Attributes:
        step: the training step at which the checkpoint was saved.
        nbytes: the bytes of tensors that this rank has read so far.
        facts: the facts about the model that the checkpoint's own files state.
        was_quantized: whether the checkpoint says that matrices were quantized in the training. Such a checkpoint
            stores the dequantized values of these matrices.
    """

    step: int
    nbytes: int
    facts: Facts
    was_quantized: bool = False

    def weights(self) -> Sequence[FoundWeight]:
        """Reads this rank's tensors of the model.

        If only the optimizer is loaded, the weights are read to check the optimizer's state. The list is empty if the
        checkpoint has no weights.
        """
        raise NotImplementedError

    def optimizer(self, weights: Sequence[FoundWeight]) -> Sequence[FoundPart]:
        """Reads the state of each chained optimizer. `weights` is the result of `weights()`."""
        raise NotImplementedError

    def scheduler(self) -> dict[str, Any] | None:
        """Returns the state dict of the LR scheduler, or None."""
        raise NotImplementedError

    def rng(self) -> dict[str, Any]:
        """Returns this rank's random states, in the form in which `state.rng.read_rng` returns them."""
        raise NotImplementedError

    def report(self) -> Record:
        """Returns a record of what this rank has read, as JSON values, for `check` on rank 0."""
        return {}

    def check(self, reports: Sequence[Record]) -> None:
        """Checks, on rank 0, the reports of all ranks."""
