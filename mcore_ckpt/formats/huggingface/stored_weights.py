"""Reads the tensors in the files of a HuggingFace folder, and dequantizes quantized tensors.

Only the codes of the wanted elements and the scales of their blocks are read, a limited number of bytes at a time.

One formula serves all forms: the value of the code times the scale of its block is computed in float32, and rounded
once to the dtype of the model. In the form `compressed-tensors`, the product is first rounded to the dtype of the
scales, as the library of this name does. So the values equal the values in transformers bit for bit. transformers
refuses tensors with smaller blocks at the end, but this module reads such tensors. C++ computes the product
(`csrc/dequantize.cpp`) with a table of 256 values for each block, because torch converts only 0.2 billion float8
numbers a second to float32, a tenth of what the disk delivers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from mcore_ckpt.formats.contract import ReadTarget, ReadTargets, TensorInfo
from mcore_ckpt.formats.huggingface.quantized import ACTIVATION_SCALES, CodeKind, QuantizedTensor, logical_tensors
from mcore_ckpt.formats.huggingface.safetensors_files import HfStored
from mcore_ckpt.formats.native.ranges import read_stored
from mcore_ckpt.formats.shard_reader import ShardReader
from mcore_ckpt.io import _native, tuning
from mcore_ckpt.io.batches import batches
from mcore_ckpt.models.accounting import OF_ACTIVATIONS, SCALES, LeftOut
from mcore_ckpt.models.config_fields import HfConfig
from mcore_ckpt.sharding.overlap import Rows
from mcore_ckpt.sharding.plan import MODEL, ReadRange, ShardKey, StoredShard
from mcore_ckpt.sharding.regions import Region

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# A scale that is a power of two is stored as its exponent, in one byte and with this offset (OCP MX Formats, 1.0).
_EXPONENT_OFFSET = 127


class StoredWeights:
    """The tensors of a HuggingFace folder.

    Attributes:
        tensors: all tensors by name, as if none of them were quantized. A quantized tensor has the file, offset and
            size of its codes.

    See `logical_tensors` for the arguments and errors.
    """

    def __init__(
        self, folder: Path, config: HfConfig, stored: Mapping[str, HfStored], dtype: torch.dtype | None = None
    ) -> None:
        self._folder = folder
        self.tensors, self._quantized = logical_tensors(config, stored, dtype)
        self._stored = stored
        self._starts: dict[str, list[tuple[int, QuantizedTensor]]] = {}
        for tensor in sorted(self._quantized.values(), key=lambda each: each.values.offset):
            self._starts.setdefault(tensor.values.path.name, []).append((tensor.values.offset, tensor))

    def shard(self, key: ShardKey, region: Region, tensor: HfStored, start: int = 0) -> StoredShard:
        """Describes the elements of a tensor from element `start` on as the shard that holds `region`."""
        quantized = self._quantized.get(tensor.name)
        bits = tensor.dtype.itemsize * 8 if quantized is None else quantized.bits
        dtype = str(tensor.dtype).removeprefix("torch.")
        at, nbytes = tensor.offset + start * bits // 8, region.numel * bits // 8
        return StoredShard(key, region, dtype, tensor.path.name, at, nbytes, crc32=None)

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """The stored tensors that are neither values nor codes, by reason."""
        if not self._quantized:
            return ()
        scales = {each.scales.name for each in self._quantized.values()} | {f"{name}_shape" for name in self._quantized}
        found = {
            SCALES: [name for name in self._stored if name in scales],
            OF_ACTIVATIONS: [name for name in self._stored if name.endswith(ACTIVATION_SCALES)],
        }
        return tuple(LeftOut(reason, tuple(names)) for reason, names in found.items() if names)

    @property
    def scale_files(self) -> frozenset[str]:
        """The names of the files that have scales. Codes may be in other files than their scales."""
        return frozenset(tensor.scales.path.name for tensor in self._quantized.values())

    def whole(self, name: str) -> StoredShard:
        """Describes a whole tensor as a shard under its own name."""
        tensor = self.tensors[name]
        return self.shard(ShardKey(name, MODEL), Region.whole(tensor.shape), tensor)

    def read(self, reads: Sequence[ReadTarget]) -> int:
        """Fills tensors with ranges of shards, and returns the number of bytes read from files.

        Args:
            reads: the ranges, each with the tensor to fill: contiguous, of the shard's dtype, on the CPU or on a GPU.

        Raises CheckpointCorruptError: a file is missing, truncated or cannot be read.
        """
        plain: list[ReadTarget] = []
        parts: list[_Part] = []
        for read, memory in reads:
            found = self._find(read.stored)
            if found is None:
                plain.append((read, memory))
            else:
                parts += _parts(*found, read, memory)
        nbytes = read_stored(self._folder, plain) if plain else 0
        by_size = batches(parts, lambda part: part.nbytes, tuning.CONVERT_BYTES)
        return nbytes + sum(_read_parts(self._folder, batch) for batch in by_size)

    def _find(self, shard: StoredShard) -> tuple[QuantizedTensor, int] | None:
        """Returns the quantized tensor that a shard belongs to, and the shard's first element in it."""
        starts = self._starts.get(Path(shard.file).name, [])
        number = bisect_right(starts, shard.offset, key=lambda start: start[0]) - 1
        if number < 0:
            return None
        offset, tensor = starts[number]
        inside = shard.offset - offset
        return (tensor, inside * 8 // tensor.bits) if inside < tensor.values.nbytes else None


class DequantizingReader(ShardReader):
    """Reads a HuggingFace folder under its own names, as if none of its tensors were quantized."""

    def __init__(self, folder: Path, config: HfConfig, stored: Mapping[str, HfStored]) -> None:
        self._weights = weights = StoredWeights(folder, config, stored)
        self.left_out = weights.left_out
        infos = {name: TensorInfo(tensor.dtype, tensor.shape) for name, tensor in weights.tensors.items()}
        super().__init__(folder, infos, lambda name: (weights.whole(name),))

    def read(self, ranges: ReadTargets, check: bool = True) -> int:
        return self._weights.read(list(ranges))


# -- parts of matrices -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Part:
    """Some rows and columns of one matrix of codes, and the memory for their values.

    Attributes:
        matrix: the number of the matrix in the tensor.
        rows, columns: the number of the first row or column, and the number after the last.
        destination: the element of `memory` that gets the first value.
        stride: the distance between two rows of values in `memory`, in elements.
    """

    tensor: QuantizedTensor
    matrix: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    memory: torch.Tensor
    destination: int
    stride: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    @property
    def target(self) -> torch.Tensor:
        """The part of `memory` that gets the values, in the order of the codes."""
        strides = (1, self.stride) if self.tensor.is_transposed else (self.stride, 1)
        return self.memory.as_strided(self.shape, strides, int(self.memory.storage_offset()) + self.destination)

    @property
    def lead(self) -> int:
        """The number of codes that come before the first column's code in the same byte."""
        return self.columns[0] * self.tensor.bits % 8 // self.tensor.bits

    @property
    def byte_columns(self) -> tuple[int, int]:
        """In a row of codes, the first byte that has some of the columns, and the byte after the last such byte."""
        return self.columns[0] * self.tensor.bits // 8, -(-self.columns[1] * self.tensor.bits // 8)

    @property
    def nbytes(self) -> int:
        start, stop = self.byte_columns
        return (stop - start) * self.shape[0]


def _parts(tensor: QuantizedTensor, first: int, read: ReadRange, memory: torch.Tensor) -> Iterator[_Part]:
    """Cuts a range into parts of matrices, each of at most CONVERT_BYTES of codes; a longer row is a part by itself."""
    rows = read.rows
    height, width = tensor.matrix if not tensor.is_transposed else tensor.matrix[::-1]
    start, stride = first + rows.start, rows.source_stride
    if rows.rows > 1 and stride == width and start % width + rows.row <= width:
        whole = [(start, rows.row, rows.rows, rows.destination, rows.destination_stride)]
    else:
        whole = list(_runs(start, rows, width))
    step = max(1, tuning.CONVERT_BYTES // width)
    for at, length, count, destination, target_stride in whole:
        done = 0
        while done < count:
            row, column = divmod(at + done * width, width)
            matrix, row = divmod(row, height)
            taken = min(count - done, height - row, step)
            box = (row, row + taken), (column, column + length)
            lines, columns = box[::-1] if tensor.is_transposed else box
            yield _Part(tensor, matrix, lines, columns, memory, destination + done * target_stride, target_stride)
            done += taken


def _runs(start: int, rows: Rows, width: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Cuts rows of elements at the ends of the matrix's rows.

    Yields, for each part: its first element, the length and the number of its rows, its place in the memory, and the
    distance, in elements, between its rows in the memory.
    """
    for number in range(rows.rows):
        at, destination = start + number * rows.source_stride, rows.destination + number * rows.destination_stride
        end = at + rows.row
        while at < end:
            whole = (end - at) // width if at % width == 0 else 0
            length = width if whole else min(width - at % width, end - at)
            yield at, length, max(1, whole), destination, length
            at, destination = at + length * max(1, whole), destination + length * max(1, whole)


# -- reading and computing ---------------------------------------------------------------------------------


def _read_parts(folder: Path, parts: Sequence[_Part]) -> int:
    codes = [torch.empty(part.nbytes, dtype=torch.uint8) for part in parts]
    scales = [torch.empty(_scale_rows(part)[1], part.tensor.grid[1], dtype=_as_bytes(part)) for part in parts]
    reads = [_codes_read(part, memory) for part, memory in zip(parts, codes, strict=True)]
    reads += [_scales_read(part, memory) for part, memory in zip(parts, scales, strict=True)]
    nbytes = read_stored(folder, reads)
    for part, its_codes, its_scales in zip(parts, codes, scales, strict=True):
        _compute(part, its_codes, _as_float32(its_scales))
    return nbytes


def _as_bytes(part: _Part) -> torch.dtype:
    # Read powers of two as uint8, because `checkpoint.dtypes` has no dtype for them. This is safe, because a read
    # depends only on the size of an element.
    dtype = part.tensor.scales.dtype
    return torch.uint8 if dtype == torch.float8_e8m0fnu else dtype


def _scale_rows(part: _Part) -> tuple[int, int]:
    """Returns the rows of scales that a part needs: the first row, and the number of rows.

    The first row is counted from 0 in the scales of the part's matrix.
    """
    height = part.tensor.block[0]
    first = part.rows[0] // height
    return first, -(-part.rows[1] // height) - first


def _codes_read(part: _Part, memory: torch.Tensor) -> ReadTarget:
    stored, (height, width) = part.tensor.values, part.tensor.matrix
    line = width * part.tensor.bits // 8
    start, stop = part.byte_columns
    first = (part.matrix * height + part.rows[0]) * line + start
    rows = Rows(first, 0, stop - start, part.shape[0], line, stop - start)
    return ReadRange(_bytes_of(stored, torch.uint8), rows), memory


def _scales_read(part: _Part, memory: torch.Tensor) -> ReadTarget:
    (height, width), (first, count) = part.tensor.grid, _scale_rows(part)
    rows = Rows((part.matrix * height + first) * width, 0, count * width)
    return ReadRange(_bytes_of(part.tensor.scales, memory.dtype), rows), memory


def _bytes_of(stored: HfStored, dtype: torch.dtype) -> StoredShard:
    region = Region.whole((stored.nbytes // dtype.itemsize,))
    name = str(dtype).removeprefix("torch.")
    return StoredShard(ShardKey(stored.name, MODEL), region, name, stored.path.name, stored.offset, stored.nbytes, None)


def _as_float32(scales: torch.Tensor) -> torch.Tensor:
    if scales.dtype == torch.uint8:
        # The exponent 255 stands for NaN.
        return torch.exp2(scales.to(torch.float32) - _EXPONENT_OFFSET).masked_fill_(scales == 255, torch.nan)
    return scales.to(torch.float32)


def _compute(part: _Part, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Computes the values of a part and writes them to its memory."""
    target = part.target
    rounded = part.tensor.computed or target.dtype
    dtype = rounded if rounded == torch.bfloat16 else torch.float32
    lead = part.lead
    is_direct = target.dtype == dtype and target.device.type == "cpu" and target.stride(1) == 1 and not lead
    values = target if is_direct else torch.empty(part.shape[0], lead + part.shape[1], dtype=dtype)
    table = _table(part.tensor.kind)
    start, stop = part.byte_columns
    block_rows, block_columns = part.tensor.block
    _native.dequantize(
        codes=codes.data_ptr(),
        row_bytes=stop - start,
        bits=part.tensor.bits,
        rows=part.shape[0],
        columns=values.shape[1],
        first_row=part.rows[0] - _scale_rows(part)[0] * block_rows,
        first_column=part.columns[0] - lead,
        table=table.data_ptr(),
        scales=scales.data_ptr(),
        scale_rows=scales.shape[0],
        row_scales=scales.shape[1],
        block_rows=block_rows,
        block_columns=block_columns,
        values=values.data_ptr(),
        row_elements=values.stride(0),
        bfloat16=dtype == torch.bfloat16,
        threads=tuning.HOST_THREADS,
    )
    if not is_direct:
        target.copy_(values[:, lead:].to(rounded))


@lru_cache
def _table(kind: CodeKind) -> torch.Tensor:
    """Returns the float32 value of each code."""
    if kind == "float4_e2m1":
        return torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    if kind in ("packed_int4", "packed_int8"):
        half = 8 if kind == "packed_int4" else 128
        return torch.arange(-half, half, dtype=torch.float32)
    return torch.arange(256, dtype=torch.int16).to(torch.uint8).view(getattr(torch, kind)).to(torch.float32)
