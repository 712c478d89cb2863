"""What travels from the training state to the files and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mcore_ckpt.sharding.plan import ShardKey
from mcore_ckpt.sharding.regions import Region


@dataclass(frozen=True, eq=False)
class LocalShard:
    """A tensor of this rank's training state and what part of which global tensor it is.

    Attributes:
        key: global name and kind.
        region: its place in the global tensor; `tensor` holds exactly the region's elements.
        tensor: the live tensor, on any device; of a parameter, the parameter itself.
        expert: it belongs to routed experts, which are replicated over other ranks than dense tensors.
        replica: another pipeline stage holds the same global tensor (tied embeddings) and writes it.
        is_buffer: it is neither parameter nor optimizer state, and may change at any point of a training step.
        refresh: makes the tensor anew where it is not the live one (`_extra_state`); None if there is none any more.
        restore: hands loaded bytes back where copying into `tensor` would not do (`_extra_state`).
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
        """Whether it is a parameter that does not train."""
        return not self.is_buffer and not self.tensor.requires_grad


@dataclass(frozen=True, eq=False)
class ParameterState:
    """One parameter's part of the optimizer on this rank.

    Attributes:
        name: the parameter's global name.
        region: the range this rank owns.
        main: the main parameter: what the optimizer steps.
        is_model_view: `main` is the model parameter's own memory (fp32 training): its bytes are the model's.
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
