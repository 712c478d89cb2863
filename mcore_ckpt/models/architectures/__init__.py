"""The built-in HuggingFace architectures: one module per family of models.

To add one, write a module that exports `ARCHITECTURES` and list it here.
"""

from mcore_ckpt.models.architecture import Architecture
from mcore_ckpt.models.architectures import deepseek, gemma, glm, gpt_oss, llama, mixtral, qwen, qwen3_next

ARCHITECTURES: tuple[Architecture, ...] = (
    *llama.ARCHITECTURES,
    *qwen.ARCHITECTURES,
    *mixtral.ARCHITECTURES,
    *deepseek.ARCHITECTURES,
    *glm.ARCHITECTURES,
    *qwen3_next.ARCHITECTURES,
    *gpt_oss.ARCHITECTURES,
    *gemma.ARCHITECTURES,
)
