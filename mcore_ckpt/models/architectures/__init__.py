"""The built-in HuggingFace architectures: one module per family of models.

To add an architecture, write a module that exports the tuple `ARCHITECTURES`, and add this tuple to the one below.
"""

from mcore_ckpt.models.architecture import Architecture
from mcore_ckpt.models.architectures import (
    deepseek,
    deepseek_sparse,
    glm,
    gpt_oss,
    kimi_k25,
    llama,
    minimax,
    mixtral,
    nemotron_h,
    qwen,
    qwen3_5,
    qwen3_next,
    qwen_vl,
    refused,
    seed_oss,
)

ARCHITECTURES: tuple[Architecture, ...] = (
    *llama.ARCHITECTURES,
    *qwen.ARCHITECTURES,
    *seed_oss.ARCHITECTURES,
    *mixtral.ARCHITECTURES,
    *minimax.ARCHITECTURES,
    *deepseek.ARCHITECTURES,
    *deepseek_sparse.ARCHITECTURES,
    *glm.ARCHITECTURES,
    *qwen3_next.ARCHITECTURES,
    *qwen3_5.ARCHITECTURES,
    *gpt_oss.ARCHITECTURES,
    *nemotron_h.ARCHITECTURES,
    *qwen_vl.ARCHITECTURES,
    *kimi_k25.ARCHITECTURES,
    *refused.ARCHITECTURES,
)
