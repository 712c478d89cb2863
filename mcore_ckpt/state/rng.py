"""Reads and writes the random number generators: Python's, NumPy's, torch's, the device's, and megatron's tracker."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch

from mcore_ckpt.state.plain import to_plain


def read_rng() -> dict[str, Any]:
    """Returns the state of all generators of this process, as plain values."""
    return {
        "python": random.getstate(),
        "numpy": _read_numpy(),
        "torch": torch.get_rng_state().clone(),
        "device": torch.cuda.get_rng_state().cpu().clone() if torch.cuda.is_available() else None,
        "megatron": to_plain(dict(_tracker().get_states()), "megatron's RNG tracker"),
    }


def seed_of(state: dict[str, Any]) -> int:
    """Returns the seed with which the generators of a saved state were started.

    The state of torch's CPU generator begins with the seed (`CPUGeneratorImplStateLegacy`, torch 2.13: 8 bytes,
    little-endian). A state that was resharded for another layout contains only the seed.
    """
    if "seed" in state:
        return int(state["seed"])
    return int.from_bytes(bytes(state["torch"][:8].tolist()), "little")


def write_seed(seed: int, step: int, pp: int) -> None:
    """Seeds all generators anew, in the same way as megatron's trainer (`_set_random_seed`).

    The seeds differ between pipeline stages. The seeds of megatron's tracker also differ between tensor- and
    expert-parallel ranks. All seeds depend on the step, so that the random numbers differ from those at the beginning
    of the training.

    Args:
        seed: the seed of the training.
        step: the step from which training continues.
        pp: this rank's pipeline rank.
    """
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    digest = hashlib.sha256(f"{seed} {step}".encode()).digest()
    seed = int.from_bytes(digest[:4], "little") // 2 + 100 * pp
    random.seed(seed)
    torch.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
    before = dict(_tracker().get_states())
    if before:
        model_parallel_cuda_manual_seed(seed)
        fresh = {
            name: state.get_state() if isinstance(state, torch.Generator) else state
            for name, state in _tracker().get_states().items()
        }
        _tracker().set_states(before)
        _write_tracker(fresh)


def write_rng(state: dict[str, Any]) -> None:
    """Sets all generators to a saved state. A generator that is not in the saved state stays as it is."""
    python = state["python"]
    random.setstate((python[0], tuple(python[1]), python[2]))
    if state["numpy"] is not None:
        _write_numpy(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["device"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["device"])
    _write_tracker(state["megatron"])


def _read_numpy() -> dict[str, Any] | None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    name, keys, position, has_gauss, cached = numpy.random.get_state()
    # The words are stored as int64, because torch has few operators for uint32.
    words = torch.from_numpy(keys.astype("int64"))
    return {
        "name": name,
        "keys": words,
        "position": int(position),
        "has_gauss": int(has_gauss),
        "cached": float(cached),
    }


def _write_numpy(state: dict[str, Any]) -> None:
    import numpy

    keys = state["keys"].numpy().astype("uint32")
    numpy.random.set_state((state["name"], keys, state["position"], state["has_gauss"], state["cached"]))


def _tracker() -> Any:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return get_cuda_rng_tracker()


def _write_tracker(states: dict[str, torch.Tensor]) -> None:
    tracker = _tracker()
    current = tracker.get_states()
    restored: dict[str, Any] = dict(current)
    for name, state in states.items():
        generator = current.get(name)
        if isinstance(generator, torch.Generator):
            # CUDA graphs keep references to the generator objects of a graph-safe tracker. If these objects were
            # replaced, the graphs would continue to use the old ones.
            generator.set_state(state)
            restored[name] = generator
        else:
            restored[name] = state.clone()
    tracker.set_states(restored)
