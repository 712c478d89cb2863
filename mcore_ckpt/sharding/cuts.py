"""Derives from a tensor's name how tensor parallelism cuts the tensor (megatron-core 0.16.1).

Tools and readers use this module, because they have no live model that could tell how its tensors are cut.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import gcd, prod

from mcore_ckpt.sharding.regions import Piece, Region, Shape
from mcore_ckpt.sharding.towers import is_replicated, may_be_replicated
from mcore_ckpt.sharding.vocabulary import has_vocabulary_rows

# Column-parallel linear layers have the axes {"weight": 0, "bias": 0} in their `sharded_state_dict`
# (ColumnParallelLinear, TEColumnParallelLinear, TELayerNormColumnParallelLinear). Row-parallel layers have the axes
# {"weight": 1}. The bias of a row-parallel layer is added after the sum over the ranks, so each rank has the whole
# bias. Grouped experts append the expert's number to "weight" and "bias" (TEColumnParallelGroupedLinear,
# TERowParallelGroupedLinear).
_COLUMN_LAYERS = (
    "linear_qkv",
    "linear_q",
    "linear_kv",
    "linear_q_proj",
    "linear_q_up_proj",
    "linear_kv_up_proj",
    "linear_fc1",
    "eh_proj",
)
_COLUMN = re.compile(rf"(?:.*\.)?(?:{'|'.join(_COLUMN_LAYERS)})\.(?:weight|bias)\d*")
_ROW = re.compile(r"(?:.*\.)?(?:linear_proj|linear_fc2)\.weight\d*")
# DotProductAttention and TEDotProductAttention have one softmax offset per attention head.
_PER_HEAD = re.compile(r"(?:.*\.)?core_attention\.softmax_offset")
# GatedDeltaNet is a layer's `self_attention`, and MambaMixer a layer's `mixer`. The sections of both mixers have
# different lengths (`_split_tensor_factory`), which are known only from the model or from the pieces that were saved.
# Mamba's norm (ExtendedRMSNorm) is cut, because it covers the output of a rank's heads. GatedDeltaNet's norm is not
# cut, because it covers one head.
_MIXER = r"(?:.*\.)?(?:self_attention|mixer)\."
_MIXER_SECTIONS = re.compile(rf"{_MIXER}(?:in_proj|conv1d)\.(?:weight|bias)")
_MIXER_PER_HEAD = re.compile(rf"{_MIXER}(?:A_log|dt_bias|D)|(?:.*\.)?mixer\.norm\.weight")
_MIXER_ROW = re.compile(rf"{_MIXER}out_proj\.weight")
# In MLASelfAttention, the transformer-engine spec duplicates the down projections on all ranks (`TELinear`), but the
# local spec cuts them (`ColumnParallelLinear`). Norms of queries and keys are whole on all ranks, except
# Megatron-Bridge's norms for MiniMax-M2, which cover all heads and are cut as the heads are.
_BY_SPEC = re.compile(r"(?:.*\.)?(?:linear_(?:q|kv)_down_proj|self_attention\.[qk]_layernorm)\.weight")
# Low-rank adapters are column-parallel layers, except A of a row-parallel layer (`ParallelLinearAdapter` of
# Megatron-Bridge). The magnitude of DoRA has one element per row of the weight. Under PEFT, A of a column-parallel
# layer and B of a row-parallel layer are whole on all ranks, because they lack the axis that the layer cuts.
_ADAPTER_ROW = re.compile(
    r".*\.(?:linear_proj|linear_fc2|out_proj)\.adapter\."
    r"(?:(?P<a>linear_in\.weight)|(?P<b>linear_out\.weight)|weight_magnitude)"
)
_ADAPTER_COLUMN = re.compile(r".*\.adapter\.(?:\w+\.)?(?:(?P<a>linear_in\.weight)|linear_out\.weight|weight_magnitude)")

_ONE = (1,)


@dataclass(frozen=True)
class Cut:
    """The cut of a tensor into equal parts, one per rank.

    Attributes:
        axis: the axis that is cut. None if each rank has the whole tensor.
        sections: the lengths of the sections along the axis, as proportions. Each section is cut separately. Gate and
            up of a gated linear unit are `(1, 1)` (`apply_swiglu_sharded_factory`). The queries, keys, values, ... of a
            GatedDeltaNet have different lengths (`_split_tensor_factory`). Each section is a separate piece even if
            nothing is cut.
    """

    axis: int | None
    sections: tuple[int, ...] = _ONE

    def region(self, shape: Shape, rank: int, size: int) -> Region:
        """Returns the part of a tensor of global shape `shape` that rank `rank` of `size` ranks has.

        Raises ValueError if the length of the axis, or of a section along it, cannot be divided by `size`.
        """
        axis, size, rank = (0, 1, 0) if self.axis is None else (self.axis, size, rank)
        if not shape or (size == 1 and len(self.sections) == 1):
            return Region.whole(shape)
        lengths = [length // size for length in self._lengths(shape, axis, size)]
        zeros = (0,) * len(shape)
        pieces = tuple(
            Piece(_at(zeros, axis, at), _at(shape, axis, length), _at(zeros, axis, at * size + rank * length))
            for at, length in zip(accumulate(lengths, initial=0), lengths, strict=False)
        )
        local = _at(shape, axis, sum(lengths))
        return Region(shape, local, pieces, (0, prod(local)))

    def _lengths(self, shape: Shape, axis: int, size: int) -> list[int]:
        """Returns the lengths of the sections of the global tensor along the axis."""
        unit, rest = divmod(shape[axis], sum(self.sections)) if axis < len(shape) else (0, 1)
        lengths = [unit * section for section in self.sections]
        if rest or any(length % size for length in lengths):
            sections = " + ".join(map(str, self.sections if rest else lengths))
            of = f" in {'proportions' if rest else 'sections'} of {sections}" if len(lengths) > 1 else ""
            raise ValueError(f"axis {axis} of shape {list(shape)}{of} cannot be divided by {size}")
        return lengths


def _at(shape: Shape, axis: int, value: int) -> Shape:
    return (*shape[:axis], value, *shape[axis + 1 :])


def axes_of(name: str) -> tuple[int | None, ...]:
    """Returns the axes along which tensor parallelism can cut a tensor, the likeliest first. None means "not cut".

    A tensor with an unknown name is assumed to be whole on every rank.

    Example:
        >>> axes_of("decoder.layers.0.mlp.experts.linear_fc2.weight3"), axes_of("decoder.final_layernorm.weight")
        ((1,), (None,))
    """
    if match := _ADAPTER_ROW.fullmatch(name):
        return (1,) if match["a"] else (0, None) if match["b"] else (None,)
    if match := _ADAPTER_COLUMN.fullmatch(name):
        return (0, None) if match["a"] else (0,)
    if is_replicated(name):
        return (None,)
    if may_be_replicated(name):
        return (*_axes_in_megatron(name), None)
    return _axes_in_megatron(name)


def _axes_in_megatron(name: str) -> tuple[int | None, ...]:
    if any(kind.fullmatch(name) for kind in (_COLUMN, _PER_HEAD, _MIXER_SECTIONS, _MIXER_PER_HEAD)):
        return (0,)
    if _ROW.fullmatch(name) or _MIXER_ROW.fullmatch(name):
        return (1,)
    if has_vocabulary_rows(name):
        return (0,)
    if _BY_SPEC.fullmatch(name):
        return (None, 0)
    return (None,)


def has_sections(name: str) -> bool:
    """Returns True if a tensor has sections whose lengths do not follow from its name.

    Each section must be cut separately.
    """
    return _MIXER_SECTIONS.fullmatch(name) is not None


def find_cut(name: str, seen: Mapping[int, Region], size: int, replicated: bool = False) -> Cut:
    """Finds the cut of a tensor from its name and from the regions that a checkpoint has.

    Args:
        name: the tensor's global name.
        seen: the regions of whole local tensors by tensor-parallel rank, for all ranks or for some of them.
        size: the tensor-parallel size of these regions.
        replicated: whether the tensor is known to be uncut. If so, its name is not used to find the axis.

    Raises ValueError if the regions contradict the name, or do not show where each section of the tensor begins.
    """
    first = next(iter(seen.values()))
    possible = (None,) if replicated else axes_of(name)
    cuts = [Cut(axis, _sections(first, axis)) for axis in possible]
    for cut in cuts:
        if all(_is_part(cut, region, rank, size) for rank, region in seen.items()):
            if len(cut.sections) == 1 and has_sections(name):
                raise ValueError(
                    f"it consists of sections that are cut separately (a mixer's queries, keys, values, ...), but "
                    f"{_describe(seen, size)}: the checkpoint does not show where each section begins. "
                    f"Keep the tensor-parallel size of {size}"
                )
            return cut
    expected = " or ".join("not cut" if cut.axis is None else f"cut along axis {cut.axis}" for cut in cuts)
    raise ValueError(f"by its name it is {expected}, but {_describe(seen, size)}")


def _sections(seen: Region, axis: int | None) -> tuple[int, ...]:
    """Returns the lengths of the sections as proportions in lowest terms, from the pieces that one rank has."""
    if axis is None or axis >= len(seen.global_shape):
        return _ONE
    lengths = [piece.shape[axis] for piece in seen.pieces]
    common = gcd(*lengths)
    return tuple(length // common for length in lengths) if common else _ONE * len(lengths)


def _is_part(cut: Cut, region: Region, rank: int, size: int) -> bool:
    try:
        return cut.region(region.global_shape, rank, size).same_local(region)
    except ValueError:
        return False


def _describe(seen: Mapping[int, Region], size: int) -> str:
    rank, region = next(iter(seen.items()))
    parts = ", ".join(f"{list(piece.shape)} at {list(piece.global_offset)}" for piece in region.pieces)
    return f"rank {rank} of {size} has {parts} of shape {list(region.global_shape)}"
