"""Holding up what changes the training state while it is still being copied out of the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from functools import update_wrapper
from types import MethodType
from typing import Any


class Guards:
    """Calls `before` ahead of methods of the trainer's own objects.

    On the objects, not on their classes: another model in this process is none of our business. Removed by `remove`.

    Example:
        >>> guards = Guards([(optimizer, "step")], staging.hold)  # doctest: +SKIP
    """

    def __init__(self, methods: Iterable[tuple[Any, str]], before: Callable[[], None]) -> None:
        self._before: Callable[[], None] | None = before
        self._guarded = [self._guard(owner, name) for owner, name in methods if hasattr(owner, name)]

    def remove(self) -> None:
        """Puts the methods back. Where somebody has wrapped the guarded one since, that stays, and no longer waits."""
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
        if self._before is not None:
            self._before()


class _Guard:
    """Stands for a method of `owner`. A copy of the owner, or one from a pickle, gets the method, bound to itself."""

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
    """A method of an object, what it was, and whether the object itself had it, not its class."""

    owner: Any
    name: str
    original: Callable[..., Any]
    guard: Callable[..., Any]
    on_object: bool
