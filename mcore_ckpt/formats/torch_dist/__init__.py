"""Reads the torch_dist checkpoints that megatron's `dist_checkpointing` writes."""
