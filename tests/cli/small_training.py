"""The demo's training with a quarter of the work in each step: what CI lets the demo start."""

from mcore_ckpt.cli.demo import training

training.NUM_MICROBATCHES = 1
training.main()
