"""Trains as `megatron rlhf` of ms-swift does, with checkpoints of this package and the added option `--mcore_ckpt`."""

from __future__ import annotations

import os

if __name__ == "__main__":
    # ms-swift's own script sets this variable, too. The variable must be set before anything can use a GPU.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    from mcore_ckpt.integrations.swift.pipelines import MegatronRLHF

    MegatronRLHF().main()
