"""Ranks that do not see one file system: said at the first save, by name of rank and path. Two mount namespaces."""

import ctypes
import json
import os
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest
import torch.distributed as dist

from mcore_ckpt.io import tuning
from mcore_ckpt.ranks.rounds import Agreement
from tests.support.checkpoints import SMALL_KNOBS, save_together

WORLD = 2
CLONE_NEWNS = 0x00020000
TIMEOUT_S = 20.0


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


def see_another_disk(place: Path) -> None:
    """From here on this process sees a file system of its own at `place`. Raises if it may not mount one."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0:
        raise PermissionError(ctypes.get_errno(), "unshare")
    mount("--make-rprivate", "/")
    mount("-t", "tmpfs", "tmpfs", str(place))


def run_rank(rank: int, apart: int, port: int, root: Path, results: Path) -> NoReturn:
    try:
        if rank == apart:
            try:
                see_another_disk(root)
            except (PermissionError, subprocess.CalledProcessError):
                os._exit(77)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
        agreement = Agreement(store, rank, WORLD, "test", TIMEOUT_S)
        told = None
        try:
            save_together(agreement, root, 1, 1)
        except Exception as error:
            told = [type(error).__name__, str(error)]
        (results / str(rank)).write_text(json.dumps(told))
    finally:
        os._exit(0)


@pytest.mark.parametrize("apart", [0, 1])
@pytest.mark.parametrize("step_is_there", [False, True])
def test_ranks_with_a_disk_of_their_own(
    apart: int, step_is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SMALL_KNOBS.items():
        monkeypatch.setattr(tuning, name, value)
    root, results = tmp_path / "root", tmp_path / "results"
    for folder in (root, results):
        folder.mkdir()
    if step_is_there:
        (root / "global_steps_1").mkdir()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    pids = []
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            run_rank(rank, apart, store.port, root, results)
        pids.append(pid)
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if 77 in ends:
        pytest.skip("no mount namespaces here")
    for rank in range(WORLD):
        kind, message = json.loads((results / str(rank)).read_text())
        assert kind == "CommitError"
        assert "rank 1: " in message
        assert f"{root}/global_steps_1/.actor.staging-" in message
        assert "all ranks must save to one shared file system" in message
    assert [path for path in root.rglob("*") if path.is_file()] == []
