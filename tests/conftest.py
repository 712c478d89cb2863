"""The tiers of the tests, and the order in which they run.

`pytest` runs what CI runs: one case for each reason. `--full` adds the cases marked `full`; `--quick` runs the tests of
one process that take no more than a moment, for the loop while one writes.
"""

from collections.abc import Iterable
from pathlib import Path

import hypothesis
import pytest

# By default an example may take 200 ms, and making the examples some seconds, which a busy machine does not keep to.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

# Folders and files that --quick leaves out: they start processes, or train.
NOT_QUICK = frozenset(
    {
        "areal",
        "chaos",
        "crash",
        "distributed",
        "faults",
        "gpu",
        "hf",
        "hostile",
        "integrations",
        "resharding",
        "s3",
        "te",
        "verl",
        "test_build.py",
        "test_crash.py",
        "test_demo.py",
        "test_distributed.py",
        "test_other_world.py",
        "test_s3.py",
        "test_shared_writes.py",
        "test_startup.py",
    }
)

# Files that take long, the longest first. Begun last, they would run on alone when all else has ended.
LONG = ("test_areal.py", "test_verl.py", "test_demo.py", "test_chaos.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    tier = parser.getgroup("tiers")
    tier.addoption("--full", action="store_true", help="run the cases marked `full`, too")
    tier.addoption("--quick", action="store_true", help="run only the tests of one process that are over in a moment")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: repeats, for another case, what a test in CI shows; runs with --full")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # Even to import some of them takes long.
    return True if config.getoption("quick") and collection_path.name in NOT_QUICK else None


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in a hook of its own
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("full"):
        left_out = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
    items.sort(key=_turn)
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            item.add_marker(pytest.mark.xdist_group(_group(item)))


def _world(item: pytest.Item) -> int:
    """The number of ranks that a test runs on; 0 for one process."""
    marks: Iterable[pytest.Mark] = item.iter_markers("world")
    return next((mark.args[0] for mark in marks), 0)


def _turn(item: pytest.Item) -> tuple[int, int]:
    """The long files first, then the tests of several ranks by their number, then the rest as it stands."""
    if item.path.name in LONG:
        return (0, LONG.index(item.path.name))
    # Of eight ranks there is little, and a start on two cores takes long.
    return (1, -_world(item)) if _world(item) else (2, 0)


def _group(item: pytest.Item) -> str:
    """What one process of pytest-xdist runs: a file, or the part of a file for one world size.

    There is one group of four ranks and one of eight, so that only one process forks them.
    """
    if _world(item) >= 4:
        return f"{_world(item)} ranks"
    if _world(item):
        return f"{item.path.stem}, {_world(item)} ranks"
    return str(item.path.relative_to(item.config.rootpath))
