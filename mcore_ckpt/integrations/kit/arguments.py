"""Reads the options of a loop like Megatron-LM's. In all frameworks, these options have Megatron-LM's names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import InvalidArgumentError, UnsupportedError

# The formats torch and torch_dist are accepted, but saves always have this package's format.
_FSDP_FORMATS = ("torch_dcp", "fsdp_dtensor")
COUNTERS = ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples")
_PLAIN = (bool, int, float, str, type(None))
# Megatron-LM's defaults (megatron/training/arguments.py), for arguments that a loop leaves out. The default of every
# other argument is None.
_OFF = ("exit_on_missing_checkpoint", "finetune", "no_load_optim", "no_load_rng", "no_save_optim", "no_save_rng")
_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys((*_OFF, "async_save", "verify_integrity"), False),
    **dict.fromkeys(COUNTERS, 0),
    "ckpt_format": "torch_dist",
}


class Arguments:
    """Megatron-LM's arguments by name. A missing argument has Megatron-LM's default."""

    def __init__(self, namespace: Any) -> None:
        self._namespace = namespace

    def __getitem__(self, name: str) -> Any:
        return getattr(self._namespace, name, _DEFAULTS.get(name))

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._namespace, name, value)

    def plain(self) -> dict[str, Any]:
        """Returns all arguments that are numbers, strings, booleans or None, or lists of these.

        These arguments are saved for `mcore-ckpt convert`: when Megatron-LM loads a converted checkpoint, it compares
        some saved arguments with its own (`check_checkpoint_args`).
        """
        # `configure` takes any object, and an object with `__slots__` has no `__dict__`.
        own = getattr(self._namespace, "__dict__", {})
        return {name: value for name, value in sorted(own.items()) if _is_plain(value)}

    def folder(self, name: str) -> str:
        """Returns the folder that an argument names. Raises InvalidArgumentError if the argument is empty."""
        if not self[name]:
            raise InvalidArgumentError(f"args.{name} is {self[name]!r}: name the folder of all checkpoints")
        return str(self[name])

    def saving(self, config: CheckpointConfig, with_optimizer: bool) -> CheckpointConfig:
        """Returns our options for a manager that saves, overridden by Megatron's arguments."""
        without_optimizer = self["no_save_optim"] or not with_optimizer
        interval = self["save_retain_interval"]
        if interval is not None:
            # Keep the newest step and multiples of the interval, as finalize_fn in Megatron-LM's save_checkpoint does.
            config = replace(config, max_to_keep=config.max_to_keep or 1, keep_every=int(interval))
        return replace(
            config,
            save_contents=tuple(w for w in config.save_contents if w != "optimizer" or not without_optimizer),
            load_contents=("model",),
            async_save=bool(self["async_save"]),
        )

    def loading(self, config: CheckpointConfig, with_optimizer: bool) -> CheckpointConfig:
        """Returns our options for a manager that loads, overridden by Megatron's arguments."""
        without_optimizer = self["no_load_optim"] or self["finetune"] or not with_optimizer
        words = tuple(word for word in config.load_contents if word != "optimizer" or not without_optimizer)
        # `async_save` would make the manager prepare host memory, which a load does not need.
        return replace(config, save_contents=("model",), load_contents=words, async_save=False)

    def refuse_unsupported(self) -> None:
        """Raises UnsupportedError if the arguments ask for non-persistent checkpoints, or for one of FSDP's formats."""
        if self["ckpt_format"] in _FSDP_FORMATS:
            raise UnsupportedError(
                f"args.ckpt_format is {self['ckpt_format']!r}, which is for Megatron-FSDP and torch's FSDP2: they are "
                "not supported. Use DistributedDataParallel and leave the argument out"
            )
        if self["non_persistent_ckpt_type"] is not None:
            raise UnsupportedError(
                f"args.non_persistent_ckpt_type is {self['non_persistent_ckpt_type']!r}: mcore_ckpt has no separate "
                "folder for non-persistent checkpoints. Save just as often with args.async_save and "
                "configure(config=CheckpointConfig(max_to_keep=1, keep_every=...)), which deletes each checkpoint "
                "after the next commit, except every keep_every-th step"
            )


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(type(each) in _PLAIN for each in value)
    return type(value) in _PLAIN
