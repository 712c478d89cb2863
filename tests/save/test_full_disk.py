"""A save that does not fit is refused before its first byte, on real small disks; one that fits is never refused."""

import errno
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_ckpt import CheckpointConfig, CheckpointManager
from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import CommitError, LockedError, NoRoomError
from mcore_ckpt.io import tuning
from mcore_ckpt.save.root_commit import OldSteps
from mcore_ckpt.steps import commit, space_watch, trainer_lock
from mcore_ckpt.steps.listing import StepStatus, complete_steps
from mcore_ckpt.steps.space_watch import SpaceWatch
from mcore_ckpt.steps.step_sizes import StepNeed
from tests.support.small_disks import NOBODY, as_nobody, bytes_below, ext4, fill, mounted, set_quota, tmpfs
from tests.support.unsharded_model import sharded_state_dict
from tests.support.waiting import LONG_S, join_threads

BLOCK = 4096
# How many blocks the estimate may be too low: manifest and CRCs are known only when they are written.
UNKNOWN = 3


class Model(torch.nn.Module):
    """As much of a megatron model as saving looks at, of 1 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_layers=1)
        self.weight = torch.nn.Parameter(torch.rand(512, 512))

    def sharded_state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
        return sharded_state_dict(self)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "SPACE_SETTLES_S", 0.0)


@pytest.fixture(scope="module", autouse=True)
def imports(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Everything is imported by one save here, because another user may not read the packages."""
    manager = manager_in(tmp_path_factory.mktemp("imports"))
    save(manager, 1)
    manager.close()


def manager_in(root: Path, role: str = "actor", **config: Any) -> CheckpointManager:
    words = CheckpointConfig(save_contents=("model", "extra"), load_contents=("model",), **config)
    return CheckpointManager(root, Model(), role=role, config=words)


def save(manager: CheckpointManager, step: int) -> None:
    manager.save(step, extra_state={"seen": step}).wait()


def peak_of(step_path: Path) -> tuple[int, int]:
    """The bytes and the files and folders that a save takes just before its commit: also the owner file."""
    own = step_path.stat().st_blocks * 512
    return own + bytes_below(step_path) + BLOCK, len(list(step_path.rglob("*"))) + 2


def steps_in(root: Path) -> list[int]:
    return [status.step for status in complete_steps(root)]


def assert_refused(manager: CheckpointManager, step: int, *words: str) -> None:
    """The save raises, says why with numbers, and has not made even a folder."""
    before = files_in(manager.root)
    with pytest.raises(NoRoomError) as caught:
        save(manager, step)
    for word in ("does not fit", "are needed, but only", "Nothing has been written", *words):
        assert word in str(caught.value)
    assert isinstance(caught.value, CommitError)
    assert files_in(manager.root) == before


def files_in(root: Path) -> list[Path]:
    """All files and folders but the trainer's lock, which the first save takes."""
    return sorted(path for path in root.rglob("*") if not path.name.endswith(".trainer.json"))


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A folder that another user may enter, as pytest's may not be."""
    path = Path(tempfile.mkdtemp(dir=os.environ.get("TESTS_DISK")))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, open_path: Path) -> Iterator[Path]:
    with ExitStack() as stack:
        make = tmpfs if request.param == "tmpfs" else ext4
        yield stack.enter_context(make(open_path / "disk"))


def leave(disk: Path, nbytes: int) -> None:
    """Fills the disk until so many bytes are free, as `df` shows them to a user without reserved blocks."""
    (disk / "ballast").unlink(missing_ok=True)
    os.sync()
    space = os.statvfs(disk)
    size = space.f_bavail * space.f_frsize - nbytes
    ballast = fill(disk, size)
    lack = nbytes - os.statvfs(disk).f_bavail * space.f_frsize  # a large file takes blocks for its extents, too
    os.truncate(ballast, size - lack)
    os.sync()
    assert os.statvfs(disk).f_bavail * space.f_frsize == nbytes


