"""One small table for each architecture; importing this makes them known."""

from mcore_ckpt.hf.architectures import deepseek, gemma, glm, gpt_oss, llama, mixtral, qwen, qwen3_next  # noqa: F401
