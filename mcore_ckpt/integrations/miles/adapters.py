"""Saves and loads the LoRA adapters of miles (2026-08), which miles itself writes into a file for each rank.

miles' own files fit only the layout that they were saved under, and `--load` does not find them. Our files can be
loaded under any layout, and a run with adapters resumes from `--load` as any other run does.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import MANIFEST_FILE, step_dirs
from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.integrations.kit.arguments import Arguments
from mcore_ckpt.integrations.kit.loop import Training
from mcore_ckpt.integrations.kit.together import decided_by_rank_0
from mcore_ckpt.integrations.slime.replacing import ActorCheckpoints


class MilesCheckpoints(ActorCheckpoints):
    """Saves and loads the model of one of miles' actors or critics."""

    def _shares_folder(self) -> bool:
        # The critic is saved to another folder, `--critic-save` (default: `<save>_critic`).
        return False


class AdapterCheckpoints(MilesCheckpoints):
    """Saves and loads only a model's adapters. The base model comes from `--ref-load` or `--hf-checkpoint`."""

    _loads_base = False

    def replace_more(self, model: Any) -> None:
        model.save_checkpoint_with_lora = self.save_checkpoint
        self._load_stock_adapter = self._checkpoint.load_lora_adapter
        self._checkpoint.load_lora_adapter = self.load_lora_adapter

    def load_lora_adapter(
        self, model: Any, adapter_path: str, *, optimizer: Any = None, opt_param_scheduler: Any = None
    ) -> tuple[bool, int | None]:
        """Loads the adapters in `--lora-adapter-path`, which this package or miles wrote.

        Returns whether there were any adapters, and the saved rollout id (None if only adapters were loaded).

        Raises CheckpointError: see LoopCheckpoints.load.
        """
        topic, timeout_s = "looking at --lora-adapter-path", self._config.timeout_s
        is_ours = decided_by_rank_0("miles/adapters", topic, adapter_path, lambda: _is_ours(adapter_path), timeout_s)
        if not is_ours:
            return self._load_stock_adapter(
                model, adapter_path, optimizer=optimizer, opt_param_scheduler=opt_param_scheduler
            )
        args = Arguments(Namespace(**(vars(self._args) | {"load": adapter_path, "finetune": optimizer is None})))
        iteration, _ = self._load_ours(self._training(model, optimizer, opt_param_scheduler), args)
        return True, iteration if optimizer is not None else None

    def load_checkpoint(
        self,
        ddp_model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        checkpointing_context: dict[str, Any] | None = None,
        skip_load_to_model_and_opt: bool = False,
    ) -> tuple[int, float]:
        """Loads the base model, then the adapters in `args.load`. Takes the place of Megatron-LM's function.

        Raises UnsupportedError: the base model is in Megatron-LM's format or in ours.
        """
        if self._loads_base:
            raise UnsupportedError(
                f"{self._args.load}: a model with adapters starts from a HuggingFace folder: name one by --ref-load or "
                "--hf-checkpoint"
            )
        self._load_beginning(self._training(ddp_model, optimizer, opt_param_scheduler))
        return super().load_checkpoint(
            ddp_model, optimizer, opt_param_scheduler, checkpointing_context, skip_load_to_model_and_opt
        )

    def _load_beginning(self, training: Training) -> tuple[int, float]:
        args = self._args
        path, args.lora_adapter_path, self._loads_base = args.lora_adapter_path, None, True
        try:
            return super()._load_beginning(training)
        finally:
            args.lora_adapter_path, self._loads_base = path, False

    def _read_config(self) -> CheckpointConfig:
        return replace(super()._read_config(), skip_frozen=True)


def _is_ours(path: str) -> bool:
    return (Path(path) / MANIFEST_FILE).exists() or bool(step_dirs(Path(path)))
