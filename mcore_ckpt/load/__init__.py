"""Loads a checkpoint: choose one, find its bytes, check that it fits, fill the live tensors."""
