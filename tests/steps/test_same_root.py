"""A root whose path leads elsewhere than at the start of a training: nothing is saved there. A lock that was lost."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist

from mcore_ckpt import CheckpointConfig, CheckpointManager, FastTier
from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import CommitError, LockedError
from mcore_ckpt.io.mounts import Mount
from mcore_ckpt.ranks.rounds import Agreement
from mcore_ckpt.save import rank_files
from mcore_ckpt.steps import commit, same_root, trainer_lock
from mcore_ckpt.steps.same_root import SameRoot
from mcore_ckpt.steps.trainer_lock import ToolLocks, TrainerLock
from tests.support.checkpoints import ROLE, begin, finish, read_version
from tests.support.mounting import mounted
from tests.support.unsharded_model import Model


def names_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A mounted disk, which a test may unmount."""
    place = tmp_path / "disk"
    with mounted(place, "-t", "tmpfs", "tmpfs"):
        yield place
        if not os.path.ismount(place):  # for the end
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(place)], check=True)


def unmount(place: Path) -> None:
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("below", ["", "runs/1"])
@pytest.mark.parametrize("has_saved", [True, False])
def test_a_disk_that_is_gone(disk: Path, below: str, has_saved: bool) -> None:
    """The empty folder that it was mounted on is not the root, and is not filled."""
    lock = TrainerLock(disk / below, ROLE)
    if has_saved:
        lock.take(0)
        lock.take(0)
    unmount(disk)
    with pytest.raises(CommitError, match=rf"^{disk}: is not the folder .* \(tmpfs on {disk}\) was unmounted, or"):
        lock.take(0)
    assert names_below(disk) == []
    lock.release()


def test_a_folder_that_was_bound_to_the_root(tmp_path: Path) -> None:
    """Both are on one device, so the inode says it, and the list of mounts what happened."""
    (tmp_path / "real").mkdir()
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(mounted(tmp_path / "root", "--bind", str(tmp_path / "real")))
        lock = TrainerLock(root, ROLE)
        stack.callback(lock.release)
        lock.take(0)
        subprocess.run(["umount", str(root)], check=True)
        stack.callback(subprocess.run, ["mount", "--bind", str(tmp_path / "real"), str(root)], check=True)
        with pytest.raises(CommitError, match="was unmounted, or something was mounted over it"):
            lock.take(0)
        assert names_below(root) == []


def test_a_root_that_is_mounted_over(tmp_path: Path) -> None:
    root = SameRoot(tmp_path / "root")
    with mounted(tmp_path / "root", "-t", "tmpfs", "tmpfs"):
        root.check()  # there was none when the training began
    lock = TrainerLock(tmp_path / "root", ROLE)
    with mounted(tmp_path / "root", "-t", "tmpfs", "tmpfs"), pytest.raises(CommitError, match="mounted over"):
        lock.take(0)


def test_a_link_that_is_pointed_elsewhere(tmp_path: Path) -> None:
    """It was followed without the lock of the folder that it leads to, which another trainer may have."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    link = tmp_path / "root"
    link.symlink_to("one")
    lock = TrainerLock(link, ROLE)
    lock.take(0)
    point(link, tmp_path / "other")
    with pytest.raises(CommitError, match=rf"a link leads to {tmp_path / 'other'} instead of {tmp_path / 'one'}"):
        lock.take(0)
    assert names_below(tmp_path / "other") == []
    point(link, tmp_path / "one")
    lock.take(0)
    lock.release()


def point(link: Path, target: Path) -> None:
    link.unlink()
    link.symlink_to(target)


def test_a_folder_that_was_replaced(tmp_path: Path) -> None:
    root = tmp_path / "root"
    lock = TrainerLock(root, ROLE)
    lock.take(0)
    lock.take(0)
    root.rename(tmp_path / "old")
    root.mkdir()
    with pytest.raises(CommitError, match="it was replaced"):
        lock.take(0)
    root.rmdir()
    (tmp_path / "old").rename(root)
    lock.take(0)
    lock.release()


@pytest.mark.parametrize("levels", [1, 2])
def test_a_root_that_was_deleted_is_made_again(tmp_path: Path, levels: int) -> None:
    root = tmp_path / "runs" / "1"
    lock = TrainerLock(root, ROLE)
    for _ in range(3):
        lock.take(0)
        lock.take(0)
        shutil.rmtree((root, root.parent)[levels - 1])
    lock.take(0)
    lock.release()


NFS = Mount("nfs4", "server:/export", "/ckpt")
SSHFS = Mount("fuse.sshfs", "host:/", "/ckpt")
EXT4 = Mount("ext4", "/dev/sda1", "/ckpt")
FIRST = same_root._Folder(50, 7, "/ckpt/run", None)


@pytest.mark.parametrize(
    ("mount", "now", "is_same"),
    [
        (NFS, replace(FIRST, device=51, mount=NFS), True),  # an automounter has mounted it again
        (NFS, replace(FIRST, device=51, mount=replace(NFS, source="server:/other")), False),
        (NFS, replace(FIRST, device=51, inode=8, mount=NFS), False),
        (NFS, replace(FIRST, device=51, mount=EXT4), False),
        (SSHFS, replace(FIRST, inode=9, mount=SSHFS), True),  # it has forgotten the folder's number
        (SSHFS, replace(FIRST, inode=9, target="/ckpt/other", mount=SSHFS), False),
        (SSHFS, replace(FIRST, device=51, inode=9, mount=EXT4), False),
        (EXT4, replace(FIRST, device=51, mount=EXT4), False),
        (EXT4, replace(FIRST, inode=8, mount=EXT4), False),
        (None, replace(FIRST, device=51), False),
    ],
)
def test_file_systems_that_number_their_folders_anew(
    mount: Mount | None, now: same_root._Folder, is_same: bool
) -> None:
    assert replace(FIRST, mount=mount).is_same(now) == is_same


@pytest.fixture
def elsewhere(tmp_path: Path) -> Callable[[], None]:
    """Points the link `root` to another folder."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "root").symlink_to("one")
    return lambda: point(tmp_path / "root", tmp_path / "other")


