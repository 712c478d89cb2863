"""A checkpoint resharded offline is what a direct load of the original is: bit for bit."""

import zipfile
from collections import Counter
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mcore_ckpt.checkpoint.reading import read_index, read_manifest
from mcore_ckpt.io import tuning
from mcore_ckpt.sharding.names import expert_of
from mcore_ckpt.sharding.plan import ShardKey
from mcore_ckpt.tools.convert.reshard.reshard import reshard
from mcore_ckpt.tools.convert.reshard.target import WantedLayout
from mcore_ckpt.tools.examine.select import select
from tests.distributed.agreement import everywhere
from tests.distributed.checkpointing import manager_of, save
from tests.distributed.layouts import HAS_HYBRID, LAYOUTS, REDUCES_EXPERTS_APART
from tests.distributed.snapshot import Snapshot, assert_same, poison, snapshot
from tests.distributed.tiers import marks
from tests.distributed.training import Layout, build, parallel, train

STEP = 2
# Small enough that the files of these models are written in several parts.
PART_BYTES = 32 << 10


@dataclass(frozen=True)
class Case:
    """Trained and saved under `before`, resharded to `after`, then by way of `between` back to `before`."""

    before: Layout
    after: Layout
    between: Layout

    @property
    def world(self) -> int:
        return self.before.world


# Of each way to cut a model, and of each kind of optimizer, one journey.
IN_CI = {
    "ep2-to-tp2-bf16",
    "tied-pp2-to-tp2",
    "expert-bias",
    "stages-to-tp2-pp2",
    "hybrid",
    "tower-vpp2-to-tp2-bf16",
}

TWO, FOUR = Layout(2), Layout(4)
MIXTURE = {"experts": 4}
DEEP = {"num_layers": 4}

CASES = {
    "dp2-to-tp2-to-pp2": Case(TWO, Layout(2, tp=2), Layout(2, pp=2)),
    "tp2-to-dp2-bf16": Case(
        Layout(2, tp=2, precision="bf16"), Layout(2, precision="bf16"), Layout(2, pp=2, precision="bf16")
    ),
    "tp2-to-cp2": Case(Layout(2, tp=2), Layout(2, cp=2), TWO),
    "pp2-vpp2-to-tp2": Case(Layout(2, pp=2, vpp=2, **DEEP), Layout(2, tp=2, **DEEP), Layout(2, pp=2, **DEEP)),
    "ep2-to-dp2": Case(Layout(2, ep=2, **MIXTURE), Layout(2, **MIXTURE), Layout(2, pp=2, **MIXTURE)),
    "ep2-to-tp2-bf16": Case(
        Layout(2, ep=2, precision="bf16", **MIXTURE),
        Layout(2, tp=2, precision="bf16", **MIXTURE),
        Layout(2, precision="bf16", **MIXTURE),
    ),
    "tied-pp2-to-tp2": Case(
        Layout(2, pp=2, tied_embeddings=True, precision="bf16"),
        Layout(2, tp=2, tied_embeddings=True, precision="bf16"),
        Layout(2, tied_embeddings=True, precision="bf16"),
    ),
    "replicated-optimizer": Case(
        Layout(2, precision="bf16", distributed_optimizer=False),
        Layout(2, tp=2, precision="bf16", distributed_optimizer=False),
        Layout(2, pp=2, precision="bf16"),
    ),
    "mtp": Case(Layout(2, mtp_layers=1), Layout(2, pp=2, mtp_layers=1), Layout(2, mtp_layers=1, tp=2)),
    "two-dtypes": Case(
        Layout(2, precision="bf16", fp32_norms=True),
        Layout(2, precision="bf16", fp32_norms=True, pp=2),
        Layout(2, precision="bf16", fp32_norms=True),
    ),
    "expert-bias": Case(
        LAYOUTS["dp2-expert-bias"], replace(LAYOUTS["dp2-expert-bias"], ep=1), LAYOUTS["dp2-expert-bias"]
    ),
    "tp2-pp2-to-dp4": Case(Layout(4, tp=2, pp=2), FOUR, Layout(4, tp=2)),
    "dp4-to-tp4-to-pp4": Case(Layout(4, **DEEP), Layout(4, tp=2, cp=2, **DEEP), Layout(4, pp=4, **DEEP)),
    "uneven-to-tp2": Case(
        Layout(4, pp=2, num_layers=5, first_stage_layers=2),
        Layout(4, tp=2, num_layers=5),
        Layout(4, tp=2, pp=2, num_layers=5, first_stage_layers=1),
    ),
    "stages-to-tp2-pp2": Case(
        Layout(4, pp=2, vpp=2, num_layers=6, stages="Et|t*2|t|t*2L"),
        Layout(4, tp=2, pp=2, num_layers=6),
        Layout(4, pp=2, vpp=2, num_layers=6, stages="Et*3|t|t|tL"),
    ),
    "ep2-to-tp2-ep2-etp1": Case(
        Layout(4, ep=2, **MIXTURE), Layout(4, tp=2, ep=2, etp=1, **MIXTURE), Layout(4, tp=2, pp=2, **MIXTURE)
    ),
    "etp2-ep2-to-ep4-bf16": Case(
        Layout(4, tp=1, ep=2, etp=2, precision="bf16", **MIXTURE),
        Layout(4, ep=4, precision="bf16", **MIXTURE),
        Layout(4, pp=2, ep=2, precision="bf16", **MIXTURE),
    ),
    "tower-dp2-to-tp2-to-pp2": Case(
        Layout(2, tower="transformers"), Layout(2, tp=2, tower="transformers"), Layout(2, pp=2, tower="transformers")
    ),
    "tower-vpp2-to-tp2-bf16": Case(
        Layout(2, pp=2, vpp=2, tower="megatron", precision="bf16", **DEEP),
        Layout(2, tp=2, tower="megatron", precision="bf16", **DEEP),
        Layout(2, tower="megatron", precision="bf16", **DEEP),
    ),
    "tower-tp2-pp2-to-ep2": Case(
        Layout(4, tp=2, pp=2, tower="transformers", tied_embeddings=True, **MIXTURE),
        Layout(4, ep=2, tower="transformers", tied_embeddings=True, **MIXTURE),
        Layout(4, pp=2, ep=2, tower="transformers", tied_embeddings=True, **MIXTURE),
    ),
    "two-instances": Case(Layout(4, optimizer_instances=2), Layout(4, tp=2), FOUR),
}
if HAS_HYBRID:
    HYBRID = Layout(2, experts=4, mtp_layers=1, pattern="M*-GE*-/*E")
    CASES["hybrid"] = Case(
        replace(HYBRID, pp=2, pattern="M|*-GE*-/*E"),
        replace(HYBRID, tp=2),
        replace(HYBRID, pp=2, vpp=2, pattern="M*|-|GE|*-/*E"),
    )
