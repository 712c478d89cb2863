"""GatedDeltaNet and MambaMixer: what is known of their cuts without a model is what megatron's own modules do.

Also the norms of MiniMax-M2, of which a name says even less.
"""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_ckpt import CheckpointConfig, CheckpointManager
from mcore_ckpt.load.huggingface import load_hf
from mcore_ckpt.sharding.cuts import find_cut
from mcore_ckpt.sharding.plan import MODEL
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.sharding.vocabulary import has_vocabulary_rows
from mcore_ckpt.state.model import model_shards, unwrap
from mcore_ckpt.tools.convert.merge import MergeRequest, merge
from mcore_ckpt.tools.convert.reshard.reshard import reshard
from mcore_ckpt.tools.convert.reshard.target import WantedLayout
from mcore_ckpt.tools.examine.select import select
from tests.distributed.agreement import everywhere, gather
from tests.distributed.hf_models import Shape, assert_holds, build_model, global_tensors, read_tensors
from tests.distributed.layouts import HAS_HYBRID
from tests.distributed.tiers import pairs
from tests.distributed.training import Layout, parallel
from tests.support.tiny_models import VOCAB, make_hf_folder

NAME = "qwen3_next"
MODEL_ONLY = CheckpointConfig(load_contents=("model",), save_contents=("model",), vocab_size=VOCAB)
KINDS = ("native", "torch_dist", "verl_ranks")


def regions_of(model: Any) -> dict[str, Region]:
    return {shard.key.name: shard.region for shard in model_shards([model]) if shard.key.kind == MODEL}


def assert_cuts(one: dict[str, Region], two: list[dict[str, Region]]) -> None:
    """Each layout's regions follow from the other's. `two` are the ranks'."""
    assert one.keys() == two[0].keys()
    for name, whole in one.items():
        if has_vocabulary_rows(name):
            continue  # padded to another length
        seen = {rank: regions[name] for rank, regions in enumerate(two)}
        assert find_cut(name, seen, 2).region(whole.global_shape, 0, 1) == whole, name
        for rank, region in seen.items():
            assert find_cut(name, {0: whole}, 1).region(whole.global_shape, rank, 2) == region, name


def hf_folder(path: Path, name: str = NAME) -> Path:
    with everywhere():
        if dist.get_rank() == 0:
            make_hf_folder(path, name)
    return path


@pytest.mark.world(2)
def test_a_gated_delta_net_is_cut_as_its_pieces_say(shared_path: Path) -> None:
    folder = hf_folder(shared_path / "hf")
    with parallel(Layout(2)):
        one = regions_of(build_model(folder, Shape(2))[0])
    with parallel(Layout(2, tp=2)):
        two = gather(regions_of(build_model(folder, Shape(2, tp=2))[0]))
    with everywhere():
        assert sum(len(region.pieces) == 6 for region in one.values()) == 3
        assert_cuts(one, two)


