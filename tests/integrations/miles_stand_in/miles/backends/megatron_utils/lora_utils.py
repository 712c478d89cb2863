"""miles' own files of adapters: one for each rank."""

from pathlib import Path

import torch
import torch.distributed as dist


def is_lora_enabled(args):
    return getattr(args, "lora_rank", 0) > 0 or getattr(args, "lora_adapter_path", None) is not None


def is_lora_model(model):
    return any("adapter" in name for chunk in model for name, _ in chunk.named_parameters())


def save_lora_checkpoint(model, args, save_dir, *, optimizer=None, opt_param_scheduler=None, iteration=None):
    raise NotImplementedError("not with our checkpoints")


def load_lora_adapter(model, adapter_path, *, optimizer=None, opt_param_scheduler=None):
    path = Path(adapter_path) / f"adapter_megatron_rank{dist.get_rank()}.pt"
    if not path.exists():
        return False, None
    saved = torch.load(path)
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            if name in saved:
                parameter.data.copy_(saved[name])
    return True, None
