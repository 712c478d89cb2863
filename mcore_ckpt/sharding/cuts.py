"""How tensor parallelism cuts each tensor, by name: for where there is no model to ask (megatron-core 0.16.1)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from mcore_ckpt.sharding.regions import Piece, Region, Shape
from mcore_ckpt.sharding.vocabulary import has_vocabulary_rows

# Linear layers, by what follows their name. Those that are column-parallel say {"weight": 0, "bias": 0} in their
# `sharded_state_dict` (ColumnParallelLinear, TEColumnParallelLinear, TELayerNormColumnParallelLinear), those that are
# row-parallel {"weight": 1}: their bias is added after the sum, so each rank has all of it. Grouped experts have the
# expert's number behind the word (TEColumnParallelGroupedLinear, TERowParallelGroupedLinear).
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
# DotProductAttention and TEDotProductAttention: one number per attention head.
_PER_HEAD = re.compile(r"(?:.*\.)?core_attention\.softmax_offset")
# `TELinear` duplicates these, the local layer specs have a ColumnParallelLinear in its place (MLASelfAttention).
_BY_SPEC = re.compile(r"(?:.*\.)?linear_(?:q|kv)_down_proj\.weight")
# Their parts have lengths of their own (`_split_tensor_factory` of MambaMixer and GatedDeltaNet), which only the model
# knows.
_STATE_SPACE = re.compile(r"(?:.*\.)?(?:in_proj|conv1d)\.(?:weight|bias)|(?:.*\.)?(?:A_log|dt_bias|mixer\.D)")


@dataclass(frozen=True)
class Cut:
    """A tensor is cut along `axis` into equal parts, one per rank; None: each rank has all of it.

    `sections`: how many tensors lie one behind the other in it, each cut by itself: gate and up of a gated linear unit
    are two (`apply_swiglu_sharded_factory`). They are told apart even where nothing is cut.
    """

    axis: int | None
    sections: int = 1

    def region(self, shape: Shape, rank: int, size: int) -> Region:
        """What one of `size` ranks has of a tensor of global `shape`.

        Raises:
            ValueError: the axis does not divide.
        """
        axis, size, rank = (0, 1, 0) if self.axis is None else (self.axis, size, rank)
        if not shape or (size, self.sections) == (1, 1):
            return Region.whole(shape)
        length, rest = divmod(shape[axis], size * self.sections) if axis < len(shape) else (0, 1)
        if rest:
            of = f"{self.sections} x " if self.sections > 1 else ""
            raise ValueError(f"axis {axis} of shape {list(shape)} cannot be divided by {of}{size}")
        part = _at(shape, axis, length)
        pieces = tuple(
            Piece(
                _at((0,) * len(shape), axis, section * length),
                part,
                _at((0,) * len(shape), axis, section * length * size + rank * length),
            )
            for section in range(self.sections)
        )
        local = _at(shape, axis, length * self.sections)
        return Region(shape, local, pieces, (0, prod(local)))


def _at(shape: Shape, axis: int, value: int) -> Shape:
    return (*shape[:axis], value, *shape[axis + 1 :])


def axes_of(name: str) -> tuple[int | None, ...]:
    """Along which axis tensor parallelism cuts a tensor: those that are possible, the likeliest first.

    A name this does not know is one of a tensor that every rank has.

    Example:
        >>> axes_of("decoder.layers.0.mlp.experts.linear_fc2.weight3"), axes_of("decoder.final_layernorm.weight")
        ((1,), (None,))
    """
    if _COLUMN.fullmatch(name) or _PER_HEAD.fullmatch(name):
        return (0,)
    if _ROW.fullmatch(name):
        return (1,)
    if has_vocabulary_rows(name):
        return (0,)
    if _BY_SPEC.fullmatch(name):
        return (None, 0)
    return (None,)


def is_state_space(name: str) -> bool:
    """Whether a tensor is one of a Mamba or gated-delta-net mixer, whose cut is not known without the model."""
    return _STATE_SPACE.fullmatch(name) is not None


def find_cut(name: str, seen: Mapping[int, Region], size: int, replicated: bool = False) -> Cut:
    """The cut of a tensor, by its name and by what a checkpoint shows of it.

    Args:
        name: its global name.
        seen: whole local regions, by tensor-parallel rank: of all ranks, or of some.
        size: the tensor-parallel size they are of.
        replicated: it is known that this one is not cut, whatever its name says.

    Raises:
        ValueError: what is seen is not what the name says.
    """
    first = next(iter(seen.values()))
    sections = len(first.pieces)
    possible = (None,) if replicated else axes_of(name)
    cuts = [Cut(axis, sections if axis is not None else 1) for axis in possible]
    for cut in cuts:
        if all(_is_part(cut, region, rank, size) for rank, region in seen.items()):
            return cut
    said = " or ".join("not cut" if cut.axis is None else f"cut along axis {cut.axis}" for cut in cuts)
    raise ValueError(f"by its name it is {said}, but {_describe(seen, size)}")


def _is_part(cut: Cut, region: Region, rank: int, size: int) -> bool:
    try:
        return cut.region(region.global_shape, rank, size).same_local(region)
    except ValueError:
        return False


def _describe(seen: Mapping[int, Region], size: int) -> str:
    rank, region = next(iter(seen.items()))
    parts = ", ".join(f"{list(piece.shape)} at {list(piece.global_offset)}" for piece in region.pieces)
    return f"rank {rank} of {size} has {parts} of shape {list(region.global_shape)}"
