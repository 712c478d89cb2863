"""Megatron's `dist_checkpointing` format (torch_dist)."""
