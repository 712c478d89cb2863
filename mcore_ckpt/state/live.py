"""Whether there are still the same tensors to save: asked before every save, so it must cost next to nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import call, eq, is_
from typing import Any
from weakref import ReferenceType, ref

import torch

from mcore_ckpt.state.model import unwrap
from mcore_ckpt.state.optimizer import STEP, OptimizerPart, optimizer_parts


class LiveObjects:
    """Where in a model and an optimizer which tensors were, to find out later whether they still are.

    Keeps no tensor alive: a trainer that offloads by putting others in their place gets its memory back.

    Example:
        >>> before = LiveObjects(chunks, optimizer)  # doctest: +SKIP
        >>> before.are_still_there()  # doctest: +SKIP
        True
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], optimizer: Any) -> None:
        # In columns, `dicts[i][keys[i]] is values[i]()`: comparing columns never leaves C; walking over modules and
        # parameters again takes several times as long.
        self._dicts: list[dict[Any, Any]] = []
        self._keys: list[Any] = []
        self._values: list[ReferenceType[Any] | _Kept] = []
        self._sized: list[Any] = []
        self._sizes: list[int] = []
        self._lists: list[tuple[list[Any], list[ReferenceType[Any] | _Kept]]] = []
        self._states: list[tuple[Any, ReferenceType[Any] | _Kept, dict[Any, Any] | None]] = []
        self._without_extra_state: list[torch.nn.Module] = []
        for chunk in chunks:
            for module in _modules(unwrap(chunk)):
                self._add_module(module)
        for part in optimizer_parts(optimizer) if optimizer is not None else ():
            self._add_optimizer(part)

    def are_still_there(self) -> bool:
        """Whether each of them is where it was, and no other has come."""
        return (
            all(map(eq, map(len, self._sized), self._sizes))
            and all(map(is_, map(dict.get, self._dicts, self._keys), map(call, self._values)))
            and all(all(map(is_, now, map(call, then))) for now, then in self._lists)
            and all(states.get(parameter()) is state for states, parameter, state in self._states)
            and all(module.get_extra_state() is None for module in self._without_extra_state)
        )

    def _add_module(self, module: torch.nn.Module) -> None:
        for members in (module._modules, module._parameters, module._buffers):
            self._add(members, [name for name in members if name not in module._non_persistent_buffers_set])
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state and module.get_extra_state() is None:
            self._without_extra_state.append(module)

    def _add_optimizer(self, part: OptimizerPart) -> None:
        # Not by iterating over `state`: it may hold entries of parameters that are no longer in any group.
        for group in part.param_groups:
            self._add(group, ["params"], sized=False)
            self._lists.append((group["params"], list(map(_reference, group["params"]))))
            self._size(group["params"])
            for parameter in group["params"]:
                state = part.inner.state.get(parameter)
                self._states.append((part.inner.state, _reference(parameter), state))
                if state is not None:
                    # Some optimizers put a new number there at every step.
                    self._add(state, [kind for kind in state if kind != STEP])

    def _add(self, members: dict[Any, Any], keys: Sequence[Any], sized: bool = True) -> None:
        self._dicts += [members] * len(keys)
        self._keys += keys
        self._values += [_reference(members[key]) for key in keys]
        if sized:
            self._size(members)

    def _size(self, members: Any) -> None:
        self._sized.append(members)
        self._sizes.append(len(members))


class _Kept:
    """Stands in for a weak reference to what cannot have one, and is not worth one."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __call__(self) -> object:
        return self._value


def _reference(value: object) -> ReferenceType[Any] | _Kept:
    return ref(value) if isinstance(value, torch.Tensor) else _Kept(value)


def _modules(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from _modules(child)