if REDUCES_EXPERTS_APART:
    CASES["etp2-to-tp2-etp1"] = Case(
        Layout(2, etp=2, **MIXTURE), Layout(2, tp=2, etp=1, **MIXTURE), Layout(2, ep=2, **MIXTURE)
    )


def wanted(layout: Layout) -> WantedLayout:
    """All that a layout says, but for how its vocabulary is padded: a load does that itself."""
    return WantedLayout(
        tp=layout.tp,
        pp=layout.pp,
        vpp=layout.vpp or 1,
        cp=layout.cp,
        ep=layout.ep,
        etp=layout.etp or layout.tp,
        world=layout.world,
        first_stage_layers=layout.first_stage_layers,
        pipeline_layout=layout.stages,
        hybrid_layer_pattern=layout.pattern,
    )


def loaded(layout: Layout, root: Path) -> Snapshot:
    """A new training with what a load brings, but for the generators, which a new layout starts anew."""
    training = build(layout, seed=2)
    poison(training)
    manager = manager_of(training, root, vocab_size=131)
    manager.load()
    manager.close()
    return {name: value for name, value in snapshot(training).items() if not name.startswith("generator.")}


def assert_sound(checkpoint: Path) -> None:
    """Every file opens for anybody, and no two ranks store the same element of an expert."""
    sizes: dict[ShardKey, int] = {}
    stored: Counter[ShardKey] = Counter()
    for file in read_manifest(checkpoint).files:
        for shard in read_index(checkpoint, file).shards if file.index else ():
            if expert_of(shard.key.name) is not None:
                sizes[shard.key] = prod(shard.region.global_shape)
                stored[shard.key] += shard.region.numel
    assert stored == sizes
    for path in checkpoint.rglob("*.pt"):
        torch.load(path, weights_only=True, mmap=True)
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None, path


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=name, marks=marks(case.world, name in IN_CI)) for name, case in CASES.items()]
)
def test_a_resharded_checkpoint_is_what_a_direct_load_finds(
    case: Case, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "STREAM_BYTES", PART_BYTES)
    with parallel(case.before):
        training = build(case.before, seed=1)
        train(training, 0, STEP)
        save(training, shared_path / "a", STEP)
        at_save = {name: value for name, value in snapshot(training).items() if not name.startswith("generator.")}
    with everywhere():
        if dist.get_rank() == 0:
            for source, layout, root in (("a", case.after, "b"), ("b", case.between, "c"), ("c", case.before, "d")):
                reshard(select(shared_path / source), shared_path / root, wanted(layout))
                assert_sound(shared_path / root / f"global_steps_{STEP}" / "actor")
    with parallel(case.after):
        direct = loaded(case.after, shared_path / "a")
        offline = loaded(case.after, shared_path / "b")
        with everywhere():
            assert_same(offline, direct)
    with parallel(case.between):
        direct = loaded(case.between, shared_path / "a")
        offline = loaded(case.between, shared_path / "c")
        with everywhere():
            assert_same(offline, direct)
    with parallel(case.before):
        back = loaded(case.before, shared_path / "d")
        with everywhere():
            assert_same(back, at_save)