@pytest.fixture
def mamba_mixer(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Megatron's module, with stand-ins for the kernels that it imports, which need triton and a GPU.

    They are used in forward, but for the norm, which is there with a weight.
    """

    class RMSNorm(torch.nn.Module):
        def __init__(self, hidden: int, device: Any, dtype: Any, **more: Any) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(hidden, dtype=dtype))

    stand_ins = {
        "megatron.core.inference.contexts.attention_context.triton.tensor_ops": (
            "tensor_get_slice_after",
            "tensor_masked_update",
            "tensor_merge",
        ),
        "mamba_ssm.ops.triton.layernorm_gated": ("RMSNorm",),
        "mamba_ssm.ops.triton.ssd_combined": ("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"),
    }
    name = "megatron.core.ssm.mamba_mixer"
    for path, names in stand_ins.items():
        module = ModuleType(path)
        module.__dict__.update(dict.fromkeys(names, RMSNorm))
        monkeypatch.setitem(sys.modules, path, module)
    before = sys.modules.pop(name, None)
    yield importlib.import_module(name)
    del sys.modules[name]
    if before is not None:
        sys.modules[name] = before


class Mamba(MegatronModule):
    """A model of one mixer: 8 heads of 4, 4 groups, a state of 8."""

    def __init__(self, mamba_mixer: Any, tp: int) -> None:
        config = TransformerConfig(
            num_layers=1,
            hidden_size=16,
            num_attention_heads=4,
            mamba_state_dim=8,
            mamba_head_dim=4,
            mamba_num_groups=4,
            tensor_model_parallel_size=tp,
            use_cpu_initialization=True,
        )
        super().__init__(config)
        self.mixer = mamba_mixer.MambaMixer(
            config,
            mamba_mixer.MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear),
            config.hidden_size,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )


@pytest.mark.world(2)
def test_a_mamba_mixer_is_cut_as_its_pieces_say(mamba_mixer: ModuleType) -> None:
    def regions(tp: int) -> dict[str, Region]:
        with parallel(Layout(2, tp=tp)):
            tensor_parallel.model_parallel_cuda_manual_seed(1)
            return regions_of(Mamba(mamba_mixer, tp))

    one, two = regions(1), gather(regions(2))
    with everywhere():
        assert {len(one[f"mixer.{name}"].pieces) for name in ("in_proj.weight", "conv1d.weight", "conv1d.bias")} == {
            5,
            3,
        }
        assert two[0]["mixer.norm.weight"].local_shape == (16,)
        assert_cuts(one, two)


def save(kind: str, chunks: list[torch.nn.Module], root: Path, tp: int) -> Path:
    """As each program does; the folder to merge."""
    model: Any = unwrap(chunks[0])
    if kind == "native":
        manager = CheckpointManager(root, chunks, config=MODEL_ONLY)
        manager.save(1)
        manager.close()
        return root
    folder = root / ("model" if kind == "verl_ranks" else "dist")
    rank = dist.get_rank() % tp
    with everywhere():
        (folder / f"mp_rank_{rank:02d}" if kind == "verl_ranks" else folder).mkdir(parents=True, exist_ok=True)
    if kind == "verl_ranks":
        with everywhere():
            if dist.get_rank() < tp:
                torch.save([model.state_dict()], folder / f"mp_rank_{rank:02d}" / "model.pt")
        return root
    dist_checkpointing.save(model.sharded_state_dict(), str(folder), ("torch_dist", 1))
    return folder


@pytest.mark.parametrize(("kind", "tp"), pairs(KINDS, (2, 1)))
@pytest.mark.world(2)
def test_what_was_trained_becomes_a_folder(kind: str, tp: int, shared_path: Path) -> None:
    check_merge(kind, Shape(2, tp=tp), shared_path)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.world(2)
def test_norms_of_all_heads_become_a_folder(kind: str, shared_path: Path) -> None:
    check_merge(kind, Shape(2, tp=2), shared_path, "minimax_m2")


@pytest.mark.skipif(not HAS_HYBRID, reason="this megatron-core has no HybridModel")
@pytest.mark.parametrize("kind", ["torch_dist", pytest.param("native", marks=pytest.mark.full)])
@pytest.mark.world(2)
def test_a_trained_hybrid_model_becomes_a_folder(kind: str, shared_path: Path) -> None:
    check_merge(kind, Shape(2, pp=2, hybrid=True), shared_path)


def check_merge(kind: str, shape: Shape, shared_path: Path, name: str = NAME) -> None:
    folder = hf_folder(shared_path / "hf", name)
    with parallel(shape.layout):
        chunks = build_model(folder, shape)
        load_hf(chunks, folder)
        source = save(kind, chunks, shared_path / "saved", shape.tp)
    with everywhere():
        if dist.get_rank() == 0:
            merge(MergeRequest(source, shared_path / "merged", hf_model_path=folder))
            found, wanted = read_tensors(shared_path / "merged"), read_tensors(folder)
            assert found.keys() == wanted.keys()
            for name, tensor in wanted.items():
                assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("name", "saved", "new"),
    [
        (NAME, 1, 2),
        (NAME, 2, 1),
        pytest.param("minimax_m2", 1, 2, marks=pytest.mark.full),
        ("minimax_m2", 2, 1),
    ],
)
@pytest.mark.world(2)
def test_a_checkpoint_goes_to_another_size(name: str, saved: int, new: int, shared_path: Path) -> None:
    folder = hf_folder(shared_path / "hf", name)
    with parallel(Layout(2, tp=saved)):
        chunks = build_model(folder, Shape(2, tp=saved))
        load_hf(chunks, folder)
        root = save("native", chunks, shared_path / "saved", saved)
    with everywhere():
        if dist.get_rank() == 0:
            reshard(select(root), shared_path / "other", WantedLayout(tp=new))
    with parallel(Layout(2, tp=new)):
        chunks = build_model(folder, Shape(2, tp=new))
        manager = CheckpointManager(shared_path / "other", chunks, config=MODEL_ONLY)
        manager.load()
        manager.close()
        with everywhere():
            assert_holds(chunks, global_tensors(folder))
