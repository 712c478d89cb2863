"""The architectures that this package knows, one small table of names in each module."""

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
