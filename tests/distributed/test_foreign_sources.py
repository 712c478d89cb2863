"""The model in checkpoints of other programs, read without a model: what exports of them are made from."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.formats.contract import CheckpointReader, RegionRead, weights_of
from mcore_ckpt.formats.locate import read_regions
from mcore_ckpt.formats.torch_dist.reader import open_torch_dist
from mcore_ckpt.formats.verl_ranks.reader import open_verl_ranks
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.sharding.synonyms import found_as
from mcore_ckpt.state.model import unwrap
from tests.distributed.agreement import everywhere
from tests.distributed.foreign_checkpoints import save_torch_dist, save_verl_ranks
from tests.distributed.global_state import global_state
from tests.distributed.layouts import HAS_HYBRID, LAYOUTS
from tests.distributed.tiers import marks
from tests.distributed.training import Layout, Training, build, parallel, train

NAMES = (
    "plain",
    "mtp",
    "dp2-bf16",
    "dp2-expert-bias",
    "pp2-tied-bf16",
    "pp2-vpp2",
    "pp2-mtp",
    "tp2",
    "ep2",
    "tp2-pp2",
    "tp2-ep2-etp1",
    "pp2-dp2-uneven",
    "pp2-vpp2-dp2-stages",
    "tower-tp2",
    "tower-megatron-tp2",
    "tower-pp2-vpp2",
)
HYBRIDS = ("hybrid", "pp2-vpp2-hybrid") if HAS_HYBRID else ()
# The flags of `sharded_state_dict` that change keys.
KEYS = ("", "non_homogeneous_layers", "singleton_local_shards")


IN_CI = {
    ("dp2-expert-bias", "verl_ranks"),
    ("pp2-tied-bf16", "verl_ranks"),
    ("pp2-vpp2", "verl_ranks"),
    ("mtp", ""),
    ("dp2-expert-bias", "non_homogeneous_layers"),
    ("pp2-tied-bf16", "singleton_local_shards"),
    ("pp2-vpp2", ""),
    ("hybrid", ""),
    ("tower-megatron-tp2", ""),
}


def params(names: tuple[str, ...], forms: tuple[str, ...]) -> list[object]:
    return [
        pytest.param(
            name, form, id=f"{name}-{form or 'plain'}", marks=marks(LAYOUTS[name].world, (name, form) in IN_CI)
        )
        for name in names
        for form in forms
    ]


def model_of(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removesuffix(" model"): tensor for name, tensor in state.items() if name.endswith(" model")}


def assert_has(reader: CheckpointReader, wanted: Mapping[str, torch.Tensor]) -> None:
    found = weights_of(reader)
    used = {name: found_as(name, found) for name in wanted}
    assert {*used.values()} == {*found}, sorted({*map(str, used.values())} ^ {*found})[:8]
    memory = {name: torch.full_like(tensor, float("nan")) for name, tensor in wanted.items()}
    read_regions(
        reader,
        (RegionRead(str(used[name]), Region.whole(tuple(tensor.shape)), tensor) for name, tensor in memory.items()),
    )
    for name, tensor in wanted.items():
        assert found[str(used[name])].shape == tuple(tensor.shape), name
        assert found[str(used[name])].dtype == tensor.dtype, name
        assert torch.equal(memory[name], tensor), name


@pytest.mark.parametrize(("name", "_"), params(NAMES, ("verl_ranks",)))
def test_verl_ranks(name: str, _: str, shared_path: Path) -> None:
    with parallel(LAYOUTS[name]):
        training = build(LAYOUTS[name], seed=1)
        train(training, 0, 1)
        save_verl_ranks(training, shared_path)
        wanted = model_of(global_state(training))
        with everywhere():
            if dist.get_rank() == 0:
                assert_has(open_verl_ranks(shared_path, shapes(LAYOUTS[name], wanted)), wanted)


@pytest.mark.world(4)
def test_experts_that_verl_lost(shared_path: Path) -> None:
    """Files are named by tensor-parallel rank: of experts that are cut further, one part wrote over the others."""
    layout = LAYOUTS["etp2-ep2"]
    with parallel(layout):
        training = build(layout, seed=1)
        train(training, 0, 1)
        save_verl_ranks(training, shared_path)
        wanted = shapes(layout, model_of(global_state(training)))
        with everywhere():
            if dist.get_rank() == 0:
                with pytest.raises(CheckpointMismatchError, match="experts were cut into more parts"):
                    open_verl_ranks(shared_path, wanted)


def shapes(layout: Layout, tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    """As `config.json` promises them: without padding."""
    return {
        name: (131, *tensor.shape[1:]) if tensor.shape[0] == layout.padded_vocab_size else tuple(tensor.shape)
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize(("name", "flag"), params((*NAMES, "etp2-ep2", *HYBRIDS), KEYS))
def test_torch_dist(name: str, flag: str, shared_path: Path) -> None:
    with parallel(LAYOUTS[name]):
        training = build(LAYOUTS[name], seed=1)
        if flag:
            save_model(training, shared_path / "dist_ckpt", {flag: True})
        else:
            train(training, 0, 1)
            save_torch_dist(training, shared_path / "dist_ckpt", "fully_reshardable")
        wanted = model_of(global_state(training))
        with everywhere():
            if dist.get_rank() == 0:
                assert_has(open_torch_dist(shared_path), wanted)


def save_model(training: Training, folder: Path, metadata: dict[str, bool]) -> None:
    """As a trainer does that does not save its optimizer."""
    with everywhere():
        folder.mkdir(exist_ok=True)
    state = {
        f"model{number}": unwrap(chunk).sharded_state_dict(metadata=metadata)
        for number, chunk in enumerate(training.model)
    }
    dist_checkpointing.save(state, str(folder), ("torch_dist", 1), content_metadata=metadata)
