"""Says what a check needs of the machine. A check that lacks it is not possible here."""

from __future__ import annotations

import importlib.util
import os
import shutil

import torch

from gpu_checks.outcome import NotPossible
from mcore_ckpt.io import _native


def need_gpus(number: int = 1) -> int:
    """Returns the number of GPUs. Raises NotPossible if there are fewer than `number`, or the build has no CUDA."""
    if not torch.cuda.is_available():
        raise NotPossible("no GPU")
    if not _native.built_with_cuda:
        raise NotPossible("mcore_ckpt was built without CUDA")
    count = torch.cuda.device_count()
    if count < number:
        raise NotPossible(f"{number} GPUs are needed, and there are {count}")
    return count


def has_module(name: str) -> bool:
    """Returns whether a module can be imported, without importing more of it than its parents."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def need_module(name: str, package: str) -> None:
    """Raises NotPossible if a module is missing, with the name of the package that has it."""
    if not has_module(name):
        raise NotPossible(f"no {package}")


def need_program(name: str) -> str:
    """Returns the path of a program of the search path or of the CUDA toolkit, or raises NotPossible."""
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    path = os.pathsep.join([os.environ.get("PATH", ""), *(os.path.join(home, "bin") for home in homes if home)])
    found = shutil.which(name, path=path)
    if found is None:
        raise NotPossible(f"no {name}")
    return found
