"""The norm of a Mamba mixer's output."""

from typing import Any

import torch
import torch.nn.functional as F


class RMSNorm(torch.nn.Module):
    """Normalizes groups of `group_size` elements, and multiplies with the gate."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        **on: Any,
    ) -> None:
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size or hidden_size, norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=on.get("dtype")))
        self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        if z is not None and not self.norm_before_gate:
            x = x * F.silu(z)
        groups = x.unflatten(-1, (-1, self.group_size)).float()
        normal = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        found = normal.flatten(-2).to(x.dtype) * self.weight
        return found * F.silu(z) if z is not None and self.norm_before_gate else found
