"""The tiers of the tests, and the order in which they run.

`pytest` runs what CI runs: one case for each reason, and a quarter of hypothesis' examples. `--full` adds the cases
marked `full` and the other examples; `--quick` runs the tests of one process that take no more than a moment, for the
loop while one writes.
"""

import gc
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.support import compatibility

REPOSITORY = Path(__file__).parent.parent
# The processes that tests start import the tests' modules as this one does. First, because verl brings `tests`, too.
os.environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])

# torch, transformers, megatron and all tests are close to a million objects that live to the end. To look through them
# for garbage, again and again, took a seventh of the time of tests of one process.
gc.disable()

# By default an example may take 200 ms, and making the examples some seconds, which a busy machine does not keep to.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

# How a file, or the conftest.py of a folder, says that --quick leaves it out: it starts processes, or trains.
SLOW = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.slow\b", re.MULTILINE)

# Rooms and files of tests about how files are written. A file in memory is written in another way (csrc/write_job.cpp).
ON_DISK = frozenset({"disks", "native", "save", "test_shared_writes.py"})

# The longest first. Begun last, they would run on alone when all else has ended.
LONG = (
    "test_areal.py",
    "test_bridge.py",
    "test_swift.py",
    "test_verl.py",
    "test_older_verl.py",
    "test_versions.py",
    "test_s3.py",
    "test_roll.py",
    "test_power_loss.py",
    "test_demo.py",
    "test_kill_save.py",
    "test_emulated.py",
    "test_other_world.py",
    "test_preemptions.py",
    "test_chaos.py",
    "test_faults.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    tier = parser.getgroup("tiers")
    tier.addoption("--full", action="store_true", help="run the cases marked `full`, too")
    tier.addoption("--quick", action="store_true", help="run only the tests of one process that are over in a moment")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: repeats, for another case, what a test in CI shows; runs with --full")
    config.addinivalue_line("markers", "slow: starts processes, or trains; --quick leaves it out")
    config.addinivalue_line("markers", "shows(framework, *columns): cells of docs/compatibility.md")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    report = yield
    if report.failed or (report.when == "call" and report.passed):
        compatibility.write_down(item, report.passed)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Lets the collector of garbage begin (see above), and leave out what there is by now."""
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def is_slow(path: Path) -> bool:
    """Whether a file or folder has the marker `slow`. It is read, because to import some of them takes long."""
    file = path / "conftest.py" if path.is_dir() else path
    return file.suffix == ".py" and file.exists() and SLOW.search(file.read_text()) is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.getoption("quick") and is_slow(collection_path) else None


@pytest.hookimpl(wrapper=True)
def pytest_collect_directory(path: Path) -> Iterator[Any]:
    """Gives the tests of a folder the marker that its conftest.py has."""
    directory = yield
    if directory is not None and is_slow(path):
        directory.add_marker("slow")
    return directory


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in a hook of its own
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("full"):
        left_out = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        draw_fewer_examples({item.obj for item in items if isinstance(item, pytest.Function)})
    items.sort(key=_turn)
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            item.add_marker(pytest.mark.xdist_group(_group(item)))


def draw_fewer_examples(tests: Iterable[Any]) -> None:
    """Leaves tests by hypothesis a quarter of their examples, and 10 at least. CI draws others each time it runs."""
    for test in (test for test in tests if hasattr(test, "hypothesis")):
        # No public way changes the number of one that has its own. requirements.txt pins hypothesis.
        whole: hypothesis.settings = test._hypothesis_internal_use_settings
        fewer = min(whole.max_examples, max(10, whole.max_examples // 4))
        test._hypothesis_internal_use_settings = hypothesis.settings(whole, max_examples=fewer)


def _world(item: pytest.Item) -> int:
    """The number of ranks that a test runs on; 0 for one process."""
    marks: Iterable[pytest.Mark] = item.iter_markers("world")
    return next((mark.args[0] for mark in marks), 0)


def _is_on_simulated_hosts(item: pytest.Item) -> bool:
    return "job_server" in getattr(item, "fixturenames", ())


def _turn(item: pytest.Item) -> tuple[int, int]:
    """The long files first, then those on simulated hosts and on several ranks, then the rest as it stands."""
    if item.path.name in LONG:
        return (0, LONG.index(item.path.name))
    if _is_on_simulated_hosts(item):
        return (0, len(LONG))
    # Of eight ranks there is little, and a start on two cores takes long.
    return (1, -_world(item)) if _world(item) else (2, 0)


def _group(item: pytest.Item) -> str:
    """What one process of pytest-xdist runs: a file, or the part of a file for one world size.

    There is one group of four ranks, one of eight and one on simulated hosts, so that only one process forks them. A
    test that names a group itself is in a group with both names: pytest-xdist joins them.
    """
    if _is_on_simulated_hosts(item):
        return "simulated hosts"
    if _world(item) >= 4:
        return f"{_world(item)} ranks"
    if _world(item):
        return f"{item.path.stem}, {_world(item)} ranks"
    return str(item.path.relative_to(item.config.rootpath))


@pytest.fixture
def tmp_path(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder of the test: in memory if scripts/test.sh has chosen so, except for the tests of ON_DISK."""
    if "TESTS_DISK" in os.environ and {request.path.parent.name, request.path.name} & ON_DISK:
        with tempfile.TemporaryDirectory(dir=os.environ["TESTS_DISK"], ignore_cleanup_errors=True) as folder:
            yield Path(folder)
    else:
        yield tmp_path


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C as in a terminal. A shell ignores it for what it starts in the background, and so would this process.

    hypothesis has Python call it at each collection of garbage. A KeyboardInterrupt that is raised there is lost.
    """
    before, callbacks = signal.signal(signal.SIGINT, signal.default_int_handler), gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = callbacks
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def run_python(record_property: Callable[[str, object], None]) -> Callable[..., str]:
    """Runs Python in a process of its own, and returns its output. It fails the test if the process fails.

    `run_python("tests/x.py", folder, path=[package])`: `path` goes in front of what else PYTHONPATH has. The durations
    of tests that a pytest reports there are in the summary of this pytest, too.
    """

    def run(*command: object, path: Iterable[object] = ()) -> str:
        folders = [REPOSITORY, *path, os.environ["PYTHONPATH"]]
        # The processes share two cores, and may not share a GPU.
        environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [sys.executable, *map(str, command)],
            cwd=REPOSITORY,
            env=os.environ | environment | {"PYTHONPATH": os.pathsep.join(map(str, folders))},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout
        _, title, durations = done.stdout.partition("slowest durations")
        if title:
            record_property("durations", durations.partition("\n")[2])
        return done.stdout

    return run


@pytest.fixture(scope="session")
def job_server() -> Iterator[Any]:
    """Runs ranks on simulated hosts (tests/support/host_jobs.py)."""
    from tests.support.host_jobs import JobServer

    server = JobServer()
    yield server
    server.close()


@pytest.fixture
def inner_pytest(request: pytest.FixtureRequest) -> list[str]:
    """The arguments of Python that start a pytest in another process, for the same tier as this one."""
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "tmp_path_retention_policy=failed"]
    full = ["--full"] if request.config.getoption("full") else []
    return ["-m", "pytest", *options, "--durations=0", "--durations-min=0.5", *full]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties:
            if name == "durations":
                terminalreporter.section(f"durations in {report.nodeid}")
                terminalreporter.write(text)
