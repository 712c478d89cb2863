"""Keeps the settings that Megatron-Bridge's configuration has no options for."""

from __future__ import annotations

from typing import Any

from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.integrations.kit.loop import LoopSettings
from mcore_ckpt.integrations.kit.options import refuse_fast

_settings = LoopSettings()


def configure(
    config: CheckpointConfig | None = None,
    *,
    role: str = "actor",
    hf_config: Any = None,
    processing_class: Any = None,
) -> None:
    """Sets our options. Call it once on every rank, before `pretrain`. It need not be called.

    Args:
        config: the options of this package. Bridge's own override `async_save`, `max_to_keep` and `keep_every`, can
            take the optimizer out of the contents and add `hf_model`, and set `skip_frozen` for a run with adapters.
        role: see CheckpointManager.
        hf_config: the transformers config to write into the checkpoints. None: with `also_save_hf_checkpoint`, that of
            the model that Bridge names.
        processing_class: the tokenizer to write into the checkpoints. None: with `save_tokenizer_assets`, Bridge's.

    Raises UnsupportedError: `config` has a remote store or a fast tier.

    Example:
        >>> configure(CheckpointConfig(timeout_s=120.0))
    """
    global _settings
    if config is not None and config.remote is not None:
        raise UnsupportedError(
            "CheckpointConfig.remote is set: Bridge asks for a load only if checkpoint.load has a checkpoint, so a run "
            "on new machines would begin from scratch without a word. Leave it out, and copy the folder by other means"
        )
    if config is not None:
        refuse_fast(config, "CheckpointConfig", "Bridge asks for a load only if checkpoint.load has a checkpoint")
    _settings = LoopSettings(config or CheckpointConfig(), role, hf_config, processing_class)


def settings() -> LoopSettings:
    """Returns the settings of the last call of `configure`."""
    return _settings
