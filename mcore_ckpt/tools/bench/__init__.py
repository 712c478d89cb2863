"""Measures how fast this machine copies, writes and reads, and predicts from that how long saves and a load take.

`size.py` says how many bytes the ranks of a layout save, `speeds.py` measures, `predict.py` combines the two, and
`trial_saves.py` makes the saves that are measured: real ones of random bytes, without a trainer.
"""
