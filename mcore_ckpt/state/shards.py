"""The data that travels from the training state to the files and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mcore_ckpt.sharding.plan import ShardKey
from mcore_ckpt.sharding.regions import Region


@dataclass(frozen=True, eq=False)
class LocalShard:
    """A tensor of this rank's training state, and its region of a global tensor.

    Attributes:
        key: global name and kind.
        region: its place in the global tensor; `tensor` holds exactly the region's elements.
        tensor: the live tensor, on any device; for a parameter, the parameter itself.
        expert: whether it belongs to routed experts, which are replicated over other ranks than dense tensors.
        replica: whether another pipeline stage holds the same global tensor (tied embeddings) and writes it.
        is_buffer: whether it is neither parameter nor optimizer state. It may change at any point of a training step.
        refresh: reads the tensor anew, if `tensor` is only a copy (`_extra_state`). The function returns None if the
            state no longer exists.
        restore: sets the loaded value, if copying into `tensor` has no effect (`_extra_state`).
    """

    key: ShardKey
    region: Region
    tensor: torch.Tensor
    expert: bool = False
    replica: bool = False
    is_buffer: bool = False
    refresh: Callable[[], torch.Tensor | None] | None = None
    restore: Callable[[torch.Tensor], None] | None = None

    @property
    def is_frozen(self) -> bool:
        """True if this is a parameter that does not train."""
        return not self.is_buffer and not self.tensor.requires_grad


@dataclass(frozen=True, eq=False)
class ParameterState:
    """One parameter's part of the optimizer on this rank.

    Attributes:
        name: the parameter's global name.
        region: the range this rank owns.
        main: the main parameter, which the optimizer steps.
        is_model_view: whether `main` shares the memory of the model parameter (fp32 training).
        expert, replica: as in LocalShard.
        moments: tensors of the optimizer's state by kind (`exp_avg`, ...); empty before the first step.
    """

    name: str
    region: Region
    main: torch.Tensor
    is_model_view: bool
    expert: bool
    replica: bool
    moments: dict[str, torch.Tensor]
