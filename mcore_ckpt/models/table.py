"""What a table says of an architecture: which HuggingFace tensors make up which mcore tensor, in what order of rows.

Both sides are *global* tensors: how tensor parallelism cuts the mcore one is not a table's business. Names are those of
megatron's local layer specs; `sharding.synonyms` knows what transformer-engine's specs call the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from mcore_ckpt.sharding.regions import Shape

Sizes = Mapping[str, int]

# What tied embeddings are the same tensor of; nearly all architectures call them this.
HF_EMBEDDING, HF_HEAD = "model.embed_tokens.weight", "lm_head.weight"
MCORE_EMBEDDING, MCORE_HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


class RowRange(NamedTuple):
    """Rows `[start, start + rows)` of one of the HuggingFace tensors of a row of the table."""

    source: int
    start: int
    rows: int


class Section(NamedTuple):
    """Rows of an mcore tensor that tensor parallelism cuts by themselves; `name` is what megatron calls them."""

    name: str
    rows: int


Transform = Callable[[Sizes, Sequence[Shape]], Sequence[RowRange]]
"""The blocks of HuggingFace rows that, one behind the other, are the mcore tensor.

It is handed the model's sizes and the shapes of the HuggingFace tensors.
"""


def in_order(sizes: Sizes, shapes: Sequence[Shape]) -> list[RowRange]:
    """One tensor as it is, or several one behind the other: gate and up are fc1."""
    return [RowRange(source, 0, shape[0]) for source, shape in enumerate(shapes)]


def qkv(sizes: Sizes, shapes: Sequence[Shape]) -> list[RowRange]:
    """For each query group its queries, its key, its value: as `SelfAttention.get_query_key_value_tensors` (0.16.1)
    splits what linear_qkv gives."""
    per_group = sizes["heads"] // sizes["groups"] * sizes["head_dim"]
    return [
        block
        for group in range(sizes["groups"])
        for block in (
            RowRange(0, group * per_group, per_group),
            RowRange(1, group * sizes["head_dim"], sizes["head_dim"]),
            RowRange(2, group * sizes["head_dim"], sizes["head_dim"]),
        )
    ]


def gated_qkv(sizes: Sizes, shapes: Sequence[Shape]) -> list[RowRange]:
    """As `qkv`, of attention whose output has a gate: HuggingFace has each head's query and gate one behind the other,
    mcore all queries of a group before their gates (`SelfAttention.get_query_key_value_tensors` with `output_gate`)."""
    dim, per_group = sizes["head_dim"], sizes["heads"] // sizes["groups"]
    blocks: list[RowRange] = []
    for group in range(sizes["groups"]):
        heads = range(group * per_group, (group + 1) * per_group)
        blocks += (RowRange(0, 2 * head * dim, dim) for head in heads)
        blocks += (RowRange(0, (2 * head + 1) * dim, dim) for head in heads)
        blocks += (RowRange(1, group * dim, dim), RowRange(2, group * dim, dim))
    return blocks


class ValueChange(Protocol):
    """A change that is more than another order of rows. Exact in both directions."""

    def to_hf(self, mcore: torch.Tensor) -> torch.Tensor: ...
    def to_mcore(self, hf: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class Row:
    """One row of a table.

    Attributes:
        mcore: the tensor's name below its layer (or the model), with `{expert}` where it is one expert's. Empty: HF has
            a tensor that mcore has not, which is written as zeros, and must be zeros when it is read.
        hf: the names of the HuggingFace tensors and their shapes in words: "heads*head_dim hidden". Where the mcore
            name has `{expert}` and these have not, each holds all experts, stacked along its first axis.
        transform: the order of their rows.
        when: words that must all be true of the model and the layer, or with `!` false: "moe !tied".
        change: what happens to the values.
        is_copy: the tensor is another row's too (DeepSeek's MTP layers bring embedding and head again): written, and
            left out when read.
        sections: of an mcore tensor that megatron keeps as several (`_split_tensor_factory`, 0.16.1): what it calls
            them, one behind the other, and their rows in words. Gate and up of `linear_fc1` need not be named.
    """

    mcore: str
    hf: Mapping[str, str]
    transform: Transform = in_order
    when: str = ""
    change: ValueChange | None = None
    is_copy: bool = False
    sections: Mapping[str, str] = field(default_factory=dict)

    def applies(self, facts: frozenset[str]) -> bool:
        return all((word[1:] not in facts) if word.startswith("!") else (word in facts) for word in self.when.split())


@dataclass(frozen=True)
class Table:
    """The rows of an architecture.

    Attributes:
        model: rows outside of layers; both names are whole.
        layer: rows of a decoder layer; names are below `decoder.layers.{n}.` and `model.layers.{n}.`.
        mtp: rows of a multi-token-prediction layer beside those of `layer`, which it has too; names are below
            `mtp.layers.{n}.` and `model.layers.{number of decoder layers + n}.`.
        stacked: the same tensors under other names, which are accepted on reading: experts in one tensor, as
            transformers 5 has them in memory. Names as in `layer`.
        ignored: regular expressions of HuggingFace names that hold nothing to keep.
    """

    model: tuple[Row, ...]
    layer: tuple[Row, ...]
    mtp: tuple[Row, ...] = ()
    stacked: tuple[Row, ...] = ()
    ignored: tuple[str, ...] = (r".*rotary_emb\.inv_freq",)


def shape_of(words: str, sizes: Sizes) -> Shape:
    """A shape in words as numbers. Raises KeyError for a size that the model does not have.

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
