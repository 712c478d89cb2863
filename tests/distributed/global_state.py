"""The training state put together from all ranks: the same under every layout, so that layouts can be compared."""

import math
from collections.abc import Iterator

import numpy as np
import torch

from mcore_ckpt.formats.native.coded import decoded
from mcore_ckpt.sharding.plan import OPAQUE
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.state.main_weights import is_gathered_by_megatron
from mcore_ckpt.state.model import model_shards, sync_parameters, unwrap
from mcore_ckpt.state.optimizer import read_optimizer
from mcore_ckpt.state.optimizers.chain import optimizer_parts
from mcore_ckpt.state.optimizers.part import read_step
from mcore_ckpt.state.quantized import is_quantized
from mcore_ckpt.state.shards import ParameterState
from tests.distributed.agreement import gather
from tests.distributed.training import Step, Training
from tests.support.element_positions import positions

# By element size: numpy has no bfloat16.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

GlobalState = dict[str, torch.Tensor]


def global_state(training: Training) -> GlobalState:
    """Every tensor of model and optimizer, whole, by global name and kind; and how many steps were done.

    Fails if two ranks have different bits for the same element.
    """
    sync_parameters([chunk for chunk in training.model if is_gathered_by_megatron(chunk)])
    # Torch pickles and indexes many small tensors several times more slowly than numpy.
    local = [(name, region, values.dtype, _bits(values).numpy()) for name, region, values in _local(training)]
    tensors: GlobalState = {}
    wholes: dict[str, np.ndarray] = {}
    written: dict[str, np.ndarray] = {}
    for name, region, dtype, bits in (item for rank in gather(local) for item in rank):
        if name not in wholes:
            wholes[name] = np.zeros(math.prod(region.global_shape), bits.dtype)
            written[name] = np.zeros(wholes[name].shape, bool)
            tensors[name] = torch.from_numpy(wholes[name]).view(dtype).view(region.global_shape)
        assert (tensors[name].dtype, tensors[name].shape) == (dtype, region.global_shape), name
        whole, seen, at = wholes[name], written[name], positions(region).numpy()
        known = seen[at]
        assert np.array_equal(whole[at][known], bits[known]), f"replicas of {name} differ"
        whole[at] = bits
        seen[at] = True
    holes = [name for name, seen in written.items() if not seen.all()]
    assert not holes, f"no rank has all of {holes[:3]}"
    steps = {step for rank in gather(_steps(training)) for step in rank if step is not None}
    assert len(steps) <= 1, steps
    return tensors | {"step": torch.tensor([float(step) for step in steps])}


def assert_same_state(found: GlobalState, wanted: GlobalState) -> None:
    """Bit for bit."""
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())[:6]
    differing = [name for name in wanted if not _same(found[name], wanted[name])]
    assert not differing, f"{len(differing)} of {len(wanted)} differ: {differing[:5]}"


def loss_and_norm(step: Step) -> list[float]:
    """Mean loss over all that see one, and the gradient norm, which is everywhere the same. Collective."""
    losses = [loss for losses in gather(step.losses) for loss in losses]
    assert step.grad_norm is not None
    return [sum(losses) / len(losses), step.grad_norm]


def _same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return found.dtype == wanted.dtype and found.shape == wanted.shape and torch.equal(_bits(found), _bits(wanted))


def _local(training: Training) -> Iterator[tuple[str, Region, torch.Tensor]]:
    model, unused = model_shards(training.model), _unused(training)
    stale = {id(each) for chunk in training.model if not is_gathered_by_megatron(chunk) for each in chunk.parameters()}
    for shard in model:
        # Quantized weights have scales of each rank's part, and follow from their main parameters.
        follows = is_quantized(shard.tensor) or id(shard.tensor) in stale
        if shard.key.kind != OPAQUE and not follows and not _is_in(shard.tensor, unused):
            yield f"{shard.key.name} model", shard.region, shard.tensor.detach()
    for states in read_optimizer(training.optimizer, model, first_instance=True):
        for state in (state for state in states if not _is_in(state.main, unused)):
            for kind, tensor in {"param": state.main, **state.moments}.items():
                yield f"{state.name} {kind}", state.region, _values(state, kind, tensor.detach())
            for kind, tensor in state.bound.items():
                yield f"{state.name} {kind} of {state.region.describe()}", Region.whole(tuple(tensor.shape)), tensor


def _values(state: ParameterState, kind: str, tensor: torch.Tensor) -> torch.Tensor:
    """The values, if the optimizer keeps them scaled, or apart from their upper halves."""
    scale, upper = state.scales.get(kind), state.upper if kind == "param" else None
    return tensor if scale is None and upper is None else decoded(tensor, scale, upper)


def _is_in(tensor: torch.Tensor, whole: torch.Tensor | None) -> bool:
    """Whether a tensor's memory is part of another's."""
    return whole is not None and 0 <= tensor.data_ptr() - whole.data_ptr() < whole.nbytes


def _unused(training: Training) -> torch.Tensor | None:
    """The weight of an output layer that takes the embedding instead (tied embeddings, multi-token prediction)."""
    chunk = unwrap(training.model[-1])
    if training.layout.tied_embeddings and training.layout.mtp_layers and not chunk.pre_process:
        return chunk.output_layer.weight
    return None


def _steps(training: Training) -> list[float | int | None]:
    return [read_step(part) for part in optimizer_parts(training.optimizer)]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(-1).view(INTEGERS[tensor.element_size()])
