"""Measures how fast this machine copies, writes and reads, and predicts how long saves and loads take.

`size.py` computes how many bytes the ranks of a layout save, `speeds.py` measures, `predict.py` combines sizes and
speeds, and `trial_saves.py` makes the measured saves: real saves of random bytes, without a trainer.

Small saves wait mostly for locks, folders, small files and their syncs, and not for copies and large writes. So whole
saves are measured, with random bytes in place of the trainer's objects. Saves of two sizes, one of them almost
empty, give a fixed cost and a speed for each part of a save. `predict.py` only calculates with these numbers, so
tests can check it with given speeds. `size.py` counts bytes by the names and shapes of `models/` and the layout rules
of `reshard`, so a model's last stage, experts and tied embeddings are counted exactly. Trial saves do not use the code
of `save/` to copy, because `tools/` may not import that room.
"""
