"""Lists the built-in HuggingFace architectures: one module per family of models.

To add an architecture, write a module that exports the tuple `ARCHITECTURES`, and add the module to the list below.
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

_FAMILIES = (
    *(llama, qwen, seed_oss, mixtral, minimax, deepseek, deepseek_sparse, glm),
    *(qwen3_next, qwen3_5, gpt_oss, nemotron_h, qwen_vl, kimi_k25, refused),
)
ARCHITECTURES: tuple[Architecture, ...] = tuple(each for family in _FAMILIES for each in family.ARCHITECTURES)