@pytest.mark.parametrize("step", [1, 2], ids=["again", "next"])
def test_the_last_byte_decides(disk: Path, step: int) -> None:
    """As another user, because root may use what ext4 keeps for it."""
    (disk / "root").mkdir()
    (disk / "root").chmod(0o777)
    with as_nobody():
        manager = manager_in(disk / "root")
        save(manager, 1)
    needed, _ = peak_of(file_names.step_dir(manager.root, 1))
    if step == 1:  # then its folder is there already
        needed -= file_names.step_dir(manager.root, 1).stat().st_blocks * 512
    for spare, fits in ((-(UNKNOWN + 1), False), (-100, False), (0, True)):
        leave(disk, needed + spare * BLOCK)
        with as_nobody():
            if fits:
                save(manager, step)
            else:
                assert_refused(manager, step, "bytes are free (file system of")
    assert steps_in(manager.root) == [*range(1, step + 1)]
    with as_nobody():
        manager.close()


def test_a_first_save_on_a_disk_without_any_space(tmp_path: Path) -> None:
    """Even the trainer's lock does not fit. Nothing could be deleted, and the message says so."""
    with tmpfs(tmp_path / "disk", "1m") as disk:
        manager = manager_in(disk / "root")
        leave(disk, 0)
        assert_refused(manager, 1, "but only 0 bytes are free", "no step below")
        (disk / "ballast").unlink()
        with pytest.raises(NoRoomError, match="does not fit"):
            save(manager, 1)
        assert not manager.root.exists() or steps_in(manager.root) == []
        manager.close()


