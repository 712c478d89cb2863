"""Measures how fast this machine copies, writes and reads, and predicts from that how long saves and a load take.

`size.py` says how many bytes the ranks of a layout save, `speeds.py` measures, `predict.py` combines the two, and
`trial_saves.py` makes the saves that are measured: real saves of random bytes, without a trainer.

To time only a memcpy and a disk write would miss what small saves wait for most: locks, folders, small files and their
syncs. So whole saves are measured, with random bytes in place of the trainer's objects. Saves of two sizes, one of them
almost empty, give a fixed cost and a speed for each part. `predict.py` only calculates with these numbers, so tests can
check it with given speeds. `size.py` counts bytes by the names and shapes of `models/` and the layout rules of
`reshard`, so a model's last stage, experts and tied embeddings count as they are. Trial saves do not copy with the code
of `save`, because `tools` may not import it.
"""
