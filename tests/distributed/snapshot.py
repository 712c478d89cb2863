"""Everything that a training is made of, as plain values: to compare, and to destroy before a load."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucket
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer

from mcore_ckpt.state.quantized import is_quantized
from tests.distributed.agreement import everywhere
from tests.distributed.training import Training
from tests.support.quantized import QuantizedTensor

Snapshot = dict[str, Any]

# Since 0.17 the next forward pass can gather what owners of whole layers have updated.
OWNERS_OVERLAP = hasattr(_ParamAndGradBucket, "set_layerwise_params_list")

# No tensor of a training holds this by chance, and no rank number or step count of the tests is as high.
GARBAGE = 77


def snapshot(training: Training) -> Snapshot:
    """Copies of parameters, persistent buffers, optimizer, gradient scaler, scheduler and generators."""
    entries: Snapshot = {}
    # step() leaves the shards of other ranks stale until the next forward's hooks gather them.
    # With owners of whole layers, 0.16 gathers within step().
    gathers_in_step = getattr(training.layout, "layer_wise", None) == "owners" and not OWNERS_OVERLAP
    is_stale = training.layout.overlap_param_gather and not gathers_in_step
    if is_stale and not training.layout.quantized:
        for chunk in training.model:
            chunk.start_param_sync(force_sync=True)
        is_stale = False
    for name, tensor in _model_tensors(training):
        if is_stale and tensor.requires_grad:
            continue  # to gather quantized weights would take more; the main parameters are compared
        if isinstance(tensor, QuantizedTensor):
            entries |= {f"{name}.{part}": value for part, value in tensor.parts().items()}
        elif is_quantized(tensor):  # transformer-engine's own, on a GPU
            entries[name] = tensor.dequantize()
        else:
            entries[name] = tensor.detach().clone()
    for index, optimizer in enumerate(chained(training.optimizer)):
        entries |= _optimizer_entries(f"optimizer{index}", optimizer)
    entries |= {f"scheduler.{field}": repr(value) for field, value in training.scheduler.state_dict().items()}
    return entries | _generators()


def poison(training: Training) -> None:
    """Fill what a load has to write with NaN, or with numbers that nothing else is."""
    for _, tensor in _model_tensors(training):
        _spoil(tensor)
    for optimizer in chained(training.optimizer):
        for group in optimizer.param_groups:
            _spoil_fields(group)
            for parameter in group["params"]:
                _spoil(parameter)
                for kind, tensor in _state(optimizer, parameter):
                    if isinstance(tensor, torch.Tensor):
                        _spoil(tensor)
                    else:
                        optimizer.state[parameter][kind] = GARBAGE
        # The copies that HybridDeviceOptimizer has on the host, or in fp32.
        for tensor in getattr(optimizer.optimizer, "param_to_inner_param", {}).values():
            _spoil(tensor)
        scaler = getattr(optimizer, "grad_scaler", None)
        if scaler is not None:
            _spoil(scaler._scale)
            scaler._growth_tracker = scaler._hysteresis_tracker = GARBAGE
    training.scheduler.num_steps = GARBAGE


def assert_same(found: Snapshot, wanted: Snapshot) -> None:
    """Bit for bit, NaN or not, naming the first entry that differs."""
    missing, added = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    assert (missing, added) == ([], []), f"missing {missing[:5]}, added {added[:5]}"
    differing = [name for name in wanted if not _same(found[name], wanted[name])]
    if differing:
        name = differing[0]
        raise AssertionError(
            f"{len(differing)} of {len(wanted)} entries differ, first {name}: "
            f"{_show(found[name])}, wanted {_show(wanted[name])}; others: {differing[1:4]}"
        )


def assert_state(training: Training, wanted: Snapshot) -> None:
    """On all ranks alike: where it differs on one, all raise."""
    found = snapshot(training)
    with everywhere():
        assert_same(found, wanted)


def chained(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers in a chain, which may nest."""
    if not isinstance(optimizer, ChainedOptimizer):
        return [optimizer]
    return [each for inner in optimizer.chained_optimizers for each in chained(inner)]


def _model_tensors(training: Training) -> Iterator[tuple[str, torch.Tensor]]:
    for index, chunk in enumerate(training.model):
        for name, value in chunk.state_dict(keep_vars=True).items():
            # local modules have an _extra_state of None
            if isinstance(value, torch.Tensor):
                yield f"chunk{index}.{name}", value


def _optimizer_entries(prefix: str, optimizer: MegatronOptimizer) -> Snapshot:
    entries: Snapshot = {}
    for group_index, group in enumerate(optimizer.param_groups):
        name = f"{prefix}.group{group_index}"
        entries |= {f"{name}.{field}": repr(value) for field, value in group.items() if field != "params"}
        for index, parameter in enumerate(group["params"]):
            entries[f"{name}.param{index}"] = parameter.detach().clone()
            for kind, value in _state(optimizer, parameter):
                entries[f"{name}.param{index}.{kind}"] = _copy(value)
    scaler = getattr(optimizer, "grad_scaler", None)
    if scaler is not None:
        entries |= {f"{prefix}.scaler.{field}": _copy(value) for field, value in scaler.state_dict().items()}
    return entries


def _state(optimizer: MegatronOptimizer, parameter: torch.Tensor) -> Iterator[tuple[str, Any]]:
    """The optimizer's state of a parameter, and the scales that FusedAdam reads with it."""
    scales = getattr(optimizer.optimizer, "_scales", {}).get(parameter, {})
    for kind, value in optimizer.state.get(parameter, {}).items():
        if hasattr(value, "_scale_inv"):
            yield from ((kind, value._data), (f"{kind}.scale_inv", value._scale_inv))
        elif kind != "master_param" or parameter.dtype != torch.float32:  # never read
            yield kind, value
            if kind in scales and value.dtype == torch.float16:
                yield f"{kind}.scale", scales[kind]


def _generators() -> Snapshot:
    numpy_state = np.random.get_state(legacy=False)
    entries: Snapshot = {
        "python": repr(random.getstate()),
        "numpy": repr((numpy_state["state"]["key"].tolist(), numpy_state["state"]["pos"])),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
    }
    states = tensor_parallel.get_cuda_rng_tracker().get_states()
    entries |= {f"megatron.{name}": state.clone() for name, state in states.items()}
    return {f"generator.{name}": value for name, value in entries.items()}


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


@torch.no_grad()
def _spoil(tensor: torch.Tensor) -> None:
    if is_quantized(tensor):
        tensor.data.copy_(torch.full(tensor.shape, float("nan"), dtype=tensor.dtype, device=tensor.device))
    else:
        tensor.data.fill_(float("nan") if tensor.is_floating_point() else GARBAGE)


def _spoil_fields(group: dict[str, Any]) -> None:
    for field, value in group.items():
        # Groups are matched by these (_filter_and_reorder_param_groups).
        if isinstance(value, float) and field not in ("wd_mult", "lr_mult", "offload_fraction"):
            group[field] = float("nan")
    if "betas" in group:
        group["betas"] = (0.5, 0.5)


def _same(found: Any, wanted: Any) -> bool:
    if not isinstance(wanted, torch.Tensor):
        return type(found) is type(wanted) and bool(found == wanted)
    if not isinstance(found, torch.Tensor) or found.dtype != wanted.dtype or found.shape != wanted.shape:
        return False
    return torch.equal(_bytes(found), _bytes(wanted))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _show(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value)[:80]
    return f"{value.dtype} {tuple(value.shape)} {value.reshape(-1)[:4].tolist()}"
