"""Runs each of these tests on as many ranks as its mark says: `@pytest.mark.world(2)`.

`pytest tests/distributed` runs them on forked ranks (rank_server.py), and each test is one test of that pytest.
`torchrun --nproc_per_node N -m pytest tests/distributed` makes each process of torchrun a rank, and runs the tests of
this world size: on GPUs, if there is one for each rank. A test passes on all ranks or fails on all.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SERVER = pytest.StashKey["Server"]()

UNDER_TORCHRUN = "WORLD_SIZE" in os.environ


def _is_rank(config: pytest.Config) -> bool:
    """Whether tests run in this process, or in forks of it."""
    return UNDER_TORCHRUN or config.pluginmanager.hasplugin("rank_server")


class Server:
    """The process that runs the tests (rank_server.py)."""

    def __init__(self, config: pytest.Config) -> None:
        self._folder = tempfile.mkdtemp(prefix="ranks-")
        read, write = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "rank_server.py"), str(write), self._folder, *_paths(config)],
            cwd=config.rootpath,
            env=os.environ
            | {
                "OMP_NUM_THREADS": "1",
                # The forked ranks would share what there is.
                "CUDA_VISIBLE_DEVICES": "",
            },
            pass_fds=[write],
            stdin=subprocess.PIPE,
            stdout=(log := open(self._log, "w")),  # noqa: SIM115  # the process has it for as long as it lives
            stderr=subprocess.STDOUT,
            text=True,
        )
        log.close()
        os.close(write)
        self._replies = os.fdopen(read)
        self._collected: dict[str, Any] | None = None

    @property
    def _log(self) -> Path:
        return Path(self._folder) / "server.log"

    @property
    def has_died(self) -> bool:
        return self._process.poll() is not None

    def tests(self, file: str) -> list[dict[str, Any]]:
        """The tests of a file, as the server describes them."""
        if self._collected is None:
            self._collected = self._reply()
        if file in self._collected["errors"]:
            raise pytest.Collector.CollectError(self._collected["errors"][file])
        return [test for test in self._collected["tests"] if test["file"] == file]

    def run(self, test: str) -> dict[str, str]:
        if self._collected is None:  # a server that takes the place of one that has died
            self._collected = self._reply()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"id": test}) + "\n")
        self._process.stdin.flush()
        return self._reply()

    def close(self) -> None:
        self._process.communicate()
        self._replies.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _reply(self) -> Any:
        line = self._replies.readline()
        if not line:
            code = self._process.wait()
            raise RuntimeError(f"the server of the ranks has ended with {code}:\n{self._log.read_text()}")
        return json.loads(line)


def _paths(config: pytest.Config) -> set[str]:
    """The files to collect: those that were asked for, or all."""
    asked = {Path(config.invocation_params.dir, arg.partition("::")[0]) for arg in config.args}
    return {str(path) for path in asked if path.is_relative_to(HERE) and path != HERE} or {str(HERE)}


def _server(config: pytest.Config) -> Server:
    """The server: a new one if there is none yet, or if it has died."""
    server = config.stash.get(SERVER, None)
    if server is not None and server.has_died:
        server.close()
        server = None
    if server is None:
        server = config.stash[SERVER] = Server(config)
    return server


class RanksFile(pytest.File):
    """A file of tests for several ranks. The server imports it, and this process does not."""

    def collect(self) -> Iterator["RanksTest"]:
        server = _server(self.config)
        for test in server.tests(self.nodeid):
            item = RanksTest.from_parent(self, name=test["name"])
            item.test = test["id"]
            if test["world"] is not None:
                item.add_marker(pytest.mark.world(test["world"]))
            for mark in test["marks"]:
                item.add_marker(mark)
            for shown in test["shows"]:
                item.add_marker(pytest.mark.shows(*shown))
            yield item


class RanksFailed(Exception):
    """A test has failed on a rank, whose report is the message."""


class RanksTest(pytest.Item):
    """A test that the server runs on several ranks."""

    test: str

    def runtest(self) -> None:
        reply = _server(self.config).run(self.test)
        if reply["outcome"] == "skipped":
            pytest.skip(reply["text"])
        if reply["outcome"] == "failed":
            raise RanksFailed(reply["text"])

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, RanksFailed):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> Any:
    return None if _is_rank(parent.config) else RanksFile.from_parent(parent, path=module_path)


@pytest.hookimpl(tryfirst=True)  # before pytest makes its folders
def pytest_cmdline_main(config: pytest.Config) -> None:
    if UNDER_TORCHRUN:
        # Each process cleans pytest's numbered folders up at its end: ranks that share them race, and one fails.
        config.option.basetemp = tempfile.mkdtemp(prefix=f"rank{os.environ['RANK']}-")


@pytest.hookimpl(trylast=True)  # after the terminal reporter has been registered
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "world(size): the number of ranks that this test runs on")
    if not _is_rank(config):
        return
    from tests.distributed import rank_setup

    for warning in rank_setup.QUIET:
        config.addinivalue_line("filterwarnings", warning)
    if UNDER_TORCHRUN:
        rank_setup.hide_devices_from_too_many_ranks()
        rank_setup.set_up(config)
        if int(os.environ["RANK"]) > 0:
            # Rank 0 reports for all (rank_setup.alike).
            config.pluginmanager.unregister(name="terminalreporter")


def pytest_unconfigure(config: pytest.Config) -> None:
    server = config.stash.get(SERVER, None)
    if server is not None:
        server.close()
    if UNDER_TORCHRUN:
        import torch.distributed as dist

        from tests.distributed import rank_setup

        # torchrun ends all ranks when one has failed: let rank 0 report first.
        dist.barrier(group=config.stash[rank_setup.AGREEMENT_GROUP])
        dist.destroy_process_group()
        shutil.rmtree(config.option.basetemp, ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not UNDER_TORCHRUN:
        return
    world = int(os.environ["WORLD_SIZE"])
    others = [item for item in items if [mark.args[0] for mark in item.iter_markers("world")] != [world]]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


def _alike(item: pytest.Item) -> Generator[None, None, None]:
    if not _is_rank(item.config):
        yield
        return
    from tests.distributed import rank_setup

    yield from rank_setup.alike(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    yield from _alike(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    yield from _alike(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    yield from _alike(item)


@pytest.fixture
def shared_path(tmp_path: Path) -> Path:
    """One folder for all ranks: rank 0's."""
    import torch.distributed as dist

    paths: list[Path] = [tmp_path]
    dist.broadcast_object_list(paths, src=0)
    return paths[0]
