"""Reads the per-rank files of DTensors that verl writes when it trains with FSDP."""
