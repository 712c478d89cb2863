"""Holding up what changes the training state while it is still being copied out of the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any


class Guards:
    """Calls `before` ahead of methods of the trainer's own objects.

    On the objects, not on their classes: another model in this process is none of our business. Removed by `remove`.

    Example:
        >>> guards = Guards([(optimizer, "step")], staging.hold)  # doctest: +SKIP
    """

    def __init__(self, methods: Iterable[tuple[Any, str]], before: Callable[[], None]) -> None:
        self._methods = [(owner, name) for owner, name in methods if hasattr(owner, name)]
        for owner, name in self._methods:
            setattr(owner, name, _guarded(getattr(owner, name), before))

    def remove(self) -> None:
        """Puts the methods back, where nobody has put another in their place since."""
        for owner, name in self._methods:
            current = vars(owner).get(name)
            original = getattr(current, "__wrapped__", None)
            if original is None:
                continue
            if getattr(original, "__self__", None) is owner:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._methods = []


def _guarded(method: Callable[..., Any], before: Callable[[], None]) -> Callable[..., Any]:
    @wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        before()
        return method(*args, **kwargs)

    return guarded
