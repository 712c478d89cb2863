"""Reads and writes the random number generators: Python's, NumPy's, torch's, the device's, and megatron's tracker."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mcore_ckpt.errors import CheckpointCorruptError
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


def check_rng(state: Mapping[str, Any], file: str) -> None:
    """Checks that a file has the states of all generators as `read_rng` returns them, or a seed instead.

    Raises CheckpointCorruptError: a field is missing or has another form. The message names the file and the fields.
    """
    if isinstance(state.get("seed"), int):
        return
    wrong = [name for name, is_right in _FORMS.items() if name not in state or not is_right(state[name])]
    if wrong:
        raise _incomplete(file, wrong)


def seed_of(state: Mapping[str, Any], file: str) -> int:
    """Returns the seed with which the generators of a saved state were started. `file` is for messages.

    The state of torch's CPU generator begins with the seed (`CPUGeneratorImplStateLegacy`, torch 2.13: 8 bytes,
    little-endian). A state that was resharded for another layout contains only the seed.

    Raises CheckpointCorruptError: the file has no seed, and no state of torch's CPU generator.
    """
    if isinstance(state.get("seed"), int):
        return int(state["seed"])
    if not _is_tensor(state.get("torch")):
        raise _incomplete(file, ["torch"])
    return int.from_bytes(bytes(state["torch"][:8].tolist()), "little")


def write_seed(seed: int, step: int, pp: int) -> None:
    """Seeds all generators anew, in the same way as megatron's trainer (`_set_random_seed`).

    The seeds differ between pipeline stages. The seeds of megatron's tracker also differ between tensor- and
    expert-parallel ranks. All seeds depend on the step. Otherwise the random numbers from the beginning of the training
    would come again. `pp` is this rank's pipeline rank.
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


def _incomplete(file: str, fields: Sequence[str]) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"{file}: the fields {', '.join(fields)} of the random states are missing or damaged: take another checkpoint, "
        "or leave 'extra' out of load_contents to start with fresh random states"
    )


def _is_python(state: Any) -> bool:
    return isinstance(state, Sequence) and len(state) == 3 and isinstance(state[1], Sequence)


def _is_numpy(state: Any) -> bool:
    if state is None:
        return True
    fields = {"name", "keys", "position", "has_gauss", "cached"}
    return isinstance(state, Mapping) and state.keys() >= fields and _is_tensor(state["keys"], torch.int64)


def _is_tensor(state: Any, dtype: torch.dtype = torch.uint8) -> bool:
    return isinstance(state, torch.Tensor) and state.dtype == dtype


def _is_of_cpu(state: Any) -> bool:
    return _is_tensor(state) and state.shape == torch.get_rng_state().shape


# The fields of random states in a file, each with a function that says whether a value has the field's form.
_FORMS = {
    "python": _is_python,
    "numpy": _is_numpy,
    "torch": _is_of_cpu,
    "device": lambda state: state is None or _is_tensor(state),
    "megatron": lambda state: isinstance(state, Mapping) and all(map(_is_tensor, state.values())),
}


def _read_numpy() -> dict[str, Any] | None:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    name, keys, position, has_gauss, cached = numpy.random.get_state()
    # The generator's words are stored as int64, because torch has few operators for uint32.
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
            # replaced, the graphs would continue to use the old objects.
            generator.set_state(state)
            restored[name] = generator
        else:
            restored[name] = state.clone()
    tracker.set_states(restored)
