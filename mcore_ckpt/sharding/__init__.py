"""Computes which part of which global tensor a local tensor is. Pure: no I/O, no torch, no megatron."""
