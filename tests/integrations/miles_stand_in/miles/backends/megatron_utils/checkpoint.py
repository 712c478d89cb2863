"""miles' choice between a HuggingFace folder and Megatron-LM's own function, and its adapters."""

import re
from pathlib import Path

from megatron.training.checkpointing import load_checkpoint as _load_checkpoint_megatron
from megatron.training.checkpointing import save_checkpoint
from megatron.training.global_vars import get_args

from mcore_ckpt import load_hf

from .lora_utils import is_lora_enabled, is_lora_model, load_lora_adapter, save_lora_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint", "save_checkpoint_with_lora"]


def load_checkpoint(ddp_model, optimizer, opt_param_scheduler, checkpointing_context, skip_load_to_model_and_opt):
    args = get_args()
    assert any(Path(args.load).iterdir()), f"{args.load} is empty"
    if _is_megatron_checkpoint(args.load):
        result = _load_checkpoint_megatron(
            ddp_model=ddp_model,
            optimizer=optimizer,
            opt_param_scheduler=opt_param_scheduler,
            checkpointing_context=checkpointing_context,
            skip_load_to_model_and_opt=skip_load_to_model_and_opt,
        )
    else:
        result = _load_checkpoint_hf(ddp_model=ddp_model, optimizer=optimizer, args=args, load_path=args.load)
    adapter_path = getattr(args, "lora_adapter_path", None)
    if is_lora_enabled(args) and adapter_path is not None:
        loaded, iteration = load_lora_adapter(
            ddp_model, adapter_path, optimizer=optimizer, opt_param_scheduler=opt_param_scheduler
        )
        if loaded and iteration is not None:
            result = (iteration, result[1])
    return result


def save_checkpoint_with_lora(iteration, model, optimizer, opt_param_scheduler):
    assert is_lora_model(model)
    folder = Path(get_args().save) / f"iter_{iteration:07d}" / "adapter"
    save_lora_checkpoint(model, get_args(), str(folder), optimizer=optimizer, iteration=iteration)


def _is_megatron_checkpoint(path):
    has_tracker = (Path(path) / "latest_checkpointed_iteration.txt").is_file()
    return has_tracker or bool(re.fullmatch(r"iter_\d{7}", Path(path).name))


def _load_checkpoint_hf(ddp_model, optimizer, args, load_path):
    # miles: Megatron-Bridge, which leaves adapters alone.
    load_hf(ddp_model, load_path, optimizer=optimizer)
    return 0, 0
