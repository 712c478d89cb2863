"""Changes objects of a framework: gives them other attributes for a while, or one more base class."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def changed(owner: Any, **values: Any) -> Iterator[None]:
    """Gives attributes of an object, or names of a module, other values while the context is entered."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def with_first_base(stock: Any, first: type, module: str) -> Any:
    """Returns an object with the attributes of `stock`, whose class derives from `first` and then from stock's class.

    The result is a new object that shares all attributes with `stock`, because Python refuses to assign `__class__` for
    a class with several bases, such as ROLL's. `module` is the `__module__` of the new class.
    """
    cls = type(stock)
    made: Any = object.__new__(type(f"Checkpoint{cls.__name__}", (first, cls), {"__module__": module}))
    made.__dict__ = stock.__dict__
    return made
