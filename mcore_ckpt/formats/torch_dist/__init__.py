"""Reads and writes torch_dist checkpoints, the format of megatron's `dist_checkpointing`."""
