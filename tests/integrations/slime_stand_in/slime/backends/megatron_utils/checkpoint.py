"""slime's choice between a HuggingFace folder and Megatron-LM's own function."""

import re
from pathlib import Path

from megatron.training.checkpointing import load_checkpoint as _load_checkpoint_megatron
from megatron.training.checkpointing import save_checkpoint
from megatron.training.global_vars import get_args

from mcore_ckpt import load_hf

__all__ = ["save_checkpoint"]


def load_checkpoint(ddp_model, optimizer, opt_param_scheduler, checkpointing_context, skip_load_to_model_and_opt):
    args = get_args()
    assert any(Path(args.load).iterdir()), f"{args.load} is empty"
    if _is_megatron_checkpoint(args.load):
        return _load_checkpoint_megatron(
            ddp_model=ddp_model,
            optimizer=optimizer,
            opt_param_scheduler=opt_param_scheduler,
            checkpointing_context=checkpointing_context,
            skip_load_to_model_and_opt=skip_load_to_model_and_opt,
        )
    return _load_checkpoint_hf(ddp_model=ddp_model, optimizer=optimizer, args=args, load_path=args.load)


def _is_megatron_checkpoint(path):
    has_tracker = (Path(path) / "latest_checkpointed_iteration.txt").is_file()
    return has_tracker or bool(re.fullmatch(r"iter_\d{7}", Path(path).name))


def _load_checkpoint_hf(ddp_model, optimizer, args, load_path):
    # slime: its own converter.
    load_hf(ddp_model, load_path, optimizer=optimizer)
    return 0, 0
