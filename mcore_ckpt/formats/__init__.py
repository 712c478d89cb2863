"""Reads every kind of checkpoint through one contract (`contract.py`), and writes the kinds that we also write."""
