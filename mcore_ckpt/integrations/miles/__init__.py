"""Checkpoints for miles (2026-08), a fork of slime. One argument installs this integration:

    --custom-megatron-init-path mcore_ckpt.integrations.miles.install

See docs/integrations.md.
"""

from __future__ import annotations

from typing import Any

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.integrations.miles.adapters import AdapterCheckpoints, MilesCheckpoints
from mcore_ckpt.integrations.slime.replacing import replace_functions

__all__ = ["install"]


def install(args: Any) -> None:
    """Lets this process save and load with this package.

    miles calls this function on each rank, before the model exists.

    Args:
        args: miles' arguments. `args.mcore_ckpt`, from the YAML file of `--custom-config-path`, has options of
            CheckpointConfig.

    Raises:
        ImportError: miles is not installed.
        InvalidArgumentError: `args.mcore_ckpt` has an unknown option or a value that is not allowed.
        UnsupportedError: the run has several adapters, or a hook that expects Megatron-LM's folders.
    """
    if getattr(args, "multi_lora", False):
        raise UnsupportedError(
            "args.multi_lora is set, which is not supported: miles saves such adapters itself. Leave the argument out"
        )
    if getattr(args, "custom_megatron_post_save_hook_path", None):
        raise UnsupportedError(
            "--custom-megatron-post-save-hook-path is not supported: the hook would get Megatron-LM's folder, which "
            "mcore_ckpt does not write. Leave the argument out, or use --save-hf for a HuggingFace model"
        )
    has_adapters = getattr(args, "lora_rank", 0) > 0 or getattr(args, "lora_adapter_path", None) is not None
    replace_functions("miles", args, AdapterCheckpoints if has_adapters else MilesCheckpoints)