def test_inodes(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", files=100) as disk:
        manager = manager_in(disk / "root")
        save(manager, 1)
        _, entries = peak_of(file_names.step_dir(manager.root, 1))
        for number in range(os.statvfs(disk).f_ffree - entries + 1):
            (disk / f"{number}").touch()
        assert os.statvfs(disk).f_ffree == entries - 1
        assert_refused(manager, 2, f"{entries} files and folders are needed, but only {entries - 1} are", "inodes")
        (disk / "0").unlink()
        save(manager, 2)
        manager.close()


def test_blocks_that_are_reserved_for_root(open_path: Path) -> None:
    with ext4(open_path / "disk", "-m", "40", "-O", "^has_journal") as disk:
        (disk / "root").mkdir()
        (disk / "root").chmod(0o777)
        leave(disk, 8 * BLOCK)
        with as_nobody():
            manager = manager_in(disk / "root")
            assert_refused(manager, 1)
        save(manager, 1)
        assert steps_in(manager.root) == [1]
        manager.close()


@pytest.mark.parametrize("kind", ["user", "group"])
@pytest.mark.parametrize("what", ["bytes", "files"])
def test_quotas(open_path: Path, kind: str, what: str) -> None:
    """Hard limits count, the others do not, and none does for root."""
    option = {"user": "usrquota", "group": "grpquota"}[kind]
    with ext4(open_path / "disk", "-O", "quota", options=f"loop,{option}") as disk:
        (disk / "root").mkdir()
        (disk / "root").chmod(0o777)
        with as_nobody():
            manager = manager_in(disk / "root")
            save(manager, 1)
        nbytes, entries = peak_of(file_names.step_dir(manager.root, 1))
        # The lock and the step's parent are there already.
        used, files = bytes_below(disk / "root"), len(list((disk / "root").rglob("*")))
        hard = {"nbytes": used + nbytes} if what == "bytes" else {"files": files + entries}
        less = {"nbytes": used + nbytes - (UNKNOWN + 1) * BLOCK} if what == "bytes" else {"files": files + entries - 1}
        set_quota(disk, kind, NOBODY, **less)
        with as_nobody():
            assert_refused(manager, 2, f"quota of {kind} {NOBODY}", *(["inodes"] if what == "files" else []))
        set_quota(disk, kind, NOBODY, **hard, soft=BLOCK)
        with as_nobody():
            save(manager, 2)
        set_quota(disk, kind, NOBODY, **less)
        save(manager, 3)
        assert steps_in(manager.root) == [1, 2, 3]
        manager.close()


@pytest.mark.parametrize("warns", [True, False], ids=["warn", "raise"])
def test_an_asynchronous_save(tmp_path: Path, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    """With "warn" training goes on as after every other failure. Either way the next save works."""
    with tmpfs(tmp_path / "disk") as disk:
        manager = manager_in(disk / "root", async_save=True, if_failed="warn" if warns else "raise")
        save(manager, 1)
        leave(disk, 100 * BLOCK)
        if warns:
            handle = manager.save(2)
            assert handle.done
            assert not handle.committed
            assert isinstance(handle.exception, NoRoomError)
            assert "training continues without this checkpoint" in caplog.text
        else:
            assert_refused(manager, 2)
        (disk / "ballast").unlink()
        save(manager, 3)
        assert steps_in(manager.root) == [1, 3]
        manager.close()


def test_several_roles(tmp_path: Path) -> None:
    """The second role is refused when the first has taken the space, and its step can be completed later."""
    with tmpfs(tmp_path / "disk") as disk:
        roles = ("actor", "critic")
        actor, critic = (manager_in(disk / "root", role, roles=roles) for role in roles)
        save(actor, 1)
        save(critic, 1)
        needed, _ = peak_of(file_names.step_dir(actor.root, 1) / "actor")
        leave(disk, needed + needed // 2)
        save(actor, 2)
        assert_refused(critic, 2, "global_steps_2/critic")
        assert steps_in(actor.root) == [1]
        (disk / "ballast").unlink()
        save(critic, 2)
        assert steps_in(actor.root) == [1, 2]
        actor.close()
        critic.close()


class HeldDeletions:
    """Holds up the deletion of old steps until the test lets it go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go_on = threading.Event()
        delete = OldSteps.delete

        def held(old: OldSteps) -> None:
            assert self.may_go_on.wait(LONG_S)
            delete(old)

        monkeypatch.setattr(OldSteps, "delete", held)


def test_deletions_under_way_free_space_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tmpfs(tmp_path / "disk", "2500k") as disk:
        deletions = HeldDeletions(monkeypatch)
        manager = manager_in(disk / "root", max_to_keep=1)
        save(manager, 1)
        save(manager, 2)
        saving = threading.Thread(target=lambda: save(manager, 3), daemon=True)
        saving.start()
        saving.join(0.3)
        assert saving.is_alive(), "step 1 is still being deleted, so the save waits"
        deletions.may_go_on.set()
        saving.join(LONG_S)
        manager.wait()
        assert steps_in(manager.root) == [3]
        manager.close()


def test_a_deletion_that_takes_too_long_does_not_refuse_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may still free enough in time. Here it does not, and the disk's own error ends the save."""
    with tmpfs(tmp_path / "disk", "2500k") as disk:
        deletions = HeldDeletions(monkeypatch)
        manager = manager_in(disk / "root", max_to_keep=1, timeout_s=1.0)
        save(manager, 1)
        save(manager, 2)
        with pytest.raises(CommitError, match="No space left on device"):
            save(manager, 3)
        assert "old steps are still being deleted" in caplog.text
        deletions.may_go_on.set()
        manager.wait()
        save(manager, 3)
        manager.close()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of the saves that were opened."""
    folders, opening = list[Path](), commit.open_staging

    def open_staging(role_dir: Path, attempt: str, mode: int | None = None) -> Path:
        folders.append(role_dir)
        return opening(role_dir, attempt, mode)

    monkeypatch.setattr(commit, "open_staging", open_staging)
    return folders


def test_whose_lock_is_taken_over_while_it_waits_for_space_opens_no_save(
    tmp_path: Path, opened: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = manager_in(tmp_path)
    save(manager, 1)
    lock = file_names.trainer_file(tmp_path, "actor")
    check = SpaceWatch.check

    def check_late(*arguments: Any) -> None:
        check(*arguments)
        record = json.loads(lock.read_text())
        lock.write_text(json.dumps(record | {"host": "node7 boot pid:[1]", "claim": "0"}))

    with monkeypatch.context() as patch:
        patch.setattr(SpaceWatch, "check", check_late)
        with pytest.raises(LockedError, match="on node7 saves actor here"):
            save(manager, 2)
    assert [folder.parent.name for folder in opened] == ["global_steps_1"]
    lock.unlink()
    save(manager, 3)
    manager.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_is_full_only_for_a_moment_takes_the_lock_later(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deletion frees space while the save waits for it. Another error of the disk ends the save."""
    claim, errors = trainer_lock.claim_file, iter([OSError(number, os.strerror(number))])

    def claim_late(path: Path, data: bytes) -> None:
        for error in errors:
            raise error
        claim(path, data)

    monkeypatch.setattr(trainer_lock, "claim_file", claim_late)
    manager = manager_in(tmp_path)
    if number == errno.EIO:
        with pytest.raises(CommitError, match="Input/output error"):
            save(manager, 1)
    else:
        save(manager, 1)
        assert file_names.trainer_file(tmp_path, "actor").exists()
        assert steps_in(tmp_path) == [1]
    manager.close()


def test_what_prune_would_free_is_told(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk") as disk:
        manager = manager_in(disk / "root")
        for step in (1, 2, 3):
            save(manager, step)
        taken = bytes_below(file_names.step_dir(manager.root, 1) / "actor")
        leave(disk, 100 * BLOCK)
        told = f"prune {manager.root} --max-to-keep 1' would delete 2 steps with {2 * taken:,} bytes"
        assert_refused(manager, 4, told, "Free at least")
        shutil.rmtree(file_names.step_dir(manager.root, 1))
        save(manager, 4)
        manager.close()


WILL_NOT = "the next one will not"


def wait_for_looks(manager: CheckpointManager) -> None:
    """Waits until old steps are deleted, and until it is known whether the next save will fit."""
    manager.wait()
    join_threads("mcore_ckpt next save")


@pytest.mark.parametrize(("size", "keep", "warned_at"), [("2500k", 1, []), ("2500k", 2, [2]), ("3500k", None, [3])])
def test_the_next_save_is_foreseen(
    tmp_path: Path, size: str, keep: int | None, warned_at: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, at the last save that fits. What is deleted after the commit counts."""
    with tmpfs(tmp_path / "disk", size) as disk:
        manager = manager_in(disk / "root", max_to_keep=keep)
        found = []
        for step in (1, 2, 3):
            caplog.clear()
            if step == 3 and warned_at == [2]:
                assert_refused(manager, step)
                continue
            save(manager, step)
            wait_for_looks(manager)
            if WILL_NOT in caplog.text:
                found.append(step)
        assert found == warned_at
        manager.close()


def test_a_warning_is_repeated_only_after_a_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The trainer deletes the oldest step by hand, so that each save fits and the one after it would not."""
    with tmpfs(tmp_path / "disk", "2500k") as disk:
        manager = manager_in(disk / "root")
        save(manager, 1)
        counts = []
        for step in (2, 3, 4, 5):
            manager.save(step, max_to_keep=1 if step == 4 else None)
            wait_for_looks(manager)
            counts.append(caplog.text.count(WILL_NOT))
            for old in steps_in(manager.root)[:-1]:
                shutil.rmtree(file_names.step_dir(manager.root, old))
        manager.close()
    assert counts == [1, 1, 1, 2], "step 4 frees what it is too old itself"


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_saves_without_a_pause_are_warned_of_one_save_earlier(
    tmp_path: Path, is_async: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each begins as soon as the last one is committed, so no look after it could wait for space."""
    monkeypatch.setattr(tuning, "SPACE_SETTLES_S", 0.5)
    with tmpfs(tmp_path / "disk") as disk:
        manager = manager_in(disk / "root", async_save=is_async)
        for step in range(1, 20):
            try:
                save(manager, step)
            except NoRoomError:
                break
        manager.close()
    warnings = [record.getMessage() for record in caplog.records if WILL_NOT in record.getMessage()]
    assert len(warnings) == 1
    assert f"global_steps_{step - 1}/actor: this save fits" in warnings[0]


@pytest.mark.parametrize("roles", [("actor",), ("actor", "critic")])
def test_a_disk_for_just_so_many_steps_is_not_warned_about(
    tmp_path: Path, roles: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Three steps fit, and two are kept. Each commit leaves no space until the oldest step is deleted.

    What the actor leaves for the smaller critic would not be enough for the actor again.
    """
    monkeypatch.setattr(tuning, "SPACE_SETTLES_S", 0.5)  # the critic's deletion begins a moment after its commit
    with tmpfs(tmp_path / "disk", "16m") as disk:
        managers = [manager_in(disk / "root", role, roles=roles, max_to_keep=2) for role in roles]
        for smaller in managers[1:]:
            smaller._trainer.chunks[0].weight = torch.nn.Parameter(torch.rand(256, 512))
        for step in range(1, 8):
            for manager in managers:
                save(manager, step)
            if step == 2:
                for manager in managers:
                    wait_for_looks(manager)
                nbytes, _ = peak_of(file_names.step_dir(managers[0].root, step))
                leave(disk, nbytes)
        for manager in managers:
            wait_for_looks(manager)
        assert WILL_NOT not in caplog.text
        assert steps_in(managers[0].root) == [6, 7]
        for manager in managers:
            manager.close()


class HeldLook:
    """Holds up the look whether the next save will fit, as a manifest of thousands of ranks does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        need_of = space_watch.need_of

        def held(status: StepStatus) -> StepNeed:
            self.begun.set()
            assert self.may_go_on.wait(LONG_S)
            return need_of(status)

        monkeypatch.setattr(space_watch, "need_of", held)

    def end(self) -> None:
        self.may_go_on.set()
        join_threads("mcore_ckpt next save")


def test_a_look_is_no_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A save that does not fit is refused, neither later nor tried. What the look then finds is no longer said."""
    with tmpfs(tmp_path / "disk") as disk:
        look = HeldLook(monkeypatch)
        manager = manager_in(disk / "root", timeout_s=2.0)
        save(manager, 1)
        assert look.begun.wait(LONG_S)
        leave(disk, 100 * BLOCK)
        assert_refused(manager, 2)
        look.end()
        assert WILL_NOT not in caplog.text
        manager.close()


def test_deletions_do_not_wait_for_a_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tmpfs(tmp_path / "disk") as disk:
        look = HeldLook(monkeypatch)
        manager = manager_in(disk / "root", max_to_keep=1)
        save(manager, 1)
        assert look.begun.wait(LONG_S)
        for step in (2, 3):
            save(manager, step)
        manager.wait()
        assert not look.may_go_on.is_set()
        assert steps_in(manager.root) == [3]
        manager.close()
        look.end()


@pytest.mark.full
def test_a_disk_that_compresses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What its system tells is a guess, so the save is tried. Its writer reserves whole files, so the disk says no."""
    image = tmp_path / "disk.img"
    with image.open("wb") as file:
        file.truncate(128 << 20)
    if os.system(f"mkfs.btrfs -q -M {image}") != 0:
        pytest.skip("no mkfs.btrfs here")
    with mounted(tmp_path / "disk", "-o", "loop,compress-force=zstd", str(image)) as disk:
        manager = manager_in(disk / "root")
        manager._trainer.chunks[0].weight = torch.nn.Parameter(torch.zeros(4096, 8192))
        with pytest.raises(CommitError, match="No space left on device") as caught:
            save(manager, 1)
        assert not isinstance(caught.value, NoRoomError)
        assert "may store the files in less space" in caplog.text
        manager.close()
