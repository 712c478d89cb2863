"""Reads our options from a framework's configuration, and its words for how many checkpoints stay."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, fields
from functools import cache
from pkgutil import resolve_name
from typing import Any

from mcore_ckpt.config import CheckpointConfig, FastTier
from mcore_ckpt.errors import InvalidArgumentError, UnsupportedError


def own_fields(said_elsewhere: Collection[str]) -> list[Field[Any]]:
    """Returns the fields of CheckpointConfig for which a framework has no words of its own."""
    return [field for field in fields(CheckpointConfig) if field.name not in said_elsewhere]


def own_config(given: Mapping[str, Any], said_elsewhere: Collection[str], where: str) -> CheckpointConfig:
    """Returns the configuration that a mapping of our options describes.

    Args:
        given: the options by name. A list stands for a tuple, because YAML has no tuples. `listeners` has names (see
            `named_listeners`), and `fast` is a mapping (see `fast_tier`).
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
    if "fast" in options:
        options["fast"] = fast_tier(options["fast"], where)
    return CheckpointConfig(**options)


def fast_tier(given: Any, where: str) -> FastTier | None:
    """Returns the fast tier that a mapping of FastTier's fields describes.

    Args:
        given: the fields by name. `domain` may be the path of a function, such as "my_training.racks.rack". A FastTier,
            and None, stay as they are.
        where: what the configuration is called, for messages.

    Raises InvalidArgumentError: a field is unknown or has a value that is not allowed, or the function is not found.

    Example:
        >>> fast_tier({"folder": "/dev/shm/run", "durable_every": 5}, "options").durable_every
        5
    """
    if given is None or isinstance(given, FastTier):
        return given
    if not isinstance(given, Mapping):
        raise InvalidArgumentError(f"{where} has fast = {given!r}: use a mapping, such as {{'folder': '/dev/shm/run'}}")
    known = [field.name for field in fields(FastTier)]
    unknown = sorted(map(str, given.keys() - set(known)))
    if unknown or "folder" not in given:
        what = f"fields that are unknown ({', '.join(map(repr, unknown))})" if unknown else "no folder"
        raise InvalidArgumentError(f"fast of {where} has {what}: the fields are {', '.join(known)}; folder is needed")
    values = dict(given)
    if isinstance(values.get("domain"), str):
        values["domain"] = _function(values["domain"], "the function of failure domains", where)
    return FastTier(**values)


def refuse_fast(config: CheckpointConfig, where: str, why: str) -> None:
    """Raises UnsupportedError if a configuration has a fast tier, with which a framework would not resume.

    Args:
        config: the configuration.
        where: what it is called in the framework.
        why: why the framework needs all steps in a shared folder.
    """
    if config.fast is not None:
        raise UnsupportedError(
            f"{where} has a fast tier, but {why}: leave fast out, and save to a folder that all nodes share"
        )


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


def _function(name: str, what: str, where: str) -> Any:
    try:
        return resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidArgumentError(
            f"{where} names {what} {name!r}, which cannot be imported ({error}): use the path of a function, such as "
            "'my_training.racks.rack'"
        ) from error


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
