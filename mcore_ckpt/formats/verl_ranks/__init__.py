"""Reads the per-rank folders that verl wrote up to version 0.4."""
