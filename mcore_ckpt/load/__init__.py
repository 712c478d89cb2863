"""Loads a checkpoint: chooses one, finds its bytes, checks that it fits, and fills the live tensors."""
