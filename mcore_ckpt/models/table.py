"""The table of an architecture: which HuggingFace tensors make up which mcore tensor, and in what order of rows.

Both sides are *global* tensors. A table does not know how tensor parallelism cuts an mcore tensor. It uses the names of
megatron's local layer specs; `sharding.synonyms` translates the names of transformer-engine's specs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from mcore_ckpt.sharding.regions import Shape

Sizes = Mapping[str, int]

# The embedding and the output head, which are one tensor if embeddings are tied. Nearly all architectures use these
# names.
HF_EMBEDDING, HF_HEAD = "model.embed_tokens.weight", "lm_head.weight"
MCORE_EMBEDDING, MCORE_HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


class RowRange(NamedTuple):
    """Rows `[start, start + rows)` of one HuggingFace tensor; `source` is its position in `Row.hf`."""

    source: int
    start: int
    rows: int


class Section(NamedTuple):
    """A group of rows in an mcore tensor that tensor parallelism cuts separately; `name` is megatron's name for it."""

    name: str
    rows: int


Transform = Callable[[Sizes, Sequence[Shape]], Sequence[RowRange]]
"""Returns the HuggingFace rows that make up the mcore tensor, in its order of rows.

Arguments: the model's sizes, and the shapes of the HuggingFace tensors in the order of `Row.hf`.
"""


def in_order(sizes: Sizes, shapes: Sequence[Shape]) -> list[RowRange]:
    """Takes one tensor as it is, or concatenates several: gate and up become fc1."""
    return [RowRange(source, 0, shape[0]) for source, shape in enumerate(shapes)]


def qkv(sizes: Sizes, shapes: Sequence[Shape]) -> list[RowRange]:
    """Interleaves queries, keys and values: for each query group its queries, its key, its value.

    `SelfAttention.get_query_key_value_tensors` (0.16.1) splits the output of linear_qkv in this order.
    """
    per_group = sizes["heads"] // sizes["groups"] * sizes["head_dim"]
    return [
        rows
        for group in range(sizes["groups"])
        for rows in (
            RowRange(0, group * per_group, per_group),
            RowRange(1, group * sizes["head_dim"], sizes["head_dim"]),
            RowRange(2, group * sizes["head_dim"], sizes["head_dim"]),
        )
    ]


def gated_qkv(sizes: Sizes, shapes: Sequence[Shape]) -> list[RowRange]:
    """Interleaves queries, gates, keys and values of attention whose output has a gate.

    HuggingFace stores the gate of each head directly after its query. mcore stores all queries of a group before all
    its gates (`SelfAttention.get_query_key_value_tensors` with `output_gate`). The rest is as in `qkv`.
    """
    dim, per_group = sizes["head_dim"], sizes["heads"] // sizes["groups"]
    ranges: list[RowRange] = []
    for group in range(sizes["groups"]):
        heads = range(group * per_group, (group + 1) * per_group)
        ranges += (RowRange(0, 2 * head * dim, dim) for head in heads)
        ranges += (RowRange(0, (2 * head + 1) * dim, dim) for head in heads)
        ranges += (RowRange(1, group * dim, dim), RowRange(2, group * dim, dim))
    return ranges


class ValueChange(Protocol):
    """A conversion of a tensor's elements that a new order of rows cannot express. It is exact in both directions."""

    def to_hf(self, mcore: torch.Tensor) -> torch.Tensor: ...
    def to_mcore(self, hf: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class Row:
    """One row of a table: one mcore tensor and the HuggingFace tensors that make it up.

    Attributes:
        mcore: the mcore tensor's name below its layer, or below the model for rows outside of layers. It contains
            `{expert}` if the tensor belongs to one expert. It is empty if only HuggingFace has the tensor: then zeros
            are written, and anything but zeros is an error on reading.
        hf: the names of the HuggingFace tensors, each with its shape in words: "heads*head_dim hidden". If the mcore
            name contains `{expert}` and these names do not, each tensor holds all experts, stacked along its first
            axis.
        transform: gives the order of the HuggingFace rows in the mcore tensor.
        when: the words that must be among the facts of the model and of the layer. A word with `!` must not be:
            "moe !tied".
        change: converts the values, or None if the values stay as they are.
        is_copy: True if another row holds the same tensor (DeepSeek's MTP layers repeat the embedding and the head).
            A copy is written on export and ignored on reading.
        sections: the parts of an mcore tensor that megatron saves separately (`_split_tensor_factory`, 0.16.1), in the
            order of their rows: megatron's name of each, and its number of rows in words. Gate and up of `linear_fc1`
            need no sections.
    """

    mcore: str
    hf: Mapping[str, str]
    transform: Transform = in_order
    when: str = ""
    change: ValueChange | None = None
    is_copy: bool = False
    sections: Mapping[str, str] = field(default_factory=dict)

    def applies(self, facts: frozenset[str]) -> bool:
        """True if a model and layer with these facts have the row's tensors."""
        return all((word[1:] not in facts) if word.startswith("!") else (word in facts) for word in self.when.split())


@dataclass(frozen=True)
class Table:
    """All rows of an architecture.

    Attributes:
        model: the rows outside of layers, with full names on both sides.
        layer: the rows of a decoder layer. Names are below `decoder.layers.{n}.` in mcore and `model.layers.{n}.` in
            HuggingFace.
        mtp: the additional rows of a multi-token-prediction layer, which also has all rows of `layer`. Names are below
            `mtp.layers.{n}.` in mcore and `model.layers.{number of decoder layers + n}.` in HuggingFace.
        stacked: alternative rows for tensors of `layer`, accepted only on reading: one tensor holds all experts, as
            transformers 5 keeps them in memory. Names are as in `layer`.
        ignored: regular expressions of HuggingFace tensor names that hold no weights.
    """

    model: tuple[Row, ...]
    layer: tuple[Row, ...]
    mtp: tuple[Row, ...] = ()
    stacked: tuple[Row, ...] = ()
    ignored: tuple[str, ...] = (r".*rotary_emb\.inv_freq",)


def shape_of(words: str, sizes: Sizes) -> Shape:
    """Turns a shape in words into numbers. Raises KeyError for a size that the model does not have.

    Example:
        >>> shape_of("2*ffn hidden", {"ffn": 8, "hidden": 4})
        (16, 4)
    """
    shape = []
    for word in words.split():
        length = 1
        for factor in word.split("*"):
            length *= int(factor) if factor.isdigit() else sizes[factor]
        shape.append(length)
    return tuple(shape)
