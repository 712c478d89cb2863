"""Makes a model's weights from main parameters, where the weights' own memory cannot be saved or loaded.

That is so for quantized weights. With `overlap_param_gather` it is also so for all other weights beside them: megatron
(0.16) gathers quantized weights for a save without the work that has to follow, and with
`reuse_grad_buf_for_mxfp8_param_ag` it would gather gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.state.model import gather_parameters
from mcore_ckpt.state.optimizer import copy_main_to_model, gather_from_owners
from mcore_ckpt.state.optimizers.chain import optimizer_parts
from mcore_ckpt.state.optimizers.part import MainParameter, OptimizerPart
from mcore_ckpt.state.quantized import has_quantized, is_quantized


@dataclass(frozen=True, eq=False)
class _Bucket:
    """A bucket of DistributedDataParallel of which some weights are wanted, and the optimizer that updates it."""

    part: OptimizerPart
    buffer: Any
    bucket: Any
    wanted: Sequence[torch.Tensor]

    def allocate(self, on: str | None = None) -> torch.Tensor:
        """Returns memory for all weights of the bucket."""
        # With its padding, a bucket is as large as its gradients. That of the packed bytes of NVFP4 is smaller.
        first = self.wanted[0]
        return torch.empty(self.bucket.grad_data.numel(), dtype=first.dtype, device=on or first.device)

    def weights(self, memory: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields the wanted parameters, each with its weight in the memory."""
        # `bucket.param_to_index` (0.16) leaves out the padding between parameters. In 0.17 the buffer's own map counts
        # the bytes of NVFP4, and this method the elements.
        index = getattr(self.buffer, "get_unpacked_index_map", lambda: self.buffer.param_index_map)()
        for parameter in self.wanted:
            start, stop = (place - self.bucket.offset for place in index[parameter][:2])
            yield parameter, memory[start:stop].view(parameter.shape)

    def fill(self, memory: torch.Tensor, mains: Mapping[int, MainParameter]) -> None:
        """Rounds this rank's main parameters into the memory, and gathers the rest."""
        owner = self.part.megatron
        for parameter in self.wanted:
            each = mains.get(id(parameter))
            if each is not None:
                place = owner._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
                memory[place.start : place.end].copy_(each.main.detach().view(-1))
        group = owner.data_parallel_group
        if group.size() > 1:
            own = memory.numel() // group.size()
            start = group.rank() * own
            torch.distributed.all_gather_into_tensor(memory, memory[start : start + own], group=group)


def _buckets(optimizer: Any, wanted: set[int]) -> Iterator[_Bucket]:
    """Yields the buckets that have parameters with these `id`s, in the same order on all ranks of a group."""
    for part in optimizer_parts(optimizer) if optimizer is not None and wanted else ():
        for buffer in part.megatron.buffers if part.is_distributed and part.inner is not None else ():
            for bucket in buffer.buckets:
                own = [parameter for parameter in bucket.params if id(parameter) in wanted]
                if own:
                    yield _Bucket(part, buffer, bucket, own)


def _mains_by_parameter(optimizer: Any) -> dict[int, MainParameter]:
    return {id(each.parameter): each for part in optimizer_parts(optimizer) for each in part.mains()}


@dataclass(frozen=True, eq=False)
class MainWeights:
    """Memory for weights, and how to fill it from the main parameters that data-parallel ranks share.

    Attributes:
        by_parameter: a tensor of the parameter's shape and nominal dtype, by `id` of the parameter.
        buckets: the buckets that these tensors are parts of, each with its memory.
        optimizer: megatron's optimizer.
    """

    by_parameter: Mapping[int, torch.Tensor]
    buckets: tuple[tuple[_Bucket, torch.Tensor], ...]
    optimizer: Any = None

    def fill(self) -> None:
        """Rounds this rank's main parameters into the memory, and gathers the rest. All ranks call it."""
        mains = _mains_by_parameter(self.optimizer) if self.buckets else {}
        with torch.no_grad():
            for bucket, memory in self.buckets:
                bucket.fill(memory, mains)


