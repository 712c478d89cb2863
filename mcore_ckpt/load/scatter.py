"""Reads a folder on rank 0 for all ranks, and sends each rank its part in messages of limited size.

The messages are sent point to point over the default process group, from the main thread. Rank 0 has two messages in
memory, because it reads one while it sends the other. A receiving rank has one message in memory.

Each message is sent as a batch with one operation. With `send` and `recv`, NCCL would make a communicator, with buffers
on both GPUs, for each pair of ranks. A batch uses the communicator of the group (torch 2.13, `batch_isend_irecv`;
`pointToPoint` in ProcessGroupNCCL). All ranks must have made this communicator before the first batch, because only two
ranks take part in a batch.

A separate gloo group is not used, because it would need a connection between every two ranks. torch's `scatter` is not
used, because it would need the messages for all ranks in memory at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from mcore_ckpt import json_bounds
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.formats.huggingface.reader import HuggingFaceReader
from mcore_ckpt.formats.locate import Locator, Wanted
from mcore_ckpt.io import tuning
from mcore_ckpt.load.fill import TensorFill, fill_tensors
from mcore_ckpt.sharding.plan import MODEL, ReadRange, ShardKey
from mcore_ckpt.sharding.regions import Piece, Region

# Each segment of a message begins at a multiple of this many bytes, so that it can be viewed as any dtype.
_ALIGNMENT = 16
_GOOD, _FAILED = 1, 0


@dataclass(frozen=True, eq=False)
class Request:
    """A tensor that a rank needs: its name in the checkpoint, its region of the global tensor, and its fill."""

    name: str
    region: Region
    fill: TensorFill


@dataclass(frozen=True)
class _Segment:
    """Elements `[start, stop)` of the wanted tensor `number`, at byte `at` of a message."""

    number: int
    start: int
    stop: int
    at: int


def scatter(reader: HuggingFaceReader, requests: Sequence[Request], rank: int, world_size: int) -> int:
    """Fills the requests of every rank from files that only rank 0 reads.

    All ranks of the default group must call this function. Every rank can have a reader, because a reader needs only
    the files' headers. `rank` is this rank's number in the default group, and `world_size` is the size of this group.
    Returns the number of bytes that this rank has read from files.

    Raises:
        CheckpointCorruptError: on rank 0, if a file cannot be read.
        CheckpointError: on every other rank, if rank 0 has failed.
    """
    device = _device() if world_size > 1 else torch.device("cpu")
    own = _encode(requests) if rank else b""
    sizes = _all_gather(len(own), world_size, device) if world_size > 1 else [0]
    if rank:
        _receive(requests, own, device)
        return 0
    failure: BaseException | None = None
    nbytes = 0
    try:
        nbytes = fill_tensors([request.fill for request in requests], reader.read)
    except BaseException as error:  # kept until the other ranks, which wait for messages, know of the failure
        failure = error
    return nbytes + _serve(reader, sizes, device, failure)


@dataclass(frozen=True, eq=False)
class _Turn:
    """One message to one rank."""

    rank: int
    wanted: Sequence[Wanted]
    segments: Sequence[_Segment]


def _serve(reader: HuggingFaceReader, sizes: Sequence[int], device: torch.device, failure: BaseException | None) -> int:
    """Sends the other ranks the tensors that they want. `sizes` has the size of each rank's encoded requests."""
    locator = Locator(reader, None)
    turns = _turns({other: _receive_wanted(other, sizes[other], device) for other in range(1, len(sizes))}, locator)
    buffers = _Buffers(device)

    def read(number: int) -> tuple[torch.Tensor, int]:
        if failure is not None:
            raise failure
        turn = turns[number]
        memory = buffers.get(number, _size(turn, locator))
        return memory, reader.read(_reads(turn, locator, memory))

    nbytes = 0
    with ThreadPoolExecutor(1, thread_name_prefix="load-hf-read") as pool:
        reading = [pool.submit(read, 0)] if turns else []
        for number, turn in enumerate(turns):
            try:
                memory, count = reading.pop().result()
            except BaseException:
                for other in {later.rank for later in turns[number:]}:
                    _send(torch.tensor([_FAILED], device=device), other)
                raise
            if number + 1 < len(turns):
                reading.append(pool.submit(read, number + 1))
            nbytes += count
            _send(torch.tensor([_GOOD], device=device), turn.rank)
            # Wait until the message is sent, because the message after the next one is read into the same buffer.
            _send(memory.to(device), turn.rank)
            _wait(device)
    if failure is not None:
        raise failure
    return nbytes


def _turns(wanted: Mapping[int, Sequence[Wanted]], locator: Locator) -> list[_Turn]:
    """Orders the messages. The ranks get messages in turn, so that no rank waits until the group's timeout."""
    by_rank = [
        [_Turn(rank, tensors, parts) for parts in _messages([(w.region.numel, _dtype(locator, w)) for w in tensors])]
        for rank, tensors in wanted.items()
    ]
    return [turn for turns in zip_longest(*by_rank) for turn in turns if turn is not None]


