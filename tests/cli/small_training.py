"""The demo's training with half of the work in each step: what CI lets the demo start."""

from mcore_ckpt.cli.demo import training

training.NUM_MICROBATCHES = training.PIPELINE_PARALLEL
training.main()
