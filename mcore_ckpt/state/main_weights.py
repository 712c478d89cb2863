"""Makes a model's weights from main parameters, where the weights' own memory cannot be saved or loaded.

Quantized weights are made in this way. In a model with quantized weights and `overlap_param_gather`, all trained
weights are made in this way, for two reasons. When megatron (0.16) gathers quantized weights for a save, it leaves out
the work that has to follow the gathering. And with `reuse_grad_buf_for_mxfp8_param_ag`, megatron would gather
gradients.

Weights are gathered in pieces of 256 MB, because all weights at once would be a second copy of the model on the GPU.
Each data-parallel rank owns a shard of a bucket, and a piece consists of the same range of elements of every shard. So
one `all_gather` makes a piece for any number of ranks, even if a bucket is the whole model. Each piece is copied into
the host images before the next piece overwrites the memory (`save/capture.py`). On a GPU the trainer's stream waits for
that copy, but the host does not. In the plan, tensors without memory (`meta`) stand for the weights, and the capture
skips these tensors. A rank whose copy fails goes on gathering, because the other ranks wait for its part. Files without
a host image are written straight from tensors, so the weights in these files stay in host memory until the files are
written. Without the gathering, each rank would have only its own elements, and the files of a stage would consist of
thousands of ranges from all ranks. But each rank can write only one range of a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.io import tuning
from mcore_ckpt.state.model import gather_parameters
from mcore_ckpt.state.optimizer import copy_main_to_model, gather_from_owners
from mcore_ckpt.state.optimizers.chain import optimizer_parts
from mcore_ckpt.state.optimizers.part import MainParameter, OptimizerPart
from mcore_ckpt.state.quantized import has_quantized, is_quantized

# Each rank's part of a piece begins at a multiple of this many elements, because NCCL is slower on unaligned memory.
_ALIGNMENT = 64


@dataclass(frozen=True, eq=False)
class _Bucket:
    """A bucket of DistributedDataParallel that has wanted weights, and the optimizer that updates the bucket.

    Each data-parallel rank owns a shard of the bucket. The shards are equally long, and in the order of the ranks.
    """

    part: OptimizerPart
    buffer: Any
    bucket: Any
    wanted: Sequence[torch.Tensor]

    @property
    def group(self) -> Any:
        return self.part.megatron.data_parallel_group

    @property
    def dtype(self) -> torch.dtype:
        return self.wanted[0].dtype

    @property
    def shard(self) -> int:
        """The number of elements that each rank owns."""
        # Count the gradients: a bucket has one gradient for each element, including padding. Do not count the bytes of
        # weights, because packed NVFP4 weights have fewer bytes than elements.
        count: int = self.bucket.grad_data.numel()
        return count // self.group.size()

    def weights(self) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Yields the wanted parameters, each with the place of its weight in the bucket (first element, end)."""
        # Do not use `bucket.param_to_index` (0.16), which leaves out the padding between parameters. In 0.17, prefer
        # `get_unpacked_index_map`, which counts elements: `param_index_map` counts the bytes of NVFP4 weights.
        index = getattr(self.buffer, "get_unpacked_index_map", lambda: self.buffer.param_index_map)()
        for parameter in self.wanted:
            start, stop = (place - self.bucket.offset for place in index[parameter][:2])
            yield parameter, start, stop

    def pieces(self) -> Iterator[_Piece]:
        """Cuts the bucket into pieces of about WEIGHT_PIECE_BYTES bytes, in the same way on all ranks."""
        most = tuning.WEIGHT_PIECE_BYTES // (self.dtype.itemsize * self.group.size())
        width = max(_ALIGNMENT, most // _ALIGNMENT * _ALIGNMENT)
        for first in range(0, self.shard, width):
            yield _Piece(self, first, min(width, self.shard - first))

    def whole(self) -> _Piece:
        """Returns the whole bucket as one piece. The memory of this piece has the bucket's elements in their order."""
        return _Piece(self, 0, self.shard)


@dataclass(frozen=True, eq=False)
class _Piece:
    """Elements `[first, first + width)` of each rank's shard of a bucket.

    All ranks have the same number of elements in a piece, so that one `all_gather` makes the piece for a group of any
    size.
    """

    bucket: _Bucket
    first: int
    width: int

    @property
    def nbytes(self) -> int:
        return self.width * self.bucket.group.size() * self.bucket.dtype.itemsize

    @property
    def device(self) -> torch.device:
        return self.bucket.wanted[0].device

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns the beginning of some memory (uint8) as the elements of this piece."""
        return memory[: self.nbytes].view(self.bucket.dtype)

    def inside(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yields the ranges of the bucket's elements `[start, stop)` in this piece: (first, end, place in piece)."""
        shard = self.bucket.shard
        for rank in range(start // shard, -(-stop // shard)):
            begin = rank * shard + self.first
            low, high = max(start, begin), min(stop, begin + self.width)
            if low < high:
                yield low, high, rank * self.width + low - begin

    def fill(self, values: torch.Tensor, mains: Mapping[int, MainParameter]) -> None:
        """Rounds this rank's main parameters into the elements of the piece, and gathers the other ranks' elements."""
        owner, group = self.bucket.part.megatron, self.bucket.group
        for parameter in self.bucket.wanted:
            each = mains.get(id(parameter))
            if each is not None:
                place = owner._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
                main = each.main.detach().view(-1)
                for low, high, at in self.inside(place.start, place.end):
                    values[at : at + high - low].copy_(main[low - place.start : high - place.start])
        if group.size() > 1:
            own = values[group.rank() * self.width : (group.rank() + 1) * self.width]
            torch.distributed.all_gather_into_tensor(values, own, group=group)

    def fragments(self, values: torch.Tensor, weights: Mapping[int, torch.Tensor]) -> list[Fragment]:
        """Returns the weights' elements in the piece. `weights` is `MainWeights.by_parameter`."""
        return [
            Fragment(weights[id(parameter)], low - start, values[at : at + high - low])
            for parameter, start, stop in self.bucket.weights()
            for low, high, at in self.inside(start, stop)
        ]


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


class Fragment(NamedTuple):
    """Consecutive elements of a weight, from element `start` on in row-major order.

    `weight` is the weight's tensor in `MainWeights.by_parameter`.
    """

    weight: torch.Tensor
    start: int
    values: torch.Tensor


@dataclass(frozen=True, eq=False)
class MainWeights:
    """The weights that a save makes from main parameters, which are divided among data-parallel ranks.

    Attributes:
        by_parameter: a tensor of the parameter's shape and nominal dtype, by `id` of the parameter. The tensor has no
            memory (device `meta`), unless `with_tensors` has replaced it.
        pieces: the pieces in which the weights are made, in the same order on all ranks of a group.
        memory: the memory of one piece at a time (uint8), one tensor for each device.
        optimizer: megatron's optimizer.
    """

    by_parameter: Mapping[int, torch.Tensor]
    pieces: tuple[_Piece, ...]
    memory: Mapping[torch.device, torch.Tensor]
    optimizer: Any = None

    @property
    def is_cuda(self) -> bool:
        """True if weights are made on a GPU."""
        return any(device.type == "cuda" for device in self.memory)

    @property
    def reads_host(self) -> bool:
        """True if some of the main parameters are in host memory."""
        return bool(self.pieces) and not all(m.main.is_cuda for m in _mains_by_parameter(self.optimizer).values())

    def with_tensors(self, new: Mapping[int, torch.Tensor]) -> MainWeights:
        """Returns a copy with some tensors replaced. `new` has the new tensors, by `id` of the tensor to replace."""
        return replace(self, by_parameter={at: new.get(id(old), old) for at, old in self.by_parameter.items()})

    def make(self, take: Callable[[Sequence[Fragment]], object]) -> None:
        """Makes all weights from the main parameters of all ranks. All ranks must call this function.

        Args:
            take: a function that is called for each piece, with the weights' elements in this piece. The next piece
                overwrites these elements, on a GPU in stream order.

        Raises the error of `take`, but only after the last piece, because the other ranks wait for this rank's
        elements.
        """
        mains = _mains_by_parameter(self.optimizer) if self.pieces else {}
        failure: Exception | None = None
        with torch.no_grad():
            for piece in self.pieces:
                values = piece.view(self.memory[piece.device])
                piece.fill(values, mains)
                try:
                    if failure is None:
                        take(piece.fragments(values, self.by_parameter))
                except Exception as error:
                    failure = error
        if failure is not None:
            raise failure


NO_WEIGHTS = MainWeights({}, (), {})


def weights_to_save(chunks: Sequence[torch.nn.Module], optimizer: Any, has_memory: bool = True) -> MainWeights:
    """Returns the weights that a save takes from main parameters. Waits for no other rank.

    Args:
        chunks: the model's chunks on this rank.
        optimizer: megatron's optimizer, or None.
        has_memory: whether to allocate the memory of the pieces. If this allocation fails, all ranks are told. If a
            later allocation failed, other ranks would wait for this rank's part of a piece.
    """
    wanted = {id(weight) for chunk in chunks for weight in _taken_from_mains(chunk)}
    buckets = tuple(_buckets(optimizer, wanted))
    found = {
        id(parameter): torch.empty(parameter.shape, dtype=bucket.dtype, device="meta")
        for bucket in buckets
        for parameter in bucket.wanted
    }
    pieces = tuple(piece for bucket in buckets for piece in bucket.pieces())
    return MainWeights(found, pieces, _memory_of(pieces) if has_memory else {}, optimizer)


def _memory_of(pieces: Iterable[_Piece]) -> dict[torch.device, torch.Tensor]:
    """Allocates, on each device, memory for the largest piece."""
    nbytes: dict[torch.device, int] = {}
    for piece in pieces:
        nbytes[piece.device] = max(piece.nbytes, nbytes.get(piece.device, 0))
    return {device: torch.empty(most, dtype=torch.uint8, device=device) for device, most in nbytes.items()}


def is_gathered_by_megatron(chunk: torch.nn.Module) -> bool:
    """Returns False if a save makes all trained weights of a chunk from main parameters.

    Then megatron need not gather these weights.
    """
    config = getattr(chunk, "ddp_config", None)
    overlaps = getattr(config, "overlap_param_gather", False)
    return not (overlaps and (_shares_gradients(chunk) or has_quantized([chunk])))


def _taken_from_mains(chunk: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    every = not is_gathered_by_megatron(chunk)
    return (each for each in chunk.parameters() if each.requires_grad and (every or is_quantized(each)))


def write_weights(chunks: Sequence[torch.nn.Module], optimizer: Any) -> None:
    """Sets the model's weights from the main parameters, as a step does. All ranks must call this function."""
    if any(_shares_gradients(chunk) for chunk in chunks):
        _write_each(chunks, optimizer)
        return
    copy_main_to_model(optimizer)
    gather_parameters(chunks)
    gather_from_owners(optimizer)
    quantized = [each for chunk in chunks for each in chunk.parameters() if each.requires_grad and is_quantized(each)]
    if quantized:
        from megatron.core.fp8_utils import post_all_gather_processing

        # With overlap_param_gather, megatron (0.16) omits this call after a gathering with `force_sync`. If megatron
        # has made the call, a second call changes nothing.
        post_all_gather_processing(quantized)


def _write_each(chunks: Sequence[torch.nn.Module], optimizer: Any) -> None:
    """Writes the weights bucket by bucket.

    Megatron would gather the weights in the memory of gradients. This function uses separate memory instead.
    """
    mains = _mains_by_parameter(optimizer)
    trained = {id(each) for chunk in chunks for each in chunk.parameters() if each.requires_grad}
    with torch.no_grad():
        for bucket in _buckets(optimizer, trained):
            piece = bucket.whole()
            values = torch.empty(bucket.shard * bucket.group.size(), dtype=bucket.dtype, device=piece.device)
            piece.fill(values, mains)
            for parameter, start, stop in bucket.weights():
                parameter.data.copy_(values[start:stop].view(parameter.shape))


def _shares_gradients(chunk: torch.nn.Module) -> bool:
    """Returns True if megatron gathers weights in the memory of gradients, and then quantizes the gathered weights."""
    return bool(getattr(getattr(chunk, "ddp_config", None), "reuse_grad_buf_for_mxfp8_param_ag", False))


def write_mains(optimizer: Any, weights: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Sets main parameters from loaded weights. `weights` has pairs of a model's parameter and its values."""
    mains = _mains_by_parameter(optimizer)
    with torch.no_grad():
        for parameter, values in weights:
            each = mains.get(id(parameter))
            if each is not None:
                each.copy_from(values)


def without_main(name: str) -> UnsupportedError:
    """Returns the error for a quantized weight that a save cannot take from a main parameter."""
    return UnsupportedError(
        f"parameter {name} is quantized, and has no main parameter to save instead: give the manager the optimizer, "
        "which must be a DistributedOptimizer; leave out frozen parameters with skip_frozen=True, or keep them in bf16"
    )
