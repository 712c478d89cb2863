"""The built-in HuggingFace architectures: one module per family of models.

To add an architecture, write a module that exports the tuple `ARCHITECTURES`, and add this tuple to the one below.
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
