"""The checkpoints that the plan's benchmark makes up are whole, and another layout finds its parts in them."""

from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.formats.contract import RankPosition
from mcore_ckpt.formats.locate import Locator, Wanted
from mcore_ckpt.formats.native.reader import NativeReader
from mcore_ckpt.sharding.plan import ShardKey

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import simulated as module

    # Several buckets, of which some have several parameters.
    monkeypatch.setattr(module, "BUCKET_ELEMENTS", 3000)
    monkeypatch.setattr(module, "BUCKET_ELEMENTS_PER_RANK", 0)
    return module


def test_every_part_of_another_layout_is_there_once(tmp_path: Path, simulated: Any) -> None:
    model, wanted = simulated.Model(3, 16, 96), simulated.Layout(4, 1, 2)
    simulated.write_checkpoint(tmp_path, model, simulated.Layout(2, 3, 3))
    manifest = read_manifest(tmp_path)
    assert len(manifest.files) == 2 * 3 * 3 + 2 * 3
    assert len(manifest.tensors) == 3 * 6 + 3
    reader = NativeReader.open(tmp_path)
    seen = {"model": 0, "exp_avg": 0}
    for at in wanted.ranks():
        locator = Locator(reader, RankPosition(wanted.topology, at))
        model_parts = wanted.model_parts(model, at)
        for kind, parts in (("model", model_parts), ("exp_avg", wanted.optimizer_parts(model_parts, at))):
            for part in parts:
                located = locator.find(Wanted(ShardKey(part.name, kind), part.region, ""))
                assert located is not None
                assert sum(read.rows.numel for read in located.reads) == part.region.numel
                seen[kind] += part.region.numel
    norms = 3 * 2 * 16 + 16
    elements = 3 * (1 + 1.5 + 6 + 3) * 16 * 16 + 2 * 96 * 16
    # Of each of two data-parallel ranks the whole model, of both together the optimizer.
    assert seen == {"model": 2 * (elements + 4 * norms), "exp_avg": elements + 4 * norms}
