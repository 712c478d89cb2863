"""Imports Megatron-Bridge once, for all ranks of all tests: they are forks of this process."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.bridge import bridge_on_cpu

bridge_on_cpu.import_bridge()

import mcore_ckpt.integrations.bridge  # noqa: E402, F401
from tests.bridge.bridge_run import ITERATIONS, LEFT, BridgeRun  # noqa: E402


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., BridgeRun]:
    """The run with these options that was never stopped, and never saved: Bridge has no manager of ours."""
    runs: dict[str, BridgeRun] = {}

    def run(world: int, options: Mapping[str, Any] | None = None) -> BridgeRun:
        key = f"{world} {options}"
        if key not in runs:
            folder = tmp_path_factory.mktemp("uninterrupted")
            runs[key] = BridgeRun(world, folder / "run", None, options or {}, ours=False).check()
        return runs[key]

    return run


@pytest.fixture(scope="session")
def left_by_bridge(tmp_path_factory: pytest.TempPathFactory) -> BridgeRun:
    """A killed run of Bridge's own manager, which has saved iteration 4 in its own format."""
    folder = tmp_path_factory.mktemp("left_by_bridge")
    run = BridgeRun(2, folder / "run", folder / "root", LEFT, ours=False, killed_at=ITERATIONS)
    assert -9 in run.start(), run.log
    return run
