"""Reads verl's configuration for the driver, and tells the workers that the driver commits a role of each step."""

from __future__ import annotations

import os
from typing import Any

from hydra.utils import get_class
from omegaconf import OmegaConf, open_dict

from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import InvalidArgumentError, UnsupportedError
from mcore_ckpt.integrations.kit.options import kept_count, refuse_fast
from mcore_ckpt.integrations.verl.config import McoreCkptConfig
from mcore_ckpt.integrations.verl.driver_files import DRIVER
from mcore_ckpt.integrations.verl.options import read_options, settings_of
from mcore_ckpt.integrations.verl.vendor import VENDOR

# The places in the configuration that have the options of each trained role.
_PLACES = {"actor": "actor_rollout_ref.actor", "critic": "critic"}
_OURS = "mcore_ckpt.integrations.verl.McoreCkptConfig"


def trained_roles(has_critic: bool) -> tuple[str, ...]:
    """Returns the roles that the workers of a run save."""
    return ("actor", "critic") if has_critic else ("actor",)


def declare_driver(config: Any, has_critic: bool) -> tuple[str, ...]:
    """Adds the roles of a step to the options that the workers will get, and returns the roles.

    The roles of a step are the driver's role, and the roles that the user has named (or else the trained roles).

    Raises InvalidArgumentError: a role that is trained is not saved by this package, so no step would be complete.
    """
    trained = trained_roles(has_critic)
    for role in trained:
        _check_is_ours(role, _options(config, role))
    roles = tuple(dict.fromkeys([*(_options(config, "actor").get("roles") or trained), DRIVER]))
    with open_dict(config):
        for options in (_options(config, role) for role in trained):
            if not _is_our_class(options.get("_target_")):
                options["_target_"] = _OURS  # verl's own class has no `roles`
            options["roles"] = list(roles)
    return roles


def settings_of_run(config: Any, has_critic: bool) -> CheckpointConfig:
    """Returns the settings of the actor's checkpoints, with the number of steps that stay.

    Raises UnsupportedError: there is a fast tier or a remote store, whose copies of the steps would lack the driver's
    role.
    """
    trainer = config.trainer
    counts = [trainer.get(f"max_{role}_ckpt_to_keep") for role in trained_roles(has_critic)]
    if trainer.get("remove_previous_ckpt_in_save"):
        counts = [1]
    # Take the smallest count. Each worker has noted the rules of its role, so the driver does not delete a step that
    # another role keeps.
    smallest = min((count for each in counts if (count := kept_count(each)) is not None), default=None)
    settings = settings_of(read_options(_options(config, "actor")), smallest)
    why = "the driver's files are only in the shared folder, so a step on the nodes would never be complete"
    refuse_fast(settings, "verl's checkpoint options", why)
    if settings.remote is not None or trainer.default_hdfs_dir:
        raise UnsupportedError(
            "trainer.checkpoint_callback_class makes the driver's files a role of each step, but copies in a remote "
            "store would lack this role, and never be complete: leave remote and trainer.default_hdfs_dir out"
        )
    return settings


def _options(config: Any, role: str) -> Any:
    return OmegaConf.select(config, f"{_PLACES[role]}.checkpoint")


def _check_is_ours(role: str, options: Any) -> None:
    if os.environ.get("VERL_ENGINE_VENDOR") == VENDOR or _is_our_class(options.get("_target_")):
        return
    raise InvalidArgumentError(
        f"trainer.checkpoint_callback_class is DriverRole, but {_PLACES[role]} is not saved by mcore_ckpt, so no step "
        f"would be complete: set {_PLACES[role]}.checkpoint._target_={_OURS}"
    )


def _is_our_class(target: str | None) -> bool:
    return target is not None and issubclass(get_class(target), McoreCkptConfig)