def manager_of(tmp_path: Path, tier: FastTier | None = None) -> CheckpointManager:
    return CheckpointManager(
        tmp_path / "root", Model(), config=CheckpointConfig(save_contents=("model",), timeout_s=20, fast=tier)
    )


@pytest.mark.parametrize(
    ("module", "after", "has_lock"),
    [
        (None, "", True),
        (commit, "open_staging", False),
        (rank_files, "sync_names", False),
        (commit, "write_manifest", True),
    ],
)
def test_a_save_whose_root_changes(
    tmp_path: Path,
    elsewhere: Callable[[], None],
    module: ModuleType | None,
    after: str,
    has_lock: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 looks before it opens a save and before it commits one, each rank before it writes and after."""
    manager = manager_of(tmp_path)
    manager.save(1)
    if not has_lock:  # as all ranks but rank 0
        monkeypatch.setattr(TrainerLock, "take", lambda lock, patience_s: None)
    if module is None:
        elsewhere()
    else:
        does = getattr(module, after)
        monkeypatch.setattr(module, after, lambda *arguments: (does(*arguments), elsewhere()))
    with pytest.raises(CommitError, match="is not the folder that this trainer has begun with: a link leads"):
        manager.save(2)
    assert names_below(tmp_path / "other") == []
    monkeypatch.undo()
    point(tmp_path / "root", tmp_path / "one")
    manager.save(3)
    manager.close()


@pytest.mark.parametrize("below", ["", "tier"])
def test_a_node_s_folder_that_is_gone(tmp_path: Path, disk: Path, below: str) -> None:
    """Its own disk, or its memory, holds the fast tier."""
    disk.chmod(0o700)
    manager = manager_of(tmp_path, FastTier(disk / below, replicas=0, durable_every=None))
    manager.save(1)
    unmount(disk)
    with pytest.raises(CommitError, match="was unmounted"):
        manager.save(2)
    assert names_below(disk) == []
    manager.close()


@pytest.mark.parametrize("has_saved", [True, False])
def test_a_root_that_is_gone_while_nodes_save(tmp_path: Path, disk: Path, has_saved: bool) -> None:
    """Once the run is known, saves to the nodes go on. Neither the run nor a tracker is written to the empty folder."""
    (tmp_path / "root").symlink_to(disk)
    manager = manager_of(tmp_path, FastTier(tmp_path / "node", replicas=0, durable_every=100))
    place = tmp_path / "root" / "global_step_1" / "actor"
    if has_saved:
        manager.save(1, path=place)
        assert place.parent.is_dir()
    unmount(disk)
    with contextlib.nullcontext() if has_saved else pytest.raises(CommitError, match="was unmounted"):
        manager.save(2, path=tmp_path / "root" / "global_step_2" / "actor")
    assert names_below(disk) == []
    manager.close()


# -- who holds the lock, right before the rename -------------------------------------------------------------


def claimed(path: Path, generation: int | None) -> None:
    more = "" if generation is None else f', "generation": {generation}'
    path.write_text(f'{{"host": "node7 b pid:[1]", "pid": 4321, "start": 99, "claim": "{"f" * 32}"{more}}}')


@pytest.mark.parametrize(("before", "after"), [(None, 1), (7, 8)])
def test_each_takeover_has_a_greater_number(
    tmp_path: Path, before: int | None, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_lock, "TRAINER_LEASE_S", 0.0)
    path = file_names.trainer_file(tmp_path, ROLE)
    claimed(path, before)
    lock = TrainerLock(tmp_path, ROLE)
    lock.take(0)
    assert trainer_lock.read_claim(path).generation == after  # type: ignore[union-attr]
    path.unlink()
    lock.take(0)
    assert trainer_lock.read_claim(path).generation == after + 1  # type: ignore[union-attr]
    lock.release()


def test_a_lock_that_is_lost_after_the_last_word_of_all_ranks(tmp_path: Path) -> None:
    """Between the manifest and the rename the ranks answer, and a machine may be suspended."""
    agreement = Agreement(dist.HashStore(), 0, 1, "test", 30.0)  # type: ignore[attr-defined]
    lock = TrainerLock(tmp_path, ROLE)
    lock.take(0)
    attempt = begin(agreement, tmp_path, 1)

    def lose() -> None:
        claimed(file_names.trainer_file(tmp_path, ROLE), 2)
        lock.take(0)

    with pytest.raises(LockedError, match="process 4321 on node7"):
        finish(agreement, attempt, tmp_path, 1, 1, may_commit=lose)
    assert not attempt.role_dir.exists()
    assert not attempt.staging.exists()
    lock.release()
    file_names.trainer_file(tmp_path, ROLE).unlink()
    finish(agreement, begin(agreement, tmp_path, 2), tmp_path, 2, 2, may_commit=lambda: lock.take(0))
    assert read_version(file_names.step_dir(tmp_path, 2) / ROLE) == 2
    lock.release()


def test_a_tool_that_has_lost_its_lock(tmp_path: Path) -> None:
    with ToolLocks(tmp_path, [ROLE]) as locks:
        locks.keep()
        claimed(file_names.trainer_file(tmp_path, ROLE), 2)
        with pytest.raises(LockedError):
            locks.keep()
