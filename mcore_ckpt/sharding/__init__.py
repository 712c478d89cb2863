"""Computes which part of which global tensor a local tensor holds, without I/O, torch or megatron."""
