"""Detects whether the tensors to save are still the same objects.

Every save runs this check, so it must take almost no time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import eq, is_
from typing import Any
from weakref import ref

import torch

from mcore_ckpt.state.model import unwrap
from mcore_ckpt.state.optimizers.chain import optimizer_parts
from mcore_ckpt.state.optimizers.part import STEP, OptimizerPart


class LiveObjects:
    """A record of which tensor was at which place in a model and an optimizer. The record detects later changes.

    The record keeps no tensor alive, so a trainer that offloads by replacing tensors gets the memory back.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], optimizer: Any) -> None:
        # The parallel lists below are compared by `map` in C, without touching a tensor. Walking over modules and
        # parameters again would take several times as long.
        self._empty: list[dict[str, Any]] = []
        self._submodules: list[dict[str, Any]] = []
        self._submodules_before: list[dict[str, Any]] = []
        self._with_tensors: list[dict[str, Any]] = []
        self._sizes: list[int] = []
        # As long as nothing has changed, id(_dicts[i][_keys[i]]) == _values[i].
        self._dicts: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._values: list[int] = []
        self._watch = _Watch()
        self._without_extra_state: list[torch.nn.Module] = []
        self._chunks = [(chunk, ref(unwrap(chunk))) for chunk in chunks]
        self._optimizer = optimizer
        for chunk in chunks:
            for module in _modules(unwrap(chunk)):
                self._add_module(module)
        self._parts = [part.megatron for part in _parts(optimizer)]
        self._optimizers = [_LiveOptimizer(part) for part in _parts(optimizer) if part.inner is not None]

    def are_still_there(self) -> bool:
        """Returns True if each place still holds the same tensor object, and no tensor is new."""
        parts = [part.megatron for part in _parts(self._optimizer)]
        return (
            all(unwrap(chunk) is module() for chunk, module in self._chunks)
            and len(parts) == len(self._parts)
            and all(map(is_, parts, self._parts))
            and not any(self._empty)
            and all(map(eq, self._submodules, self._submodules_before))
            and all(map(eq, map(len, self._with_tensors), self._sizes))
            and all(map(eq, map(id, map(dict.get, self._dicts, self._keys)), self._values))
            and not self._watch.has_died
            and all(optimizer.is_still_there() for optimizer in self._optimizers)
            and all(module.get_extra_state() is None for module in self._without_extra_state)
        )

    def _add_module(self, module: torch.nn.Module) -> None:
        if module._modules:
            self._submodules.append(module._modules)
            self._submodules_before.append(dict(module._modules))
        for tensors in (module._parameters, module._buffers):
            if tensors:
                self._add(tensors, [name for name in tensors if name not in module._non_persistent_buffers_set])
        self._empty += [members for members in (module._modules, module._parameters, module._buffers) if not members]
        get = type(module).get_extra_state
        # Leave out megatron's own layers, whose `get_extra_state` always returns None. They have this method only
        # because transformer-engine requires it.
        if not get.__module__.startswith(("torch.", "megatron.core.")) and module.get_extra_state() is None:
            self._without_extra_state.append(module)

    def _add(self, tensors: dict[str, Any], names: Sequence[str]) -> None:
        self._with_tensors.append(tensors)
        self._sizes.append(len(tensors))
        self._dicts += [tensors] * len(names)
        self._keys += names
        self._values += [self._watch.add(tensors[name]) for name in names]


def _parts(optimizer: Any) -> list[OptimizerPart]:
    return [] if optimizer is None else optimizer_parts(optimizer)


class _LiveOptimizer:
    """A record of the parameters of one optimizer, and of the kinds and tensors of their state.

    Each check reads `state` and `param_groups` from the optimizer, because `load_state_dict` replaces both. If this
    record kept the old objects, they would always look unchanged.
    """

    def __init__(self, part: OptimizerPart) -> None:
        self._part = part
        self._inner: Any = part.inner
        self._sizes = [len(group["params"]) for group in part.param_groups]
        self._watch = _Watch()
        self._parameters = [self._watch.add(parameter) for parameter in part.watched()]
        self._mains = [self._watch.add(main) for main in part.watched_mains()]
        states = list(map(part.state_of, part.watched()))
        self._kinds = list(map(len, states))
        # STEP is left out, because some optimizers replace its tensor at every step.
        found = [(at, kind, value) for at, state in enumerate(states) for kind, value in state.items() if kind != STEP]
        self._at = [at for at, _, _ in found]
        self._keys = [kind for _, kind, _ in found]
        self._values = [self._watch.add(value) for _, _, value in found]

    def is_still_there(self) -> bool:
        current: Any = getattr(self._part.megatron, "optimizer", None)
        if current is not self._inner:
            return False
        if [len(group["params"]) for group in self._part.param_groups] != self._sizes:
            return False
        # Compare `watched()`, and not the keys of `state`, which can include parameters that are no longer in any
        # group.
        parameters = self._part.watched()
        if list(map(id, parameters)) != self._parameters or self._watch.has_died:
            return False
        if list(map(id, self._part.watched_mains())) != self._mains:
            return False
        states = list(map(self._part.state_of, parameters))
        if list(map(len, states)) != self._kinds:
            return False
        return all(map(eq, map(id, map(dict.get, map(states.__getitem__, self._at), self._keys)), self._values))


class _Watch:
    """Tells whether remembered ids are still valid. An id can be reused only after its tensor has been freed."""

    def __init__(self) -> None:
        self.has_died = False
        self._held: list[object] = []

    def add(self, value: object) -> int:
        # References to tensors are weak, so that a trainer that replaces a tensor gets the memory back.
        self._held.append(ref(value, self._note_death) if isinstance(value, torch.Tensor) else value)
        return id(value)

    def _note_death(self, _: object) -> None:
        self.has_died = True


def _modules(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from _modules(child)
