"""Translates Megatron-Bridge's CheckpointConfig. Every field is honoured, has no effect here, or is refused."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.integrations.kit.arguments import Arguments
from mcore_ckpt.integrations.kit.options import kept_count

logger = logging.getLogger(__name__)

# The options that name folders of checkpoints. Bridge tries the first two in this order.
LOADED_FROM = ("load", "pretrained_checkpoint")
FOLDERS = (*LOADED_FROM, "save")

HONOURED = frozenset(
    {
        *("save", "load", "ckpt_step", "pretrained_checkpoint", "exit_on_missing_checkpoint", "finetune"),
        *("save_optim", "save_rng", "load_optim", "load_rng", "async_save", "verify_integrity"),
        *("most_recent_k", "save_retain_interval", "also_save_hf_checkpoint", "hf_source_path"),
        *("save_tokenizer_assets", "custom_manager_class"),
        # Bridge's loop reads it and calls the manager.
        "save_interval",
    }
)
WITHOUT_EFFECT = frozenset(
    {
        # How Bridge's own format is written, and how its own asynchronous saves run.
        *("fully_parallel_save", "ckpt_fully_parallel_save_process_group", "ckpt_assume_constant_structure"),
        *("storage_writers_per_rank", "dist_ckpt_workers", "dist_ckpt_save_pre_mcore_014"),
        *("dist_ckpt_optim_fully_reshardable", "distrib_optim_fully_reshardable_mem_efficient"),
        *("use_persistent_ckpt_worker", "async_strategy", "async_write_results_mp_mode"),
        *("async_ckpt_cpu_priority", "async_ckpt_io_priority", "async_ckpt_use_cpu_shm"),
        # How Bridge's own format is read. They have their effect when Bridge's loader reads its own checkpoints.
        *("fully_parallel_load", "ckpt_fully_parallel_load_exchange_algo", "ckpt_fully_parallel_load_process_group"),
        *("ckpt_load_validate_sharding_integrity", "stream_ckpt_dequant", "strict_fsdp_dtensor_load"),
        # Settings of options that are refused, or that are off.
        *("non_persistent_global_ckpt_dir", "non_persistent_local_ckpt_dir", "non_persistent_local_ckpt_algo"),
        *("replication_jump", "replication_factor", "hf_trust_remote_code", "hf_distributed_save"),
        "hf_save_every_n_ranks",
        # Options that Bridge has taken over from Megatron-LM. Its training (0.6.2) reads none of them.
        *("save_params_interval", "save_activations_interval", "save_tokens_per_expert_interval"),
        *("save_wgrads_interval", "save_dgrads_interval", "use_checkpoint_args", "use_mp_args_from_checkpoint_args"),
        *("use_tokenizer_model_from_checkpoint_args", "auto_detect_ckpt_format", "ckpt_convert_format"),
        *("ckpt_convert_save", "ckpt_convert_update_legacy_dist_opt_format"),
    }
)


@dataclass(frozen=True)
class _Refusal:
    """The allowed values of a field, and advice for users of other values."""

    allowed: tuple[Any, ...]
    instead: str


_OFTEN = (
    "there is only one kind of checkpoint here. Save just as often with checkpoint.save_interval and async_save, and "
    "set most_recent_k and save_retain_interval"
)
REFUSED = {
    "ckpt_format": _Refusal(("torch_dist",), "the other formats are for FSDP, which is not supported"),
    "non_persistent_save_interval": _Refusal((None,), _OFTEN),
    "non_persistent_ckpt_type": _Refusal((None,), _OFTEN),
    "replication": _Refusal(
        (False,), "it is for checkpoints on local disks, and here all are on a disk that all nodes share"
    ),
    "load_main_params_from_ckpt": _Refusal((False,), "load_optim=True loads the main parameters"),
    "dist_ckpt_strictness": _Refusal(
        ("assume_ok_unexpected", "log_unexpected", "raise_unexpected", "raise_all"),
        "a checkpoint that lacks a part of the model is always refused",
    ),
}


def refuse_unsupported(checkpoint: Any, but: Collection[str] = ()) -> None:
    """Raises UnsupportedError if a field of `cfg.checkpoint`, except `but`, has a value that cannot be honoured."""
    for name, refusal in REFUSED.items():
        if name in but:
            continue
        value = getattr(checkpoint, name, refusal.allowed[0])
        if value not in refusal.allowed:
            raise UnsupportedError(f"checkpoint.{name} is {value!r}, which is not supported: {refusal.instead}")
    for name in FOLDERS:
        folder = getattr(checkpoint, name, None)
        if folder and "://" in str(folder):
            raise UnsupportedError(
                f"checkpoint.{name} is {str(folder)!r}, which is not supported: checkpoints are on a disk that all "
                "nodes share. Name a folder there, and copy what is elsewhere by other means"
            )
    if checkpoint.most_recent_k == 0:
        raise UnsupportedError(
            "checkpoint.most_recent_k is 0, which would delete every checkpoint as soon as it is saved: use 1 or more, "
            "or -1 to keep all"
        )


def overridden_config(checkpoint: Any, config: CheckpointConfig, has_adapters: bool) -> CheckpointConfig:
    """Returns our options, overridden by the options that Bridge has for them."""
    kept = kept_count(checkpoint.most_recent_k)
    contents = config.save_contents
    # Bridge 0.4 and 0.5 have fewer fields.
    if getattr(checkpoint, "also_save_hf_checkpoint", False) and "hf_model" not in contents:
        contents = (*contents, "hf_model")
    return replace(
        config,
        save_contents=contents,
        max_to_keep=config.max_to_keep if kept is None else kept,
        # Bridge saves a run with adapters without the base model, which it fills from `pretrained_checkpoint`.
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


def arguments(cfg: Any) -> Arguments:
    """Returns Bridge's configuration under Megatron-LM's names."""
    checkpoint, model = cfg.checkpoint, getattr(cfg.model, "transformer", cfg.model)
    return Arguments(
        SimpleNamespace(
            save=checkpoint.save,
            load=checkpoint.load,
            ckpt_step=checkpoint.ckpt_step,
            exit_on_missing_checkpoint=checkpoint.exit_on_missing_checkpoint,
            finetune=checkpoint.finetune,
            no_load_optim=not checkpoint.load_optim,
            no_load_rng=not checkpoint.load_rng,
            no_save_optim=not checkpoint.save_optim,
            no_save_rng=not checkpoint.save_rng,
            async_save=checkpoint.async_save,
            save_retain_interval=checkpoint.save_retain_interval,
            verify_integrity=getattr(checkpoint, "verify_integrity", False),
            # For a step for Megatron-LM, which compares these with its own arguments.
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            num_attention_heads=model.num_attention_heads,
            hybrid_layer_pattern=getattr(cfg.model, "hybrid_layer_pattern", None),
            add_position_embedding=getattr(cfg.model, "position_embedding_type", None) == "learned_absolute",
        )
    )
