"""Checkpoints for slime (2026-08). One argument installs this integration:

    --custom-megatron-init-path mcore_ckpt.integrations.slime.install

See docs/integrations.md.
"""

from __future__ import annotations

from typing import Any

from mcore_ckpt.integrations.slime.replacing import replace_functions

__all__ = ["install"]


def install(args: Any) -> None:
    """Lets this process save and load with this package.

    slime calls this function on each rank, before the model exists.

    Args:
        args: slime's arguments. `args.mcore_ckpt`, from the YAML file of `--custom-config-path`, has options of
            CheckpointConfig.

    Raises:
        ImportError: slime is not installed.
        InvalidArgumentError: `args.mcore_ckpt` has an unknown option or a value that is not allowed.
    """
    replace_functions("slime", args)