NO_WEIGHTS = MainWeights({}, ())


def weights_to_save(chunks: Sequence[torch.nn.Module], optimizer: Any, on: str | None = None) -> MainWeights:
    """Returns memory for the weights that a save takes from main parameters. It needs 2 bytes for most weights.

    Args:
        chunks: the model's chunks on this rank.
        optimizer: megatron's optimizer, or None.
        on: the device of the memory; None for that of each parameter.
    """
    wanted = {id(weight) for chunk in chunks for weight in _taken_from_mains(chunk)}
    buckets = tuple((bucket, bucket.allocate(on)) for bucket in _buckets(optimizer, wanted))
    found = {id(each): weight for bucket, memory in buckets for each, weight in bucket.weights(memory)}
    return MainWeights(found, buckets, optimizer)


def is_gathered_by_megatron(chunk: torch.nn.Module) -> bool:
    """Returns False if a save takes all weights of a chunk from main parameters, so that they need not be gathered."""
    config = getattr(chunk, "ddp_config", None)
    overlaps = getattr(config, "overlap_param_gather", False)
    return not (overlaps and (_shares_gradients(chunk) or has_quantized([chunk])))


def _taken_from_mains(chunk: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    every = not is_gathered_by_megatron(chunk)
    return (each for each in chunk.parameters() if each.requires_grad and (every or is_quantized(each)))


def write_weights(chunks: Sequence[torch.nn.Module], optimizer: Any) -> None:
    """Makes the model's weights those of the main parameters on all ranks, in the same way as a step. All call it."""
    if any(_shares_gradients(chunk) for chunk in chunks):
        _write_each(chunks, optimizer)
        return
    copy_main_to_model(optimizer)
    gather_parameters(chunks)
    gather_from_owners(optimizer)
    quantized = [each for chunk in chunks for each in chunk.parameters() if each.requires_grad and is_quantized(each)]
    if quantized:
        from megatron.core.fp8_utils import post_all_gather_processing

        # megatron (0.16) leaves it out after a gathering that `force_sync` demands, if it overlaps others. To do it
        # twice changes nothing.
        post_all_gather_processing(quantized)


def _write_each(chunks: Sequence[torch.nn.Module], optimizer: Any) -> None:
    """Writes the weights bucket by bucket, past the memory of gradients, in which megatron would gather them."""
    mains = _mains_by_parameter(optimizer)
    trained = {id(each) for chunk in chunks for each in chunk.parameters() if each.requires_grad}
    with torch.no_grad():
        for bucket in _buckets(optimizer, trained):
            memory = bucket.allocate()
            bucket.fill(memory, mains)
            for parameter, weight in bucket.weights(memory):
                parameter.data.copy_(weight)


def _shares_gradients(chunk: torch.nn.Module) -> bool:
    """Returns True if weights are gathered in the memory of gradients, from which megatron then quantizes them."""
    return bool(getattr(getattr(chunk, "ddp_config", None), "reuse_grad_buf_for_mxfp8_param_ag", False))


def write_mains(optimizer: Any, weights: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Makes main parameters those of loaded weights.

    Args:
        optimizer: megatron's optimizer.
        weights: parameters, and the loaded values of each.
    """
    mains = _mains_by_parameter(optimizer)
    with torch.no_grad():
        for parameter, values in weights:
            each = mains.get(id(parameter))
            if each is not None:
                each.copy_from(values)


def without_main(name: str) -> UnsupportedError:
    """Returns the error for a quantized weight that a save cannot take from a main parameter."""
    return UnsupportedError(
        f"parameter {name} is quantized, and has no main parameter to save instead: give the manager the optimizer, a "
        "DistributedOptimizer; leave out frozen parameters with skip_frozen=True, or keep them in bf16"
    )
