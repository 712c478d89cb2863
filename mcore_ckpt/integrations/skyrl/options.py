"""Joins SkyRL's own options with the options of this package."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import InvalidArgumentError, UnsupportedError
from mcore_ckpt.integrations.kit.options import kept_count, refuse_fast, refuse_skip

# The role of SkyRL's driver, and the name of its folder.
DRIVER_ROLE = "driver"
# The fields that `checkpoint_config` must not set. SkyRL has its own option for `async_save`, our strategy sets the
# roles, and copies in a remote store would lack the driver's role.
_SAID_ELSEWHERE = ("async_save", "roles", "remote", "prune_remote", "upload_timeout_s")


def options_of(config: CheckpointConfig, trainer_config: Any) -> CheckpointConfig:
    """Returns the options of this package, in which SkyRL's own options override the options of `config`.

    `trainer_config` is SkyRL's TrainerConfig. Raises UnsupportedError and InvalidArgumentError.
    """
    default = CheckpointConfig()
    for name in _SAID_ELSEWHERE:
        if getattr(config, name) != getattr(default, name):
            raise InvalidArgumentError(
                f"checkpoint_config.{name} is set, but SkyRL decides this, or does not support it: leave it out. "
                "SkyRL's option for async_save is trainer.policy.megatron_config.async_dist_ckpt_save"
            )
    refuse_fast(config, "checkpoint_config", "SkyRL's driver commits its role of each step only in trainer.ckpt_path")
    refuse_skip(config, "checkpoint_config", "SkyRL's driver commits its own role after each save")
    if trainer_config.strategy != "megatron":
        raise UnsupportedError(
            f"trainer.strategy is {trainer_config.strategy!r}, but mcore_ckpt supports only 'megatron'"
        )
    if "://" in str(trainer_config.ckpt_path):
        raise UnsupportedError(
            f"trainer.ckpt_path is {trainer_config.ckpt_path}: name a folder that all nodes share, because mcore_ckpt "
            "commits a step by renaming folders"
        )
    return replace(
        config,
        async_save=bool(getattr(trainer_config.policy.megatron_config, "async_dist_ckpt_save", False)),
        # The worker may move the parameters to the host as soon as `save_checkpoint` has returned.
        async_mode="snapshot",
        max_to_keep=kept_count(trainer_config.max_ckpts_to_keep) or config.max_to_keep,
    )
