"""Defines an architecture's table: which HuggingFace tensors make up which mcore tensor, in what order of rows.

On both sides, a table has *global* tensors: it does not know how tensor parallelism cuts an mcore tensor. For mcore
tensors, a table uses the names of megatron's local layer specs; `sharding.synonyms` translates the names of
transformer-engine's specs.

If megatron fuses several tensors into one, a row names these tensors as sections (`Row.sections`). A HuggingFace folder
does not show the sections, but tensor parallelism cuts each section separately, and `dist_checkpointing` stores each
section under a separate key. The sections gate and up need no names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from mcore_ckpt.sharding.regions import Shape

Sizes = Mapping[str, int]

# The names of the embedding and the output head, which are one tensor if embeddings are tied. Nearly all architectures
# use these names.
HF_EMBEDDING, HF_HEAD = "model.embed_tokens.weight", "lm_head.weight"
MCORE_EMBEDDING, MCORE_HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


class RowRange(NamedTuple):
    """Rows `[start, start + rows)` of one HuggingFace tensor; `source` is the tensor's position in `Row.hf`."""

    source: int
    start: int
    rows: int


class Section(NamedTuple):
    """A group of rows in an mcore tensor that tensor parallelism cuts separately.

    `name` is megatron's name of the group.
    """

    name: str
    rows: int


Transform = Callable[[Sizes, Sequence[Shape]], Sequence[RowRange]]
"""A function that returns the HuggingFace rows that make up an mcore tensor, in the order of the mcore tensor's rows.

Its arguments are the model's sizes, and the shapes of the HuggingFace tensors in the order of `Row.hf`.
"""


def in_order(sizes: Sizes, shapes: Sequence[Shape]) -> list[RowRange]:
    """Keeps a single tensor as it is, or concatenates several tensors, such as the gate and the up of fc1."""
    return [RowRange(source, 0, shape[0]) for source, shape in enumerate(shapes)]


