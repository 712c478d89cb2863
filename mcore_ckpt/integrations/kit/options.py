"""Reads our options from a framework's configuration, and its words for how many checkpoints stay."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, fields
from functools import cache
from pkgutil import resolve_name
from typing import Any

from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import InvalidArgumentError


def own_fields(said_elsewhere: Collection[str]) -> list[Field[Any]]:
    """Returns the fields of CheckpointConfig for which a framework has no words of its own."""
    return [field for field in fields(CheckpointConfig) if field.name not in said_elsewhere]


def own_config(given: Mapping[str, Any], said_elsewhere: Collection[str], where: str) -> CheckpointConfig:
    """Returns the configuration that a mapping of our options describes.

    Args:
        given: the options by name. A list stands for a tuple, because YAML has no tuples. `listeners` has names (see
            `named_listeners`).
        said_elsewhere: the options for which the framework has words of its own.
        where: what the mapping is called there, for messages.

    Raises InvalidArgumentError: an option is unknown or said elsewhere, or a value is not allowed.
    """
    known = {field.name for field in own_fields(said_elsewhere)}
    unknown = sorted(given.keys() - known)
    if unknown:
        raise InvalidArgumentError(
            f"{where} has unknown options ({', '.join(map(repr, unknown))}): the known ones are "
            f"{', '.join(sorted(known))}"
        )
    options = {name: _frozen(value) for name, value in given.items()}
    if "listeners" in options:
        options["listeners"] = named_listeners(options["listeners"], where)
    return CheckpointConfig(**options)


def named_listeners(names: Any, where: str) -> Any:
    """Returns the listeners that names in a configuration stand for.

    Args:
        names: each is the path of a class or function, such as "my_training.monitoring.make_listener", which is called
            without arguments, once in a process, and returns the listener. What is not a name stays as it is.
        where: what the configuration is called, for messages.

    Raises InvalidArgumentError: a name leads nowhere, or to something that cannot be called.

    Example:
        >>> named_listeners(["mcore_ckpt.integrations.listeners.LoggingListener"], "options")  # doctest: +ELLIPSIS
        (<...LoggingListener object at ...>,)
    """
    if not isinstance(names, (list, tuple)):
        return names
    return tuple(_named(name, where) if isinstance(name, str) else name for name in names)


def _named(name: str, where: str) -> Any:
    try:
        make = resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidArgumentError(
            f"{where} has the listener {name!r}, which cannot be imported ({error}): use the path of a class or "
            "function, such as 'mcore_ckpt.integrations.listeners.LoggingListener'"
        ) from error
    if not callable(make):
        raise InvalidArgumentError(
            f"{where} has the listener {name!r}, which is {make!r}: use the path of a class or function that returns a "
            "listener"
        )
    return _made_by(make)


@cache  # frameworks read their options again and again
def _made_by(make: Callable[[], Any]) -> Any:
    return make()


def kept_count(count: int | None) -> int | None:
    """Returns how many checkpoints stay; None for all of them, where a framework says None, 0 or -1."""
    return count if count is not None and count > 0 else None


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
