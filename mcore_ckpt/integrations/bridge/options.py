"""Translates Megatron-Bridge's CheckpointConfig, and keeps the settings for which Bridge has no options.

Every field of Bridge's class is honoured, has no effect here, or is refused.
tests/bridge/with_bridge/test_bridge_options.py lists the honoured fields and the fields without effect.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.integrations.kit.arguments import Arguments
from mcore_ckpt.integrations.kit.loop import LoopSettings
from mcore_ckpt.integrations.kit.options import kept_count, refuse_fast

logger = logging.getLogger(__name__)

# The options that name folders of checkpoints. Bridge looks into the folders of LOADED_FROM in this order.
LOADED_FROM = ("load", "pretrained_checkpoint")
FOLDERS = (*LOADED_FROM, "save")

_OFTEN = (
    "mcore_ckpt has only one kind of checkpoint. Save just as often with checkpoint.save_interval and async_save, and "
    "set most_recent_k and save_retain_interval"
)
# The allowed values of a field, and advice for users of other values.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "ckpt_format": (("torch_dist",), "the other formats are for FSDP, which is not supported"),
    "non_persistent_save_interval": ((None,), _OFTEN),
    "non_persistent_ckpt_type": ((None,), _OFTEN),
    "replication": (
        (False,),
        "it is for checkpoints on local disks, but here all checkpoints are on a disk that all nodes share",
    ),
    "load_main_params_from_ckpt": ((False,), "load_optim=True loads the main parameters"),
    "dist_ckpt_strictness": (
        ("assume_ok_unexpected", "log_unexpected", "raise_unexpected", "raise_all"),
        "a checkpoint that lacks a part of the model is always refused",
    ),
}


def refuse_unsupported(checkpoint: Any, but: Collection[str] = ()) -> None:
    """Raises UnsupportedError if a field of `cfg.checkpoint` has a value that cannot be honoured.

    The fields in `but` may have such a value.
    """
    for name, (allowed, instead) in REFUSED.items():
        if name in but:
            continue
        value = getattr(checkpoint, name, allowed[0])
        if value not in allowed:
            raise UnsupportedError(f"checkpoint.{name} is {value!r}, which is not supported: {instead}")
    for name in FOLDERS:
        folder = getattr(checkpoint, name, None)
        if folder and "://" in str(folder):
            raise UnsupportedError(
                f"checkpoint.{name} is {str(folder)!r}, which is not supported: checkpoints are on a disk that all "
                "nodes share. Name a folder on such a disk, and copy checkpoints to or from other places by other "
                "means"
            )
    if checkpoint.most_recent_k == 0:
        raise UnsupportedError(
            "checkpoint.most_recent_k is 0, which would delete every checkpoint as soon as it is saved: use 1 or more, "
            "or -1 to keep all"
        )


def overridden_config(checkpoint: Any, config: CheckpointConfig, has_adapters: bool) -> CheckpointConfig:
    """Returns our options. Bridge's options override our options with the same meaning."""
    kept = kept_count(checkpoint.most_recent_k)
    contents = config.save_contents
    # Bridge 0.4 and 0.5 have fewer fields.
    if getattr(checkpoint, "also_save_hf_checkpoint", False) and "hf_model" not in contents:
        contents = (*contents, "hf_model")
    return replace(
        config,
        save_contents=contents,
        max_to_keep=config.max_to_keep if kept is None else kept,
        # In a run with adapters, Bridge does not save the base model, but fills it from `pretrained_checkpoint`.
        skip_frozen=config.skip_frozen or has_adapters,
    )


def warn_of_retention(checkpoint: Any, config: CheckpointConfig) -> None:
    """Logs a warning if saves delete checkpoints although `most_recent_k` keeps all, as it does by default."""
    interval = checkpoint.save_retain_interval
    if interval is not None and overridden_config(checkpoint, config, False).max_to_keep is None:
        logger.warning(
            "checkpoint.save_retain_interval is %s, so only the newest checkpoint and each multiple of %s stay, as in "
            "Megatron-LM (Bridge's own manager ignores it). To keep all, leave checkpoint.save_retain_interval out; to "
            "keep more of the newest, set checkpoint.most_recent_k",
            interval,
            interval,
        )


# Bridge's fields with Megatron-LM's names, and the fields that Megatron-LM has with the opposite meaning, as `no_...`.
_SAME = ("save", "load", "ckpt_step", "exit_on_missing_checkpoint", "finetune", "async_save", "save_retain_interval")
_OPPOSITE = ("load_optim", "load_rng", "save_optim", "save_rng")


def arguments(cfg: Any) -> Arguments:
    """Returns Bridge's configuration under Megatron-LM's names."""
    checkpoint, model = cfg.checkpoint, getattr(cfg.model, "transformer", cfg.model)
    return Arguments(
        SimpleNamespace(
            **{name: getattr(checkpoint, name) for name in _SAME},
            **{f"no_{name}": not getattr(checkpoint, name) for name in _OPPOSITE},
            verify_integrity=getattr(checkpoint, "verify_integrity", False),
            # `mcore-ckpt convert` needs these values to make a checkpoint for Megatron-LM, which compares them with its
            # own arguments.
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            num_attention_heads=model.num_attention_heads,
            hybrid_layer_pattern=getattr(cfg.model, "hybrid_layer_pattern", None),
            add_position_embedding=getattr(cfg.model, "position_embedding_type", None) == "learned_absolute",
        )
    )


_settings = LoopSettings()


def configure(
    config: CheckpointConfig | None = None,
    *,
    role: str = "actor",
    hf_config: Any = None,
    processing_class: Any = None,
) -> None:
    """Sets our options, which otherwise have their defaults.

    Call this function once on every rank, before `pretrain`.

    Args:
        config: the options of this package. Bridge's options override `async_save`, `max_to_keep` and `keep_every`.
            Bridge's options can also remove the optimizer from the contents, add `hf_model` to the contents, and set
            `skip_frozen` (in a run with adapters).
        role: see CheckpointManager.
        hf_config: the transformers config to write into the checkpoints. None: the config of the model that Bridge
            names, if `also_save_hf_checkpoint` is set.
        processing_class: the tokenizer to write into the checkpoints. None: Bridge's tokenizer, if
            `save_tokenizer_assets` is set.

    Raises UnsupportedError: `config` has a remote store or a fast tier.

    Example:
        >>> configure(CheckpointConfig(timeout_s=120.0))
    """
    global _settings
    if config is not None and config.remote is not None:
        raise UnsupportedError(
            "CheckpointConfig.remote is set: Bridge asks for a load only if checkpoint.load has a checkpoint, so a "
            "run on new machines would begin from scratch without a warning. Leave remote out, and copy the folder by "
            "other means"
        )
    if config is not None:
        refuse_fast(config, "CheckpointConfig", "Bridge asks for a load only if checkpoint.load has a checkpoint")
    _settings = LoopSettings(config or CheckpointConfig(), role, hf_config, processing_class)


def settings() -> LoopSettings:
    """Returns the settings of the last call of `configure`."""
    return _settings
