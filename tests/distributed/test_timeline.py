"""The manifest of a save has the timeline that each rank's report tells, too."""

from operator import add
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt.checkpoint.reading import read_manifest
from tests.distributed.agreement import everywhere, gather
from tests.distributed.checkpointing import manager_of
from tests.distributed.hf_words import hf_config
from tests.distributed.layouts import LAYOUTS
from tests.distributed.training import build, parallel, train

pytestmark = pytest.mark.world(2)

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"async_save": True},
    "export": {"save_contents": ("model", "optimizer", "extra", "hf_model"), "async_save": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_each_rank_finds_its_own_times_in_the_manifest(mode: str, shared_path: Path) -> None:
    layout = LAYOUTS["tp2"]
    with parallel(layout):
        training = build(layout, seed=1)
        train(training, 0, 1)
        manager = manager_of(training, shared_path, hf_config=hf_config(layout), **MODES[mode])
        handle = manager.save(1)
        handle.wait()
        report = handle.report
        assert report is not None
        manager.close()
        reports = gather(report)
        with everywhere():
            manifest = read_manifest(report.path)
            timeline = manifest.save_timeline
            assert timeline is not None
            exported = [0] * len(reports)
            for file in manifest.files:
                if mode == "export" and file.kind == "huggingface":
                    exported[file.rank] += file.size
            assert [*map(add, timeline.nbytes, exported)] == [each.nbytes for each in reports]
            for rank, each in enumerate(reports):
                plan, copy, write = (
                    tuple(column[rank] / 1e6 for column in spans)
                    for spans in (timeline.plan, timeline.copy, timeline.write)
                )
                # The report counts what is between copying and writing as planning.
                assert 0 <= plan[0] <= plan[1] <= plan[0] + each.plan_s + 1e-5
                assert copy[1] - copy[0] == pytest.approx(each.copy_s, abs=1e-5)
                assert write[1] - write[0] == pytest.approx(each.write_s, abs=1e-5)
                assert plan[1] <= copy[0] + 1e-5
                assert write[1] <= each.seconds
            assert (timeline.export is not None) == (mode == "export")
            if timeline.export is not None:
                assert timeline.export[0] == timeline.write[1]
                for rank, each in enumerate(reports):
                    export_us = timeline.export[1][rank] - timeline.export[0][rank]
                    assert export_us / 1e6 == pytest.approx(each.export_s, abs=1e-5)
            own = (timeline.export or timeline.write)[1][0]
            assert own == timeline.commit[0] < timeline.commit[1]
            assert timeline.commit[1] / 1e6 <= reports[0].seconds
            stalls = None if mode == "sync" else pytest.approx([each.stall_s * 1e6 for each in reports], abs=1)
            assert (None if timeline.stall is None else list(timeline.stall)) == stalls
