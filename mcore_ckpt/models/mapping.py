"""Applies an architecture's table to a model: lists every HuggingFace tensor with its elements' place in mcore."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from mcore_ckpt.errors import CheckpointMismatchError, UnsupportedError
from mcore_ckpt.models.accounting import COMPUTED, COPIES, IGNORED, LeftOut, Reason, account, matching, some_of
from mcore_ckpt.models.architecture import HfModel
from mcore_ckpt.models.low_rank import LowRank
from mcore_ckpt.models.table import Row, RowRange, Section, Table, ValueChange, shape_of
from mcore_ckpt.sharding.regions import Piece, Region, Shape
from mcore_ckpt.sharding.towers import split_language_model

_MCORE_LAYER = "decoder.layers.{layer}."
_MCORE_MTP = "mtp.layers.{layer}."
_MCORE_MTP_DECODER = "mtp.layers.{layer}.transformer_layer."
_MCORE_MTP_STACK = "mtp.layers.{layer}.mtp_model_layer.layers.{inner}."


@dataclass(frozen=True)
class Slab:
    """A contiguous range of elements of a HuggingFace tensor, all of which come from one mcore tensor.

    Attributes:
        start: the range's first element in the row-major HuggingFace tensor.
        mcore: the global name of the mcore tensor in megatron's local layer specs. The name is empty if the range
            contains only zeros.
        region: the elements of the mcore tensor that fill the range, in the order of the range. The region's global
            shape is the mcore tensor's shape, without padding of the vocabulary.
        change: the conversion of the values, or None if the values stay as they are. `change.to_hf` converts the
            region's elements, as a tensor of shape `region.local_shape`, to the range's elements.
        sections: the sections of the mcore tensor (see `Row`). Empty for a tensor without sections and for
            `linear_fc1`.
        low_rank: the adapter of the region's elements, which form a matrix. None if there is no adapter.
    """

    start: int
    mcore: str
    region: Region
    change: ValueChange | None = None
    sections: tuple[Section, ...] = ()
    low_rank: LowRank | None = None

    @property
    def numel(self) -> int:
        return self.region.numel


@dataclass(frozen=True)
class HfTensor:
    """One HuggingFace tensor and the consecutive slabs that fill it.

    `is_copy` is True if another HuggingFace tensor has the same elements.
    """

    name: str
    shape: Shape
    slabs: tuple[Slab, ...]
    is_copy: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)


def whole_tensor(name: str, source: str, shape: Shape, low_rank: LowRank | None = None) -> HfTensor:
    """Returns a HuggingFace tensor that equals one whole tensor of the source. `source` is the name of that tensor."""
    return HfTensor(name, shape, (Slab(0, source, Region.whole(shape), low_rank=low_rank),))


def hf_tensors(model: HfModel) -> list[HfTensor]:
    """Lists all HuggingFace tensors of a model: the embedding, then layer by layer, then final norm and head."""
    return [tensor for tensor, _ in _spelled_out(model, model.architecture.table)]


def hf_mtp_prefix(model: HfModel, number: int = 0) -> str:
    """Returns the beginning of the HuggingFace names of multi-token-prediction layer `number`, counted from 0."""
    table = model.architecture.table
    return table.hf_mtp_layer.format(hf=table.hf, layer=len(model.layers) + number, mtp=number)


def is_mtp(model: HfModel, name: str) -> bool:
    """Returns True if a HuggingFace tensor belongs to multi-token prediction."""
    return any(name.startswith(hf_mtp_prefix(model, number)) for number in range(len(model.mtp_layers)))


def hf_tensors_in(model: HfModel, names: Container[str]) -> list[HfTensor]:
    """Lists the tensors of a model in the form in which a folder stores them.

    `names` are the names of the tensors in the folder, or a mapping of these names to the tensors. If the folder stacks
    the experts of a layer in one tensor, the list has this tensor instead of one tensor per expert. If an architecture
    stacks experts in two ways under the same names (Qwen3-VL-MoE), the shapes in the mapping show which way the folder
    uses. The list contains no copies. It contains the tensors of multi-token prediction only if the folder has at least
    one such tensor.
    """
    found: list[HfTensor] = []
    classic = list(_spelled_out(model, model.architecture.table))
    shapes = {tensor.name: tensor.shape for tensor, _ in classic}
    only_stacked = replace(model.architecture.table, model=(), layer=model.architecture.table.stacked, mtp=())
    stacked = [tensor for tensor, _ in _spelled_out(model, only_stacked) if tensor.name in names]
    if not _are_as_stacked([(t, shapes[t.name]) for t in stacked if t.name in shapes], names):
        stacked = [tensor for tensor in stacked if tensor.name not in shapes]
    instead = {slab.mcore for tensor in stacked for slab in tensor.slabs}
    has_mtp = any(of_mtp and not tensor.is_copy and tensor.name in names for tensor, of_mtp in classic)
    for tensor, of_mtp in classic:
        replaced = any(slab.mcore in instead for slab in tensor.slabs)
        if not (replaced or tensor.is_copy or (of_mtp and not has_mtp)):
            found.append(tensor)
    return found + stacked


def check_names(
    model: HfModel, wanted: Sequence[HfTensor], found: Iterable[str], where: str, copies: Container[str] = ()
) -> tuple[LeftOut, ...]:
    """Accounts for all tensors of a folder, and returns the tensors that are left out for a reason.

    Args:
        wanted: the tensors that the folder must have, from `hf_tensors_in`.
        copies: the names of tensors that equal other tensors, as the caller has checked or will check.

    Raises CheckpointMismatchError: the folder lacks a wanted tensor, or has an unknown tensor that is not ignored.
    """
    names = set(found)

    def refusal(problem: str, affected: Sequence[str]) -> CheckpointMismatchError:
        return CheckpointMismatchError(f"{where}: {model.describe()} {problem} {some_of(affected, 5)}")

    if missing := [tensor.name for tensor in wanted if tensor.name not in names]:
        raise refusal("lacks", missing)
    # Here only `is_copy` makes a tensor a copy. If a folder has experts both stacked and one by one, the separate
    # experts are neither wanted nor copies. So they are refused, and not dropped silently.
    in_table = {tensor.name for tensor in hf_tensors(model) if tensor.is_copy}
    reasons: list[Reason] = [
        matching(IGNORED, model.ignored_by_user),
        matching(COMPUTED, model.architecture.table.ignored),
        (COPIES, lambda name: name in in_table or name in copies),
    ]
    written = {tensor.name for tensor in wanted}
    return account(sorted(names), written, reasons, lambda lost: refusal("has unknown tensors:", lost))


def _are_as_stacked(tensors: Sequence[tuple[HfTensor, Shape]], names: Container[str]) -> bool:
    """Returns True if a folder stores `tensors` in the form of `Table.stacked`, and False for the other form.

    The names are the same in both forms, so the shapes decide. All tensors are looked at, because some tensors can have
    the same shape in both forms. `tensors` has each stacked tensor with its shape in the other form. `names` maps the
    names in the folder to the folder's tensors. If `names` is not a mapping, the form is unknown, and the result is
    False.
    """
    if not isinstance(names, Mapping):
        return False
    found: dict[bool, str] = {}
    for tensor, classic in tensors:
        stored: Any = names[tensor.name]
        shape = tuple(getattr(stored, "shape", stored))
        if tensor.shape != classic and shape in (tensor.shape, classic):
            found.setdefault(shape == tensor.shape, tensor.name)
    if len(found) > 1:
        raise CheckpointMismatchError(
            f"tensors {found[True]} and {found[False]}: have different forms, so the folder mixes files of two "
            "versions of transformers: take all files from one version"
        )
    return True in found


def _spelled_out(model: HfModel, table: Table) -> list[tuple[HfTensor, bool]]:
    try:
        return list(_spell_out(model, table))
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise UnsupportedError(
            f"config.json: the sizes of this {model.describe()} contradict each other: {error}"
        ) from None


def _spell_out(model: HfModel, table: Table) -> Iterator[tuple[HfTensor, bool]]:
    """Yields pairs of a tensor and whether the tensor belongs to multi-token prediction."""
    first = [row for row in table.model if not _is_last(row)]
    last = [row for row in table.model if _is_last(row)]
    for row in first:
        yield from ((tensor, False) for tensor in _outside_layers(model, row))
    for number, kind in enumerate(model.layers):
        for row in table.layer:
            names = table.mcore + _MCORE_LAYER.format(layer=number), table.hf_layer.format(hf=table.hf, layer=number)
            yield from ((tensor, False) for tensor in _row(model, row, model.facts | kind, *names))
    last_of_stack = model.known.mtp_stack - 1
    for number, kind in enumerate(model.mtp_layers):
        depth, inner = divmod(number, model.known.mtp_stack)
        ends = {word for word, place in (("first", 0), ("last", last_of_stack)) if place == inner}
        facts, hf = model.facts | kind | ends, hf_mtp_prefix(model, number)
        layer = (_MCORE_MTP_STACK if table.is_hybrid else _MCORE_MTP_DECODER).format(layer=depth, inner=inner)
        names = table.mcore + layer, hf + table.hf_mtp_decoder.format(mtp=depth)
        for row in table.layer:
            yield from ((tensor, True) for tensor in _row(model, row, facts, *names))
        for row in table.mtp:
            mcore = table.mcore + ("" if row.is_copy else _MCORE_MTP.format(layer=depth))
            yield from ((tensor, True) for tensor in _row(model, row, facts, mcore, hf))
    for row in last:
        yield from ((tensor, False) for tensor in _outside_layers(model, row))


def _is_last(row: Row) -> bool:
    return not split_language_model(row.mcore)[1].startswith("embedding.")


def _outside_layers(model: HfModel, row: Row) -> Iterator[HfTensor]:
    if not row.per:
        yield from _row(model, row, model.facts, "", "")
        return
    for number in range(model.sizes[row.per] if row.applies(model.facts) else 0):
        hf = {name.replace("{number}", str(number)): words for name, words in row.hf.items()}
        one = replace(row, mcore=row.mcore.replace("{number}", str(number)), hf=hf)
        yield from _row(model, one, model.facts, "", "")


def _row(model: HfModel, row: Row, facts: frozenset[str], mcore: str, hf: str) -> Iterator[HfTensor]:
    if not row.applies(facts):
        return
    names = [hf + name for name in row.hf]
    shapes = [shape_of(words, model.sizes) for words in row.hf.values()]
    if not row.mcore:
        for name, shape in zip(names, shapes, strict=True):
            yield whole_tensor(name, "", shape)
    elif "{expert}" not in row.mcore:
        yield from _filled(model, row, mcore + row.mcore, names, shapes)
    elif all("{expert}" in name for name in names):
        for expert in range(model.sizes["experts"]):
            of_expert = [name.format(expert=expert) for name in names]
            yield from _filled(model, row, (mcore + row.mcore).format(expert=expert), of_expert, shapes)
    else:
        yield from _filled(model, row, mcore + row.mcore, names, shapes, is_stacked=True)


def _filled(
    model: HfModel, row: Row, mcore: str, names: Sequence[str], shapes: Sequence[Shape], is_stacked: bool = False
) -> Iterator[HfTensor]:
    """Yields the HuggingFace tensors of a row.

    With `is_stacked`, each tensor has all experts, and `mcore` has `{expert}`.
    """
    of_one = [shape[1:] for shape in shapes] if is_stacked else shapes
    regions = _regions(row, row.transform(model.sizes, of_one), of_one)
    sections = tuple(Section(name, *shape_of(rows, model.sizes)) for name, rows in row.sections.items())
    for name, shape, region in zip(names, shapes, regions, strict=True):
        sources = [mcore.format(expert=expert) for expert in range(shape[0])] if is_stacked else [mcore]
        slabs = (Slab(n * region.numel, source, region, row.change, sections) for n, source in enumerate(sources))
        yield HfTensor(name, shape, tuple(slabs), row.is_copy)


def _regions(row: Row, ranges: Sequence[RowRange], shapes: Sequence[Shape]) -> list[Region]:
    """Returns, for each HuggingFace tensor, the region that its rows fill in the mcore tensor."""
    if row.change is not None and len(shapes) == 1:
        # A change of values can also move values, so the region is the whole mcore tensor.
        return [Region.whole(tuple(row.change.to_mcore(torch.empty(shapes[0], device="meta")).shape))]
    rest = shapes[0][1:]
    global_shape = (sum(part.rows for part in ranges), *rest)
    pieces: list[list[Piece]] = [[] for _ in shapes]
    at = 0
    for part in ranges:
        zeros = (0,) * len(rest)
        pieces[part.source].append(Piece((part.start, *zeros), (part.rows, *rest), (at, *zeros)))
        at += part.rows
    regions = []
    for shape, own in zip(shapes, pieces, strict=True):
        region = Region(
            global_shape, shape, tuple(_joined(sorted(own, key=lambda p: p.local_offset))), (0, prod(shape))
        )
        region.check()
        regions.append(region)
    return regions


def _joined(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Joins pieces that are adjacent both in the HuggingFace tensor and in the mcore tensor."""
    last: Piece | None = None
    for piece in pieces:
        if last is not None:
            gap = (piece.local_offset[0] - last.local_offset[0], piece.global_offset[0] - last.global_offset[0])
            if gap == (last.shape[0], last.shape[0]):
                last = Piece(last.local_offset, (last.shape[0] + piece.shape[0], *last.shape[1:]), last.global_offset)
                continue
            yield last
        last = piece
    if last is not None:
        yield last
