"""Reads ms-swift's options, which have the same meaning as Megatron-LM's, and our options in `--mcore_ckpt`."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import InvalidArgumentError, UnsupportedError
from mcore_ckpt.integrations.kit.arguments import Arguments
from mcore_ckpt.integrations.kit.options import refuse_fast, refuse_skip

# ms-swift has its own options for these fields: async_save, no_load_optim and the like, tuner_type, save_total_limit
# (which also keeps the checkpoint that is best by metric_for_best_model).
_SAID_ELSEWHERE = (
    *("async_save", "load_contents", "roles", "skip_frozen"),
    *("max_to_keep", "keep_every", "keep_best", "keep_for"),
)
# A step in a remote store would lack the files that ms-swift puts next to our folder: args.json, HuggingFace weights.
_REFUSED = ("remote", "prune_remote", "upload_timeout_s")


def read_config(args: Any) -> CheckpointConfig:
    """Returns the options in `args.mcore_ckpt`: a dict, or the JSON of a dict.

    Without `mcore_ckpt`, all options have their defaults.

    Raises InvalidArgumentError: an option is unknown, or has a value that is not allowed.
    """
    given = getattr(args, "mcore_ckpt", None) or {}
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise InvalidArgumentError(f"--mcore_ckpt {given!r} is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise InvalidArgumentError(f"--mcore_ckpt {given!r} is not a JSON object, such as '{{\"timeout_s\": 300}}'")
    config = CheckpointConfig.from_dict(given, "--mcore_ckpt", but=(*_SAID_ELSEWHERE, *_REFUSED))
    refuse_fast(config, "--mcore_ckpt", "ms-swift puts args.json and the HuggingFace weights next to each checkpoint")
    refuse_skip(config, "--mcore_ckpt", "ms-swift writes args.json and a tracker next to each checkpoint")
    if getattr(args, "offload_model", False) or getattr(args, "offload_optimizer", False):
        # GRPO and GKD free the memory after the step, even if a save still reads it. So copy the state at once.
        config = replace(config, async_mode="snapshot")
    return config


def arguments(args: Any, **changed: Any) -> Arguments:
    """Returns ms-swift's options, with the changes in `changed`. Most options have Megatron-LM's names."""
    return Arguments(SimpleNamespace(**{**vars(args), **changed}))


def refuse_unsupported(args: Any) -> None:
    """Raises UnsupportedError for options that cannot be honoured."""
    if getattr(args, "use_megatron_fsdp", False):
        raise UnsupportedError(
            "--use_megatron_fsdp true is not supported: leave it out, and use --use_distributed_optimizer"
        )
    if getattr(args, "use_ray", False):
        raise UnsupportedError(
            "--use_ray true is not supported, because the workers of ms-swift's Ray pipeline make their own trainers: "
            "leave it out, or use ms-swift's own command"
        )
    if args.tuner_type == "lora_llm" and not args.save_safetensors:
        raise UnsupportedError(
            "--tuner_type lora_llm with --save_safetensors false would save only the base model: leave "
            "--save_safetensors out"
        )