class _Buffers:
    """Two host buffers, used in turn. Each grows to the largest message that it has had to hold."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._memory = [torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)]

    def get(self, number: int, nbytes: int) -> torch.Tensor:
        slot = number % len(self._memory)
        if self._memory[slot].numel() < nbytes:
            self._memory[slot] = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)
        return self._memory[slot][:nbytes]


def _receive(requests: Sequence[Request], encoded: bytes, device: torch.device) -> None:
    _send(torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(device), 0)
    arriving = _Arriving(requests)
    sizes = [(target.numel(), r.fill.dtype) for target, r in zip(arriving.targets, requests, strict=True)]
    failure: BaseException | None = None
    for message in _messages(sizes):
        status = torch.zeros(1, dtype=torch.int64, device=device)
        _receive_into(status, 0)
        if status.item() != _GOOD:
            raise CheckpointError("rank 0 could not read the folder and has stopped sending: see the error of rank 0")
        last = message[-1]
        size = last.at + (last.stop - last.start) * requests[last.number].fill.dtype.itemsize
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        _receive_into(buffer, 0)
        try:
            if failure is None:
                for segment in message:
                    arriving.take(segment, buffer)
        except BaseException as error:  # kept, because rank 0 continues to send, and blocks if nobody receives
            failure = error
    if failure is not None:
        raise failure


class _Arriving:
    """Fills the tensors of requests. Tensors arrive in the order of the requests, each in one or several segments.

    A tensor that is not filled in place has temporary memory only from its first segment to its last. Temporary memory
    for all tensors together could be as large as the model.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self.targets = [request.fill.target().detach() for request in requests]
        self._memory = torch.empty(0)

    def take(self, segment: _Segment, message: torch.Tensor) -> None:
        fill, target = self._requests[segment.number].fill, self.targets[segment.number]
        in_place = fill.encode is None and target.is_contiguous()
        if segment.start == 0:
            self._memory = target if in_place else torch.empty(target.shape, dtype=target.dtype, device=target.device)
        nbytes = (segment.stop - segment.start) * fill.dtype.itemsize
        values = message[segment.at : segment.at + nbytes].view(fill.dtype)
        self._memory.view(-1)[segment.start : segment.stop].copy_(values)
        if segment.stop == target.numel() and not in_place:
            if fill.encode is not None:
                fill.encode(self._memory)
            else:
                target.copy_(self._memory)
            self._memory = torch.empty(0)


def _messages(tensors: Sequence[tuple[int, torch.dtype]]) -> Iterator[list[_Segment]]:
    """Cuts tensors, given as (elements, dtype), into messages of at most SCATTER_BYTES.

    Sender and receiver both call this function, so both cut the same messages without communicating.
    """
    message: list[_Segment] = []
    at = 0
    for number, (numel, dtype) in enumerate(tensors):
        start = 0
        while start < numel:
            left = (tuning.SCATTER_BYTES - at) // dtype.itemsize
            if message and left < min(numel - start, _ALIGNMENT):
                yield message
                message, at = [], 0
                continue
            stop = min(numel, start + max(1, left))
            message.append(_Segment(number, start, stop, at))
            at += -(-(stop - start) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
            start = stop
    if message:
        yield message


def _size(turn: _Turn, locator: Locator) -> int:
    last = turn.segments[-1]
    return last.at + (last.stop - last.start) * _dtype(locator, turn.wanted[last.number]).itemsize


def _reads(turn: _Turn, locator: Locator, memory: torch.Tensor) -> Iterator[tuple[ReadRange, torch.Tensor]]:
    for segment in turn.segments:
        whole = turn.wanted[segment.number]
        first = whole.region.flat[0]
        region = whole.region.with_flat(first + segment.start, first + segment.stop)
        located = locator.find(replace(whole, region=region))
        assert located is not None, "the rank that sent the request has located it"
        dtype = located.dtype
        values = memory[segment.at : segment.at + (segment.stop - segment.start) * dtype.itemsize].view(dtype)
        if located.outside:
            values.zero_()
        yield from ((read, values) for read in located.reads)


def _dtype(locator: Locator, wanted: Wanted) -> torch.dtype:
    key = locator.stored_key(wanted.key)
    info = None if key is None else locator.reader.info(key)
    assert info is not None, "the rank that sent the request has located it"
    return info.dtype


# -- messages ---------------------------------------------------------------------------------------------


def _send(tensor: torch.Tensor, other: int) -> None:
    _exchange(dist.P2POp(dist.isend, tensor, other))


def _receive_into(tensor: torch.Tensor, other: int) -> None:
    _exchange(dist.P2POp(dist.irecv, tensor, other))


def _exchange(operation: dist.P2POp) -> None:
    """Sends or receives a tensor, and waits until this is done. On a GPU, only the current stream waits."""
    for work in dist.batch_isend_irecv([operation]):
        work.wait()


def _all_gather(own: int, world_size: int, device: torch.device) -> list[int]:
    """Returns the value of `own` on each rank. With NCCL, this call also makes the group's communicator."""
    numbers = torch.empty(world_size, dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(numbers, torch.tensor([own], device=device))
    return numbers.tolist()


# -- requests as JSON values ------------------------------------------------------------------------------


def _encode(requests: Iterable[Request]) -> bytes:
    return json.dumps([_as_plain(request) for request in requests]).encode()


def _as_plain(request: Request) -> list[Any]:
    region = request.region
    pieces = [[piece.local_offset, piece.shape, piece.global_offset] for piece in region.pieces]
    return [request.name, region.global_shape, region.local_shape, pieces, region.flat]


def _wanted_of(plain: Any) -> list[Wanted]:
    found = []
    for name, global_shape, local_shape, pieces, flat in plain:
        parts = tuple(Piece(tuple(local), tuple(shape), tuple(there)) for local, shape, there in pieces)
        region = Region(tuple(global_shape), tuple(local_shape), parts, (flat[0], flat[1]))
        found.append(Wanted(ShardKey(name, MODEL), region, file=name))
    return found


def _receive_wanted(other: int, nbytes: int, device: torch.device) -> list[Wanted]:
    data = torch.empty(nbytes, dtype=torch.uint8, device=device)
    _receive_into(data, other)
    return _wanted_of(json_bounds.loads(bytes(data.cpu().numpy()), json_bounds.MESSAGES))


def _device() -> torch.device:
    """Returns the device from whose memory the default group's backend sends."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
