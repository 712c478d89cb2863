"""`mcore-ckpt demo`: kills a training and shows that the training resumes with exactly the same losses.

`enable_cpu` is for your own trainings on a machine without a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcore_ckpt.public_names import lazy_names

if TYPE_CHECKING:
    from mcore_ckpt.cli.demo.megatron_on_cpu import enable_cpu

__all__ = ["enable_cpu"]

# `enable_cpu` is imported on first use, because it needs torch, and `mcore-ckpt --help` must not wait for torch.
__getattr__ = lazy_names(__name__, {"megatron_on_cpu": ("enable_cpu",)})
