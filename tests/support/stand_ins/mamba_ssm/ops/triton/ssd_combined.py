"""The scan of a Mamba mixer."""

from typing import Any

import torch
import torch.nn.functional as F


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # as mamba_ssm calls it
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **more: Any,
) -> Any:
    """Selective scan of `x`, of shape (batch, length, heads, elements), with B and C of (batch, length, groups, state).

    transformers calls it, too.
    """
    heads = dt.shape[-1]
    dt = F.softplus(dt + dt_bias).clamp(*dt_limit)
    b, c = (each.repeat_interleave(heads // each.shape[2], 2) for each in (B, C))
    memory = x.new_zeros(x.shape[0], *x.shape[2:], b.shape[-1])
    found = []
    for at in range(x.shape[1]):
        memory = (
            memory * torch.exp(dt[:, at] * A)[..., None, None]
            + (dt[:, at, :, None] * x[:, at])[..., None] * b[:, at, :, None]
        )
        found.append((memory * c[:, at, :, None]).sum(-1) + D[:, None] * x[:, at])
    scanned = torch.stack(found, 1)
    return (scanned, memory) if return_final_states else scanned


def mamba_split_conv1d_scan_combined(
    zxbcdt: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dt_bias: torch.Tensor,
    A: torch.Tensor,
    D: torch.Tensor,
    *,
    headdim: int,
    ngroups: int,
    **more: Any,
) -> torch.Tensor:
    """Convolution, selective scan and gate of `zxbcdt`, of shape (batch, length, z + x + B + C + dt)."""
    heads = dt_bias.shape[0]
    inner = heads * headdim
    state = (zxbcdt.shape[-1] - 2 * inner - heads) // (2 * ngroups)
    z, mixed, dt = zxbcdt.split([inner, inner + 2 * ngroups * state, heads], -1)
    padded = F.pad(mixed.transpose(1, 2), (weight.shape[-1] - 1, 0))
    mixed = F.silu(F.conv1d(padded, weight[:, None], bias, groups=weight.shape[0])).transpose(1, 2)
    x, b, c = mixed.split([inner, ngroups * state, ngroups * state], -1)
    b, c = (each.unflatten(-1, (ngroups, state)) for each in (b, c))
    scanned = mamba_chunk_scan_combined(x.unflatten(-1, (heads, headdim)), dt, A, b, c, D=D, dt_bias=dt_bias)
    # The scan is in float32, as A is.
    return (scanned.flatten(2) * F.silu(z)).to(zxbcdt.dtype)
