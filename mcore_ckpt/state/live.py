"""Which tensors there are to save, cheap enough to ask before every save."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mcore_ckpt.state.model import unwrap
from mcore_ckpt.state.optimizer import STEP, optimizer_parts


def live_objects(chunks: Sequence[torch.nn.Module], optimizer: Any) -> list[object]:
    """Names and tensors of the model and the optimizer, in a fixed order.

    As long as this is the same list of the same objects, what was planned for them holds. The list keeps them alive,
    so that no other can come to have the same identity.
    """
    found: list[object] = []
    for chunk in chunks:
        for module in _modules(unwrap(chunk)):
            found += module._modules
            found += module._parameters
            found += module._parameters.values()
            for name, buffer in module._buffers.items():
                if name not in module._non_persistent_buffers_set:
                    found += (name, buffer)
    if optimizer is not None:
        for part in optimizer_parts(optimizer):
            found += _optimizer_objects(part)
    return found


def _modules(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Not `modules()`, which spells out the path of each: most of the time of a save of many small tensors."""
    stack: list[torch.nn.Module | None] = [module]
    while stack:
        module_or_none = stack.pop()
        if module_or_none is not None:
            yield module_or_none
            stack += module_or_none._modules.values()


def _optimizer_objects(part: Any) -> Iterator[object]:
    # Not by iterating over `state`: it may hold entries of parameters that are no longer in any group.
    for group in part.param_groups:
        for parameter in group["params"]:
            yield parameter
            for kind, value in part.inner.state.get(parameter, {}).items():
                if kind != STEP:
                    yield kind
                    yield value
