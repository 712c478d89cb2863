"""Delays method calls that would change the training state before the state has been copied from the GPU.

The delayed methods are `optimizer.step()`, parameter gathers, `reload_model_params` and `load_state_dict` of the
trainer's objects. A guarded method first makes its stream wait for the copies. The host waits only where it reads a
number from the state: with a gradient scaler, or with an optimizer that counts its steps on the GPU. If the memory of a
tensor is freed meanwhile, the allocator reuses that memory only after the copy (`record_stream`). Buffers are cloned on
the GPU in stream order, because `expert_bias` changes before `step()`. A save is a snapshot even in lazy mode if
parameters live in gradient memory, or if a model is in training and its manager has no optimizer (`why_not_lazy`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from functools import update_wrapper
from types import MethodType
from typing import Any

import torch

from mcore_ckpt.processes import Home
from mcore_ckpt.state.model import gradients_share_memory
from mcore_ckpt.state.optimizers.chain import optimizer_parts
from mcore_ckpt.state.trainer import Trainer

logger = logging.getLogger(__name__)


def changing_methods(trainer: Trainer) -> list[tuple[Any, str]]:
    """Lists megatron's methods (0.16.1) that write to parameters or to the optimizer's state, as (object, name)."""
    optimizers = [] if trainer.optimizer is None else [trainer.optimizer]
    optimizers += [part.megatron for part in optimizer_parts(trainer.optimizer)] if optimizers else []
    by_optimizer = ("step", "step_with_ready_grads", "reload_model_params", "load_state_dict")
    by_chunk = ("start_param_sync", "load_state_dict")
    unique = {id(optimizer): optimizer for optimizer in optimizers}.values()
    return [(optimizer, name) for optimizer in unique for name in by_optimizer] + [
        (chunk, name) for chunk in trainer.chunks for name in by_chunk
    ]


def why_not_lazy(trainer: Trainer) -> str | None:
    """Says what would change the training state without calling a guarded method; None if nothing would."""
    if gradients_share_memory(trainer.chunks):
        return "the next backward pass changes the parameters, because they share memory with gradients"
    if trainer.optimizer is None and any(each.requires_grad for chunk in trainer.chunks for each in chunk.parameters()):
        return "the manager has no optimizer whose step it could delay"
    return None


def methods_to_delay(trainer: Trainer) -> list[tuple[Any, str]]:
    """Lists the methods that wait for the copies of a lazy save. Warns on rank 0 if a lazy save is not possible."""
    config = trainer.config
    if not (config.async_save and config.async_mode == "lazy" and torch.cuda.is_available()):
        return []
    if (reason := why_not_lazy(trainer)) and trainer.agreement.is_coordinator:
        logger.warning(
            'async_mode is "lazy", but %s: save() waits until the state is copied, as with "snapshot". Pass the '
            "optimizer to the manager, even if save_contents leaves it out",
            reason,
        )
    return changing_methods(trainer)


class Guards:
    """Calls `before` each time before one of the given methods runs, until `remove` is called.

    The methods are replaced on the objects themselves and not on their classes, so that other models in this process
    are not affected.
    """

    def __init__(self, methods: Iterable[tuple[Any, str]], before: Callable[[], None]) -> None:
        self._before: Callable[[], None] | None = before
        self._home = Home()
        self._guarded = [self._guard(owner, name) for owner, name in methods if hasattr(owner, name)]

    def remove(self) -> None:
        """Restores the methods. A guard that other code has wrapped meanwhile stays, but no longer calls `before`."""
        self._before = None
        for method in self._guarded:
            if vars(method.owner).get(method.name) is not method.guard:
                continue
            if method.on_object:
                setattr(method.owner, method.name, method.original)
            else:
                delattr(method.owner, method.name)
        self._guarded = []

    def _guard(self, owner: Any, name: str) -> _Guarded:
        original = getattr(owner, name)
        guard = _Guard(self, owner, name, original)
        on_object = name in vars(owner)
        setattr(owner, name, guard)
        return _Guarded(owner, name, original, guard, on_object)

    def wait(self) -> None:
        # A forked child need not wait: it has its own copy of the state, from which nothing is copied.
        if self._before is not None and self._home.is_here:
            self._before()


class _Guard:
    """Replaces a method of `owner`. A deep copy of the owner, or an unpickled owner, has the original method."""

    def __init__(self, guards: Guards, owner: Any, name: str, original: Callable[..., Any]) -> None:
        update_wrapper(self, original)
        self._guards, self._owner, self._name, self._original = guards, owner, name, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._guards.wait()
        return self._original(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._owner))
        function = getattr(self._original, "__func__", None)
        if copied is None or function is None:
            return deepcopy(self._original, memo)
        return MethodType(function, copied)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner, self._name)


@dataclass(frozen=True)
class _Guarded:
    """A guarded method: the original, its guard, and whether the original is an attribute of the object itself."""

    owner: Any
    name: str
    original: Callable[..., Any]
    guard: Callable[..., Any]
    on_object: bool
