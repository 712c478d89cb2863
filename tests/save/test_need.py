"""How large the HuggingFace weights of a save will be at least, from the files that each rank owns."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_ckpt.formats.native.write_requests import TensorWrite
from mcore_ckpt.ranks.topology import Topology
from mcore_ckpt.save.hf_export import least_exported_bytes
from mcore_ckpt.sharding.plan import MODEL, ShardKey
from mcore_ckpt.sharding.regions import Piece, Region

LAYER = "decoder.layers.0."
NORM, ROUTER, FC2 = f"{LAYER}input_layernorm.weight", f"{LAYER}mlp.router.weight", f"{LAYER}mlp.linear_fc2.weight"
EXPERT = f"{LAYER}mlp.experts.local_experts.{{}}.linear_fc2.weight"
EXPERTS_ADAPTER = f"{LAYER}mlp.experts.linear_fc2.adapter.linear_in.weight"
EMBEDDING = "embedding.word_embeddings.weight"
SHAPES = {NORM: (8,), ROUTER: (4, 8), FC2: (8, 16), EMBEDDING: (128, 8)}
VOCABULARY = 100


def slice_of(name: str, shape: tuple[int, ...], axis: int, rank: int, size: int) -> TensorWrite:
    """What one of `size` ranks has of a tensor that is cut evenly along an axis."""
    local = tuple(length // size if at == axis else length for at, length in enumerate(shape))
    start = tuple(rank * length if at == axis else 0 for at, length in enumerate(local))
    region = Region(shape, local, (Piece((0,) * len(shape), local, start),), (0, torch.Size(local).numel()))
    return TensorWrite((name,), ShardKey(name, MODEL), region, torch.empty(local), local)


def whole(name: str, shape: tuple[int, ...]) -> TensorWrite:
    return TensorWrite((name,), ShardKey(name, MODEL), Region.whole(shape), torch.empty(shape), shape)


def bound(topology: Topology, files: list[tuple[str, list[TensorWrite]]], skip_frozen: bool = False) -> int:
    """The sum over all ranks, each of which owns one file."""
    config = SimpleNamespace(skip_frozen=skip_frozen)
    trainer: Any = SimpleNamespace(topology=topology, config=config, vocab_size=VOCABULARY)
    plans: list[Any] = [SimpleNamespace(request=SimpleNamespace(kind=kind, tensors=writes)) for kind, writes in files]
    return sum(least_exported_bytes(trainer, [plan]) for plan in plans)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_replicated_tensors_count_once(tp: int) -> None:
    files = [
        (
            "model",
            [
                whole(NORM, SHAPES[NORM]),
                whole(ROUTER, SHAPES[ROUTER]),
                slice_of(FC2, SHAPES[FC2], 1, rank, tp),
                slice_of(EMBEDDING, SHAPES[EMBEDDING], 0, rank, tp),
            ],
        )
        for rank in range(tp)
    ]
    assert bound(Topology(tp, tp=tp), files) == 4 * (8 + 4 * 8 + 8 * 16 + VOCABULARY * 8)


@pytest.mark.parametrize(("etp", "ep"), [(1, 2), (2, 1), (2, 2)])
def test_experts_count_once(etp: int, ep: int) -> None:
    """Those of other expert-parallel ranks are other tensors, but an adapter of all experts is the same one."""
    files = [
        ("experts", [slice_of(EXPERT.format(expert), (8, 16), 1, rank, etp), whole(EXPERTS_ADAPTER, (4, 8))])
        for expert in range(ep)
        for rank in range(etp)
    ]
    topology = Topology(etp * ep, ep=ep, etp=etp)
    assert bound(topology, files) == 4 * ep * 8 * 16
    assert bound(topology, files, skip_frozen=True) == 4 * 4 * 8


def test_tensors_that_only_some_ranks_share_are_not_counted_too_often() -> None:
    """Two of four ranks have the same half. The bound may be too low then, but never too high."""
    files = [("model", [slice_of(FC2, (8, 16), 1, rank // 2, 2)]) for rank in range(4)]
    assert bound(Topology(4, tp=4), files) <= 4 * 8 * 16


def test_a_vocabulary_of_unknown_size_counts_for_nothing() -> None:
    config = SimpleNamespace(skip_frozen=False)
    trainer: Any = SimpleNamespace(topology=Topology(), config=config, vocab_size=None)
    plan: Any = SimpleNamespace(
        request=SimpleNamespace(kind="model", tensors=[whole(EMBEDDING, (128, 8)), whole(NORM, (8,))])
    )
    assert least_exported_bytes(trainer, [plan]) == 4 * 8