def qkv(sizes: Sizes, shapes: Sequence[Shape]) -> list[RowRange]:
    """Interleaves queries, keys and values: each query group has its queries, then its key, then its value.

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
    """Interleaves queries, gates, keys and values for attention with an output gate.

    HuggingFace stores the gate of each head directly after the head's query. mcore stores, for each query group, all
    queries, then all gates, then key and value (`SelfAttention.get_query_key_value_tensors` with `output_gate`).
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
    """A conversion of a tensor's elements that does more than change the order of rows.

    The conversion must be exact in both directions for the values that occur in models.
    """

    def to_hf(self, mcore: torch.Tensor) -> torch.Tensor: ...
    def to_mcore(self, hf: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class Row:
    """One row of a table: one mcore tensor and the HuggingFace tensors that make it up.

    Attributes:
        mcore: the mcore tensor's name relative to its layer, or to the model for rows outside of layers. The name
            contains `{expert}` if the tensor belongs to one expert, and is empty if only HuggingFace has the tensor.
            For an empty name, an export writes zeros, and a reader refuses any other values.
        hf: the names of the HuggingFace tensors, each with its shape in words, such as "heads*head_dim hidden". If the
            mcore name contains `{expert}` and the HuggingFace names do not, each HuggingFace tensor holds all experts,
            stacked along its first axis.
        transform: the function that orders the HuggingFace rows in the mcore tensor.
        when: the words that must be among the facts of the model and of the layer, such as "moe !tied". A word that
            begins with `!` must not be among them.
        change: the conversion of the values, or None if the values stay as they are.
        is_copy: True if another row holds the same tensor (DeepSeek's MTP layers repeat the embedding and the head).
            A copy is written on export and ignored on reading.
        sections: the parts of an mcore tensor that megatron saves separately (`_split_tensor_factory`, 0.16.1), in the
            order of their rows. The keys are megatron's names of the sections, and each value is the section's number
            of rows, in words. Gate and up of `linear_fc1` need no sections.
        per: for a row outside of the decoder's layers that occurs several times, such as once per layer of a vision
            tower: the name of the size that says how often the row occurs. All names of such a row contain `{number}`,
            which counts from 0. Empty for all other rows.
    """

    mcore: str
    hf: Mapping[str, str]
    transform: Transform = in_order
    when: str = ""
    change: ValueChange | None = None
    is_copy: bool = False
    sections: Mapping[str, str] = field(default_factory=dict)
    per: str = ""

    def applies(self, facts: frozenset[str]) -> bool:
        """Returns True if the row's tensors exist in a model and a layer with these facts."""
        return all((word[1:] not in facts) if word.startswith("!") else (word in facts) for word in self.when.split())


@dataclass(frozen=True)
class Table:
    """All rows of an architecture.

    Attributes:
        model: the rows outside of layers, with full names on both sides.
        layer: the rows of a decoder layer. Names are relative to `{mcore}decoder.layers.{n}.` in mcore and to
            `hf_layer` in HuggingFace.
        mtp: the additional rows of a multi-token-prediction layer, which also has all rows of `layer`. Names are
            relative to `{mcore}mtp.layers.{n}.` in mcore and to `hf_mtp_layer` in HuggingFace. If one depth is a stack
            of several layers, `when` of a row can have the words "first" and "last", which are true of the first and
            the last layer of the stack.
        stacked: alternative rows for tensors of `layer`, used only on reading. In this form one tensor holds all
            experts, as in a model that transformers 5 has in memory. Names are relative to the same prefixes as in
            `layer`.
        ignored: regular expressions for the names of HuggingFace tensors that are left out.
        mcore: the beginning of the mcore names of the decoder's tensors: `language_model.` in vision-language models.
        hf: the beginning of the HuggingFace names of the decoder's tensors.
        hf_layer: the beginning of the HuggingFace names of layer `{layer}`. `{hf}` stands for `hf`.
        hf_mtp_layer: the beginning of the HuggingFace names of a multi-token-prediction layer. `{mtp}` is the layer's
            number among these layers, and `{layer}` is the layer's number if the decoder's layers are counted first.
        hf_mtp_decoder: the text between `hf_mtp_layer` and the names in `layer`, for multi-token-prediction layers.
        spellings: pairs of beginnings of names: the beginning that a folder can have, and the beginning that the table
            has instead. The first pair that fits a name counts.
        is_hybrid: True if the mcore model is a HybridModel, whose layers have one mixer each, and whose depths of
            multi-token prediction are stacks of such layers. False if it is a GPTModel.
        gated: True if `linear_fc1` consists of gate and up, which tensor parallelism cuts separately.
    """

    model: tuple[Row, ...]
    layer: tuple[Row, ...]
    mtp: tuple[Row, ...] = ()
    stacked: tuple[Row, ...] = ()
    ignored: tuple[str, ...] = (r".*rotary_emb\.inv_freq",)
    mcore: str = ""
    hf: str = "model."
    hf_layer: str = "{hf}layers.{layer}."
    hf_mtp_layer: str = "{hf}layers.{layer}."
    hf_mtp_decoder: str = ""
    spellings: tuple[tuple[str, str], ...] = ()
    is_hybrid: bool = False
    gated: bool = True

    @property
    def hf_embedding(self) -> str:
        """The HuggingFace name of the embedding."""
        return self._hf_name(MCORE_EMBEDDING, HF_EMBEDDING)

    @property
    def hf_head(self) -> str:
        """The HuggingFace name of a language model's output head."""
        return self._hf_name(MCORE_HEAD, HF_HEAD)

    def _hf_name(self, mcore: str, usual: str) -> str:
        rows = (row for row in self.model if row.mcore == self.mcore + mcore and not row.is_copy)
        # Take the first row, because the language model's head comes before the value head.
        return next((name for row in rows for name in row.hf), usual)

    def spelled(self, name: str) -> str:
        """Returns the name that the table has for a HuggingFace tensor that a folder may spell in another way."""
        found = ((start, ours) for start, ours in self.spellings if name.startswith(start))
        start, ours = next(found, ("", ""))
        return ours + name[len(start) :]


def shape_of(words: str, sizes: Sizes) -> Shape:
    """Turns a shape in words into numbers. Raises KeyError if the model lacks one of the sizes.

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
