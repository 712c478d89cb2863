"""A HuggingFace folder rewritten as a checkpoint, without a model: what both formats have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from mcore_ckpt.checkpoint.dtypes import torch_dtype
from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.formats.huggingface.assets import check_code
from mcore_ckpt.formats.huggingface.reader import FolderContents, HuggingFaceReader, all_of, read_contents
from mcore_ckpt.models.mcore_config import to_mcore_config
from mcore_ckpt.ranks.rounds import Agreement, Record, decide
from mcore_ckpt.sharding.cuts import Cut
from mcore_ckpt.sharding.plan import MODEL
from mcore_ckpt.sharding.regions import Region

Progress = Callable[[int, int], None]
"""Told of bytes that this process has written, and of how many it will write."""


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did.

    Attributes:
        source, path: the folders.
        model: what was converted, in words.
        nbytes: of all tensors' bytes that were written, by all processes.
        seconds: from the call to the last agreement.
    """

    source: Path
    path: Path
    model: str
    nbytes: int
    seconds: float


def open_folder(agreement: Agreement, source: Path, ignore: Sequence[str] = ()) -> HuggingFaceReader:
    """The folder, on all processes; each must see it. `ignore`: regular expressions of names to leave out.

    Raises:
        CheckpointError: as `HuggingFaceReader` and `read_contents`; on all alike.
    """
    contents = FolderContents.from_record(
        source, decide(agreement, f"opening {source}", dict, lambda _: read_contents(source).to_record())
    )
    found: list[HuggingFaceReader] = []

    def work() -> Record:
        found.append(HuggingFaceReader(contents, ignore))
        found[0].check_visible(contents.sizes)
        return {}

    def combine(_: Sequence[Record]) -> Record:
        found[0].check_left_out()
        check_code(source, found[0].model.config)
        if found[0].model.architecture.rules:
            # A model that megatron cannot compute: not after hours, by the trainer.
            to_mcore_config(found[0].model)
        return {}

    decide(agreement, f"checking {source}", work, combine)
    return found[0]


def whole_region(reader: HuggingFaceReader, name: str) -> Region:
    """A global tensor, in the pieces that megatron's own region of it has where nothing is cut."""
    shape = reader.parts_of(name)[0].region.global_shape
    sections = tuple(section.rows for section in reader.sections_of(name))
    if ".linear_fc1." in name:
        # Gate and up are cut apart (`apply_swiglu_sharded_factory`); all models here have gated linear units.
        sections = (1, 1)
    return Cut(0, sections).region(shape, 0, 1) if sections else Region.whole(shape)


def check_written(reader: HuggingFaceReader, names: Iterable[str], read: Callable[[str, Region], torch.Tensor]) -> None:
    """Compares what was written with the folder, bit for bit, a stored tensor at a time.

    Args:
        reader: the folder.
        names: of the tensors to look at.
        read: a part of a written tensor, flattened.

    Raises:
        CheckpointMismatchError: it differs.
    """
    for name in names:
        for shard in reader.parts_of(name):
            wanted = torch.empty(prod(shard.region.local_shape), dtype=torch_dtype(shard.dtype))
            reader.read([(all_of(shard), wanted)])
            found = read(name, shard.region)
            if found.dtype != wanted.dtype or not torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)):
                raise CheckpointMismatchError(
                    f"tensor {name}, {shard.region.describe()}: what was written is not what {shard.file} holds "
                    f"({MODEL} of {reader.contents.folder})"
                )
