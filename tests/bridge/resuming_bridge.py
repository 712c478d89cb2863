"""What tests of several runs share: killing one, starting it again, and comparing it with another."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.bridge.bridge_run import ITERATIONS, BridgeRun
from tests.distributed.snapshot import assert_same

TRACKER = "latest_checkpointed_iteration.txt"


def names_below(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if not path.name.startswith(".")}


def check_went_on(run: BridgeRun, reference: BridgeRun, since: int, leave_out: str = "-") -> None:
    """The iterations after `since`, and all state at the end but what begins with `leave_out`."""
    assert run.losses == {step: losses for step, losses in reference.losses.items() if step > since}
    for states in zip(run.states, reference.states, strict=True):
        found, wanted = ({name: each[name] for name in each if not name.startswith(leave_out)} for each in states)
        assert_same(found, wanted)


def killed(tmp_path: Path, world: int, options: Mapping[str, Any], **more: Any) -> BridgeRun:
    """A run of which all ranks were killed before the last iteration."""
    run = BridgeRun(world, tmp_path / "killed", tmp_path / "root", options, killed_at=ITERATIONS, **more)
    assert -9 in run.start(), run.log
    return run


def resumed(run: BridgeRun, **more: Any) -> BridgeRun:
    """The same run, started again."""
    return replace(run, folder=run.folder.parent / "resumed", **{"killed_at": None, "held_at": None, **more}).check()


def copied(run: BridgeRun, folder: Path, **more: Any) -> BridgeRun:
    """The same run, started again on a copy of its checkpoints."""
    shutil.copytree(run.root, folder / "copy")
    return replace(run, folder=folder / "run", root=folder / "copy", **{"killed_at": None, **more})
