"""Imports AReaL. A pytest plug-in, for the files that tests/integrations/test_areal.py runs in a process of its own.

Not a conftest.py: whoever collects the tests of a folder above imports that, and AReaL disables everybody's loggers.
"""

import gc
import os

# One thread: children are forked, and threads of a pool are not.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch

from tests.integrations.areal.areal_on_cpu import import_areal

torch.set_num_threads(1)
import_areal()
# Children share what is not written to, and a collection of garbage writes to all.
gc.freeze()
