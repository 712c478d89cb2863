"""Defines the read contract and the write contract.

A reader lists a checkpoint's tensors, locates their shards, and reads ranges of them. A writer lists the files of the
checkpoint or model that it will write, and each call of `write` writes some of them.

Each kind of checkpoint has one reader, in `native/`, `huggingface/`, `torch_dist/`, `verl_ranks/` or `fsdp/`. Through
the read contract, `merge` and `test` read every kind, `load` and `reshard` read native checkpoints, `load_hf` reads
HuggingFace folders, and `convert` reads native checkpoints and HuggingFace folders. `locate.py` also uses the read
contract, to find the stored ranges that make up a wanted region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from mcore_ckpt.ranks.topology import RankCoordinates, Topology
from mcore_ckpt.sharding.plan import ReadRange, ShardKey, StoredShard
from mcore_ckpt.sharding.regions import Region, Shape

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TensorInfo:
    """The dtype and the global shape of a tensor. The shape includes the padding of a vocabulary."""

    dtype: torch.dtype
    shape: Shape

    @property
    def dtype_name(self) -> str:
        """The dtype's name without "torch."."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def text(self) -> str:
        """The dtype and the shape, as people read them.

        Example:
            >>> TensorInfo(torch.bfloat16, (4, 64)).text
            'bfloat16 4x64'
        """
        return f"{self.dtype_name} {'x'.join(map(str, self.shape))}".rstrip()


@dataclass(frozen=True)
class RankPosition:
    """The topology and the coordinates of the rank that reads."""

    topology: Topology
    coordinates: RankCoordinates


@dataclass(frozen=True)
class RegionRead:
    """A region of a model's tensor, and the memory to read it into.

    Attributes:
        name: the tensor's name in the reader's `names`.
        region: the elements to read. The region's global shape may have fewer vocabulary rows than the stored tensor.
        memory: the CPU tensor to fill. It is contiguous, and has the stored dtype and as many elements as the region.
    """

    name: str
    region: Region
    memory: torch.Tensor


ReadTarget: TypeAlias = "tuple[ReadRange, torch.Tensor]"
"""A range of a stored shard, and the tensor to fill: contiguous, of the stored dtype, on the CPU or on a GPU."""

ReadTargets: TypeAlias = Iterable[ReadTarget]

Read: TypeAlias = "Callable[[Sequence[ReadTarget]], int]"
"""The type of `CheckpointReader.read`, which fills tensors and returns the number of bytes read."""


class CheckpointReader(Protocol):
    """Reads one checkpoint, whichever program wrote it.

    A checkpoint stores one or several kinds of shards under each name: `MODEL` is the model's tensor; `PARAM`,
    `exp_avg`, ... are the optimizer's state of this tensor (see `sharding.plan`). Names follow Megatron's layer specs,
    except that `DequantizingReader` and the reader of `open_fsdp` keep HuggingFace's names.
    """

    @property
    def place(self) -> Path | str:
        """The folder or URL of the checkpoint, for messages."""

    @property
    def names(self) -> Mapping[str, int]:
        """Maps the name of each tensor to its position in a list of all tensors. All ranks have the same list."""

    @property
    def weight_kind(self) -> str:
        """The kind of shards that holds the weights: MODEL, or PARAM if the optimizer was saved without the model."""

    def info(self, key: ShardKey) -> TensorInfo | None:
        """Returns the dtype and the global shape of a tensor, or None if the checkpoint does not have the tensor.

        Raises:
            CheckpointCorruptError: the file that describes the tensor is missing or damaged.
        """

    def kinds(self, name: str, position: RankPosition | None = None) -> tuple[str, ...]:
        """Returns the stored kinds of a tensor's optimizer state. Opens the files of ranks near `position` first."""

    def parts(self, key: ShardKey, position: RankPosition | None = None) -> Iterator[Sequence[StoredShard]]:
        """Yields sets of the tensor's stored shards. Each set contains the previous one.

        The first set comes from the files of the ranks nearest to `position`, the last set from the files of all ranks.
        A caller stops at the first set that covers the caller's region. So only a few files are opened, even if a
        thousand ranks saved the checkpoint.

        Raises:
            CheckpointCorruptError: an index is missing, truncated or damaged.
        """

    def tp_size(self, expert: bool) -> int:
        """Returns the tensor-parallel size under which the model was saved; with `expert`, the size for its experts.

        Readers of other programs' checkpoints return 1.
        """

    def read(self, ranges: ReadTargets, check: bool = True) -> int:
        """Fills tensors with ranges of stored shards, on several threads, and returns the number of bytes read.

        Args:
            ranges: the ranges to read, each with the tensor that it fills.
            check: whether to check the CRC of each block before its bytes are used. Only native checkpoints have CRCs.

        Raises:
            CheckpointCorruptError: a block is damaged, or a file is missing or truncated. By then, intact blocks may
                have been copied.
        """


def weights_of(reader: CheckpointReader) -> dict[str, TensorInfo]:
    """Lists all weights of a checkpoint by name.

    Raises:
        CheckpointCorruptError: an index is missing, truncated or damaged.
    """
    found = ((name, reader.info(ShardKey(name, reader.weight_kind))) for name in reader.names)
    return {name: info for name, info in found if info is not None}


@dataclass(frozen=True)
class FileToWrite:
    """A file that a writer will write.

    Attributes:
        name: the file's path, relative to the folder that the writer writes.
        nbytes: the number of bytes of tensors or other data in the file. The file itself may be larger.
    """

    name: str
    nbytes: int


@dataclass(frozen=True)
class FileReport:
    """A process's report on a file that the process has written.

    Attributes:
        number: the file's index in the writer's `files`.
        size: the size of the file in bytes.
        details: plain JSON values about the file, for the writer's `finish`.
    """

    number: int
    size: int
    details: Any = None


class CheckpointWriter(Protocol):
    """Writes one checkpoint or model into a folder, with the bytes that a reader delivers.

    Several processes can share the work. Each process has a writer with the same `files`, and calls `write` for some of
    these files. When all files are there, one process calls `finish`. Then each process can `check` a part.
    """

    @property
    def files(self) -> Sequence[FileToWrite]:
        """The files to write. `finish` adds some small files."""

    def write(self, numbers: Sequence[int], folder: Path, progress: Callable[[int], None]) -> Sequence[FileReport]:
        """Writes the files with these indices in `files` durably; their directory entries need not be durable yet.

        The memory that `write` needs does not grow with the size of the files.

        Args:
            folder: the folder to write into. It exists, and has none of these files.
            progress: a function that is called with the number of bytes written since the last call.

        Raises:
            CheckpointError: the source is damaged, or writing was stopped.
            OSError: a file could not be written.
        """

    def finish(self, reports: Sequence[FileReport], folder: Path) -> None:
        """Adds the files that complete the folder: an index, a manifest, a configuration. All of `files` must be there.

        Args:
            reports: the reports that `write` has returned on all processes, in the order of the processes.

        Raises:
            CheckpointError, OSError: a file could not be read or written.
        """

    def check(self, folder: Path, part: int, parts: int) -> None:
        """Compares one of `parts` parts of a finished folder with the source, bit for bit. `part` counts from 0.

        Raises:
            CheckpointMismatchError: the bits differ.
            CheckpointCorruptError: the folder or the source cannot be read.
        """
