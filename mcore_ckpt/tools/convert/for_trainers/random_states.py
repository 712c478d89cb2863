"""Converts each rank's saved random states to the form that Megatron-LM, Megatron-Bridge, verl and AReaL load.

Megatron stores a list of states for each pipeline and tensor rank (`get_rng_state`). All data-parallel ranks take the
first entry, so they continue with the same states. With `--data-parallel-random-init`, each data-parallel rank takes a
separate entry instead. With expert parallelism, Bridge (0.6.2) stores a list for each pipeline rank, tensor rank, and
place in the group of data- and context-parallel ranks. Each of these lists has one state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import InvalidStateError
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.formats.torch_dist.contents import saved_object
from mcore_ckpt.state.rng import check_rng


def rng_objects(reader: NativeReader, of_each_replica: bool = False) -> dict[str, bytes]:
    """Returns the sharded objects with the random states, by key; empty if the checkpoint has none, or only a seed.

    A resharded checkpoint can have a seed instead of states. Only this package can start from the seed. With
    `of_each_replica`, there is an object for each rank, numbered by the rank's place in the group of data- and
    context-parallel ranks.

    Raises:
        CheckpointCorruptError: a file is missing, is damaged, or lacks states.
        InvalidStateError: NumPy, which megatron's form needs, is not installed.
    """
    if not reader.manifest.files_of("rng"):
        return {}
    sizes = reader.manifest.topology
    objects = {}
    for pp in range(sizes.pp):
        for tp in range(sizes.tp):
            # In the group of replicas, the context-parallel place varies fastest ("tp-cp-ep-dp-pp"), so `cp` is the
            # inner loop.
            replicas = [(cp, dp) for dp in range(sizes.dp) for cp in range(sizes.cp if of_each_replica else 1)]
            states = [_read_states(reader, file_names.rng_file(pp, tp, cp, dp)) for cp, dp in replicas]
            if any("seed" in state for state in states):
                return {}
            found = [_in_megatrons_form(state) for state in states]
            if not of_each_replica:
                objects[f"rng_state/shard_{pp}.{tp}_{sizes.pp}.{sizes.tp}"] = saved_object(found)
                continue
            for place, state in enumerate(found):
                key = f"rng_state/shard_{pp}.{tp}.{place}_{sizes.pp}.{sizes.tp}.{len(found)}"
                objects[key] = saved_object([state])
    return objects


def _read_states(reader: NativeReader, path: str) -> dict[str, Any]:
    states = reader.plain(path)
    check_rng(states, f"{reader.place}/{path}")
    return states


def _in_megatrons_form(state: Mapping[str, Any]) -> dict[str, Any]:
    # A run without CUDA has no state of a device, but megatron requires a state of a device, so use torch's state of
    # the CPU.
    device = state["torch"] if state["device"] is None else state["device"]
    version, words, gauss = state["python"]
    return {
        "random_rng_state": (version, tuple(words), gauss),
        "np_rng_state": _numpy_state(state),
        "torch_rng_state": state["torch"],
        "cuda_rng_state": device,
        "rng_tracker_states": dict(state["megatron"]),
    }


def _numpy_state(state: Mapping[str, Any]) -> tuple[Any, ...]:
    try:
        import numpy
    except ImportError:
        raise InvalidStateError("megatron's random states contain a NumPy state: pip install numpy") from None
    saved = state["numpy"]
    if saved is None:
        # The training did not use NumPy, but megatron requires a NumPy state, so make a new state.
        name, keys, *rest = numpy.random.RandomState(0).get_state()
        return (name, keys, *rest)
    keys = saved["keys"].numpy().astype("uint32")
    return (saved["name"], keys, saved["position"], saved["has_gauss"], saved["cached"])
