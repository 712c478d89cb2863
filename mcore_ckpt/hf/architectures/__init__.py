"""One small table for each architecture; importing this makes them known."""

from mcore_ckpt.hf.architectures import qwen  # noqa: F401
