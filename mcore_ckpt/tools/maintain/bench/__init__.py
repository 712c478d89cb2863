"""Measures how fast this machine copies, writes and reads, and predicts from that how long saves and a load take.

`size.py` says how many bytes the ranks of a layout save, `speeds.py` measures, `predict.py` combines the two, and
`trial_saves.py` makes the saves that are measured: real ones of random bytes, without a trainer.

The obvious way, a memcpy and a disk write timed alone, missed what small saves wait for most: locks, folders, small
files and their syncs. So whole saves are measured, and only the trainer's objects are replaced, by random bytes. Two
sizes, one of them hardly any bytes, give each part a fixed cost and a speed; `predict.py` is then arithmetic, which
tests check on given speeds. `size.py` counts bytes by the names and shapes of `models/` and the layout rules of
`reshard`, so a model's last stage, experts and tied embeddings count as they are. Trial saves copy by a few lines of
theirs, because `tools` may not import `save`.
"""
