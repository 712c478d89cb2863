"""Saves a checkpoint: plan, capture into host memory, write, export to HuggingFace, commit."""
