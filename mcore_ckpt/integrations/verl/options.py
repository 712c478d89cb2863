"""Translates verl's checkpoint options into the options of a CheckpointConfig.

verl's options are in `actor.checkpoint`, `critic.checkpoint` and, for SFT, `checkpoint`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any

from mcore_ckpt.config import CheckpointConfig, FastTier, named_listeners
from mcore_ckpt.errors import InvalidArgumentError
from mcore_ckpt.field_checks import plain, unknown_text
from mcore_ckpt.integrations.verl.place import remote_root

VERLS_OWN = ("save_contents", "load_contents", "async_save", "strict")
# verl passes max_to_keep to each save, and skip_frozen follows from verl's own option for adapters (model.lora).
NOT_OPTIONS = ("max_to_keep", "skip_frozen")

_WHERE = "verl's checkpoint options"


def own_options() -> list[Field[Any]]:
    """Returns the fields of CheckpointConfig that verl's options lack."""
    return [field for field in fields(CheckpointConfig) if field.name not in (*VERLS_OWN, *NOT_OPTIONS)]


def read_options(options: Any) -> dict[str, Any]:
    """Returns the options that are set, by name.

    `options` are a DictConfig, verl's or our dataclass, a dict, any object that has options as attributes, or None.
    """
    if isinstance(options, Mapping):
        _refuse_misspelled(options)
    found: dict[str, Any] = {}
    for name in (*VERLS_OWN, *(field.name for field in own_options())):
        value = options.get(name) if isinstance(options, Mapping) else getattr(options, name, None)
        if value is not None:
            value = plain(value, _WHERE)
            found[name] = tuple(value) if isinstance(value, list) else value
    if "listeners" in found:
        found["listeners"] = named_listeners(found["listeners"], _WHERE)
    if "fast" in found:
        found["fast"] = FastTier.from_dict(found["fast"], f"fast of {_WHERE}")
    return found


def settings_of(options: Mapping[str, Any], max_to_keep: int | None, hdfs_path: str | None = None) -> CheckpointConfig:
    """Returns the CheckpointConfig for options from `read_options` and for verl's arguments of a save.

    Raises InvalidArgumentError: options contradict each other or have impossible values.
    """
    found = {**options, "max_to_keep": max_to_keep}
    if hdfs_path:
        # As verl does, apply max_ckpt_to_keep only to local folders, and never delete remote copies.
        found.update(remote=remote_root(hdfs_path), prune_remote=False)
    if max_to_keep is None:
        for rule in ("keep_every", "keep_best", "keep_for"):
            found.pop(rule, None)  # not allowed without max_to_keep, and not needed, because all steps stay
    return CheckpointConfig(**found)


def _refuse_misspelled(options: Mapping[str, Any]) -> None:
    """Raises InvalidArgumentError for a name that is nearly an option's name. Other unknown options may be verl's."""
    known = [*VERLS_OWN, *NOT_OPTIONS, *(field.name for field in own_options())]
    for name in options:
        if name not in known and difflib.get_close_matches(str(name), known, n=1, cutoff=0.85):
            raise InvalidArgumentError(f"{_WHERE} have {unknown_text([name], known)}")
