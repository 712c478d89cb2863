"""The data classes that describe the tensors of the training state for saving and loading."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from mcore_ckpt.sharding.plan import ShardKey
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.state.quantized import is_quantized


@dataclass(frozen=True, eq=False)
class LocalShard:
    """A tensor of this rank's training state, and its region of a global tensor.

    Attributes:
        key: the global name and the kind of the shard.
        region: the part of the global tensor that `tensor` holds.
        tensor: the live tensor, on any device. For a parameter, it is the parameter itself.
        expert: whether the tensor belongs to routed experts, which are replicated over other ranks than dense tensors.
        replica: whether another pipeline stage holds the same global tensor (tied embeddings) and writes it.
        is_buffer: whether the tensor is neither a parameter nor optimizer state. Such a tensor can change at any point
            of a training step.
        of_all_experts: True for an adapter of all experts on this rank (grouped experts), but only if the tensors of
            the expert-parallel ranks are equal, or are different regions of one global tensor.
        refresh: only for an `_extra_state`: the function that reads the state again, because `tensor` is only a copy.
            The function returns None if the state no longer exists.
        restore: only for an `_extra_state`: the function that sets the loaded state, because copying into `tensor`
            would not change the module.
    """

    key: ShardKey
    region: Region
    tensor: torch.Tensor
    expert: bool = False
    replica: bool = False
    is_buffer: bool = False
    of_all_experts: bool = False
    refresh: Callable[[], torch.Tensor | None] | None = None
    restore: Callable[[torch.Tensor], None] | None = None

    @property
    def is_frozen(self) -> bool:
        """True if the tensor is a parameter that does not train."""
        return not self.is_buffer and not self.tensor.requires_grad

    @property
    def is_quantized(self) -> bool:
        """True if the tensor is a parameter in 8 or 4 bits."""
        return not self.is_buffer and is_quantized(self.tensor)


@dataclass(frozen=True, eq=False)
class ParameterState:
    """The optimizer's state of one parameter on this rank.

    Attributes:
        region: the part of the global parameter that this rank owns.
        key: the tensor under which the optimizer keeps the state.
        main: the main parameter, which the optimizer updates.
        is_model_view: whether `main` shares the memory of the model parameter (fp32 training).
        expert, replica: as in LocalShard.
        group: the number of the parameter's group in the optimizer on this rank; None if the parameter is in no group.
        moments: the tensors of the optimizer's state by kind (`exp_avg`, ...). Empty before the first step.
        bound: the bound state by kind: tensors that belong to exactly this region (SOAP's eigenbases).
        scales: the scales of the main parameter and of moments that are kept in a scaled form, by kind: one fp32 number
            each.
        upper: the upper 16 bits of each value (bfloat16), if `main` has only the lower bits (int16); None otherwise.
    """

    name: str
    region: Region
    key: torch.Tensor
    main: torch.Tensor
    is_model_view: bool
    expert: bool
    replica: bool
    group: int | None
    moments: dict[str, torch.Tensor]
    bound: Mapping[str, torch.Tensor] = field(default_factory=dict)
    scales: Mapping[str, torch.Tensor] = field(default_factory=dict)
    upper: torch.Tensor | None = None
