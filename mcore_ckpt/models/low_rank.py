"""Defines the data classes that describe low-rank adapters (LoRA, DoRA) of HuggingFace tensors."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_ckpt.sharding.regions import Region

PEFT_PREFIX = "base_model.model."
"""The beginning of the names that PEFT gives tensors."""


@dataclass(frozen=True)
class Factor:
    """A factor of an adapter (A, B or the magnitudes): the elements in `region` of the source's tensor `name`."""

    name: str
    region: Region


@dataclass(frozen=True)
class LowRank:
    """The adapter of a weight W of shape [rows, columns].

    The adapted weight is W' = W + scale · B A (Hu et al. 2021, LoRA). With a magnitude m, each row of W' is scaled to
    the length that m gives it (Liu et al. 2024, DoRA).

    Attributes:
        a: the matrix A, [rank, columns].
        b: the matrix B, [rows, rank], with rows in the order of the rows of W.
        scale: the factor, alpha / rank.
        magnitude: the vector m, [rows]. None for LoRA.
    """

    a: Factor
    b: Factor
    scale: float
    magnitude: Factor | None = None

    @property
    def rank(self) -> int:
        return self.a.region.local_shape[-2]

    @property
    def rows(self) -> int:
        return self.b.region.local_shape[-2]

    @property
    def columns(self) -> int:
        return self.a.region.local_shape[-1]
