"""Megatron-LM's rollout bank as a part of the checkpoints of its own loop."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.integrations import megatron as drop_in
from mcore_ckpt.integrations.kit.arguments import Arguments
from mcore_ckpt.integrations.megatron import rollout_bank as module
from mcore_ckpt.io import copy_durably
from mcore_ckpt.state.attached_parts import SavedPart
from tests.distributed.agreement import everywhere
from tests.distributed.test_megatron_loop import CONFIG, DP2, PLAIN, Loop, arguments
from tests.distributed.training import Layout, build, parallel
from tests.integrations.rollout_bank import Banks


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    drop_in.configure(SimpleNamespace(), config=CONFIG)


@pytest.fixture
def banks(monkeypatch: pytest.MonkeyPatch) -> Banks:
    return Banks(monkeypatch)


def started(root: Path, layout: Layout = PLAIN, seed: int = 1, **more: Any) -> Loop:
    """A process that has loaded, and has not made a rollout yet."""
    more = {"rl_durable_rollout_bank": True, "rl_rollout_bank_dir": None, **more}
    loop = Loop(build(layout, seed=seed), arguments(root, **more))
    drop_in.attach_rollout_bank()
    loop.load()
    return loop


def one_life(loop: Loop, banks: Banks, root: Path, iterations: int) -> None:
    """Each iteration uses the group that was completed before it. Each is saved; a further group is complete then."""
    (uid,) = banks.complete(10 * loop.iteration)
    for _ in range(iterations):
        loop.train(1)
        banks.use([uid], loop.iteration)
        (uid,) = banks.complete(10 * loop.iteration)
        loop.save()
        drop_in.maybe_finalize_async_save(blocking=True)


@pytest.mark.shows("Megatron-LM", "parts")
@pytest.mark.world(1)
@pytest.mark.parametrize("async_save", [False, True])
def test_a_killed_run_loses_no_group(async_save: bool, shared_path: Path, banks: Banks) -> None:
    root = shared_path / "run"
    with parallel(PLAIN):
        first = started(root, async_save=async_save)
        assert banks.begin(root / "rollout_bank", 0) == []
        one_life(first, banks, root, 2)
        assert sorted(group.batch_id for group in banks.bank.restore(2)) == [20]  # 0 and 10 were used, and compacted
        banks.complete(21)  # after the save; then it is killed
        assert started(root, seed=2).iteration == 2
        assert banks.begin(root / "rollout_bank", 2) == [20, 21]
        banks.complete(22)  # killed again, before a save
        assert started(root, seed=3).iteration == 2
        assert banks.begin(root / "rollout_bank", 2) == [20, 21, 22]


@pytest.mark.shows("Megatron-LM", "parts")
@pytest.mark.world(1)
def test_an_older_step_and_another_folder_get_their_own_groups(shared_path: Path, banks: Banks) -> None:
    """The bank itself has compacted them away, or is gone."""
    root, bank = shared_path / "run", shared_path / "run" / "rollout_bank"
    with parallel(PLAIN):
        first = started(root)
        banks.begin(bank, 0)
        one_life(first, banks, root, 3)
        shutil.copytree(bank, shared_path / "stock")
        stock = Banks.begin(banks, shared_path / "stock", 1)
        assert stock == [30]  # what Megatron-LM itself has after a rollback: a group of newer weights
        rolled = started(root, seed=2, ckpt_step=1)
        assert rolled.iteration == 1
        assert banks.begin(bank, 1) == [10]
        rolled.args.ckpt_step = None
        one_life(rolled, banks, root, 1)
        assert started(root, seed=3).iteration == 2
        assert 30 not in banks.begin(bank, 2)

        scratch = shared_path / "scratch" / "bank"
        assert started(root, seed=4, rl_rollout_bank_dir=str(scratch), ckpt_step=3).iteration == 3
        assert banks.begin(scratch, 3) == [30]


@pytest.mark.world(1)
@pytest.mark.parametrize("most_open", [256, 1], ids=["open", "too-many"])
def test_what_grows_and_goes_while_it_is_copied(
    most_open: int, shared_path: Path, banks: Banks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part is the bank at the call of the save, although its files are gone when they are copied."""
    monkeypatch.setattr(module, "_MOST_OPEN", most_open)
    root, bank = shared_path / "run", shared_path / "run" / "rollout_bank"
    bank_part = drop_in.RolloutBankPart(lambda: drop_in._settings.arguments())
    with parallel(PLAIN):
        started(root)
        banks.begin(bank, 0)
        banks.complete(1, 2)
        before = len(os.listdir("/proc/self/fd"))
        copy = bank_part.save(shared_path / "part")
        assert len(os.listdir("/proc/self/fd")) - before <= most_open
        banks.use(banks.complete(3), 5)
        banks.bank.checkpoint(5)
        assert copy is not None
        copy()
        assert banks.begin(shared_path / "part", 0) == [1, 2]


@pytest.mark.world(1)
def test_finetuning_begins_without_groups_and_other_formats_are_refused(shared_path: Path, banks: Banks) -> None:
    root, bank = shared_path / "run", shared_path / "run" / "rollout_bank"
    with parallel(PLAIN):
        first = started(root)
        first.train(1)
        first.save()  # no bank yet
        assert started(root, seed=2).iteration == 1
        banks.begin(bank, 0)
        one_life(first, banks, root, 1)
        other = shared_path / "other"
        started(root, seed=2, finetune=True, rl_rollout_bank_dir=str(other))
        assert not other.exists()
        last = started(root, seed=3)
        manifest = json.loads((bank / "MANIFEST.json").read_text())
        (bank / "MANIFEST.json").write_text(json.dumps({**manifest, "format_version": 3}))
        for call in (last.save, last.load):
            with pytest.raises(UnsupportedError, match="has format 3, but mcore_ckpt knows only format 2"):
                call()


@pytest.mark.shows("Megatron-LM", "parts")
@pytest.mark.world(2)
def test_rank_0_alone_has_a_bank(shared_path: Path, banks: Banks) -> None:
    root, bank = shared_path / "run", shared_path / "run" / "rollout_bank"
    with parallel(DP2):
        loop = started(root, DP2)
        if dist.get_rank() == 0:
            banks.begin(bank, 0)
            banks.complete(7)
        loop.train(1)
        loop.save()
        if dist.get_rank() == 0:
            shutil.rmtree(bank)
        dist.barrier()
        again = started(root, DP2, seed=2)
        dist.barrier()
        with everywhere():
            assert again.iteration == 1
            assert (bank / "MANIFEST.json").exists()
        if dist.get_rank() == 0:
            assert banks.begin(bank, 1) == [7]


@pytest.mark.world(1)
def test_a_bank_on_another_disk_stays_there(shared_path: Path) -> None:
    """Its folder may be a link."""
    disk, bank = shared_path / "disk", shared_path / "run" / "rollout_bank"
    for folder in (disk, bank.parent):
        folder.mkdir()
    bank.symlink_to(disk)
    part = drop_in.RolloutBankPart(lambda: Arguments(SimpleNamespace(save=str(bank.parent))))
    for step in (1, 2):
        stored = shared_path / f"stored{step}"
        stored.mkdir()
        manifest = json.dumps({"format_version": 2, "timeline": f"life {step}", "compacted_at": 0})
        (stored / "MANIFEST.json").write_text(manifest)
        part.load(SavedPart("rollout_bank", step, 0, 1, (0,), lambda rank, stored=stored: stored))
        assert bank.is_symlink()
        assert (disk / "MANIFEST.json").read_text() == manifest
    assert sorted(path.name for path in bank.parent.iterdir()) == ["rollout_bank"]
    left = sorted(path.name for path in shared_path.iterdir())
    assert left == ["disk", "disk.before_step_2", "run", "stored1", "stored2"]


def stored_bank(folder: Path, step: int) -> SavedPart:
    folder.mkdir()
    (folder / "ledger.log").write_text(f"groups of step {step}")
    manifest = {"format_version": 2, "timeline": f"life {step}", "compacted_at": 0}
    (folder / "MANIFEST.json").write_text(json.dumps(manifest))
    return SavedPart("rollout_bank", step, 0, 1, (0,), lambda rank: folder)


@pytest.mark.world(1)
def test_a_bank_that_is_replaced_stays_under_another_name(shared_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It may have groups that no checkpoint has."""
    bank = shared_path / "rollout_bank"
    part = drop_in.RolloutBankPart(lambda: Arguments(SimpleNamespace(save=str(shared_path))))
    first, second = stored_bank(shared_path / "stored1", 1), stored_bank(shared_path / "stored2", 2)
    for saved in (second, first, second, first):
        part.load(saved)
        assert (bank / "ledger.log").read_text() == f"groups of step {saved.step}"
        (bank / "ledger.log").write_text(f"and newer ones than step {saved.step}")
    for name, step in (("before_step_1", 2), ("before_step_2", 1), ("before_step_1.2", 2)):
        old = bank.with_name(f"rollout_bank.{name}")
        assert (old / "ledger.log").read_text() == f"and newer ones than step {step}"
        assert f"The bank that was there is now {old}," in caplog.text
    assert len(list(shared_path.iterdir())) == 6


@pytest.mark.world(1)
@pytest.mark.parametrize("code", [errno.EBUSY, errno.EXDEV])
def test_a_bank_that_cannot_be_renamed_is_filled_or_left_as_it_is(
    code: int, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a mount point."""
    bank, rename = shared_path / "rollout_bank", os.rename
    bank.mkdir()

    def refuse(source: Path, target: Path) -> None:
        if bank in (source, target):
            raise OSError(code, os.strerror(code))
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    part = drop_in.RolloutBankPart(lambda: Arguments(SimpleNamespace(save=str(shared_path))))
    first, second = stored_bank(shared_path / "stored1", 1), stored_bank(shared_path / "stored2", 2)
    part.load(first)
    before = {path.name: path.read_text() for path in bank.iterdir()}
    assert before.keys() == {"MANIFEST.json", "ledger.log", "loaded_by_mcore_ckpt.json"}
    with pytest.raises(
        UnsupportedError, match=r"rollout_bank: does not belong to step 2(.|\n)*The bank has not been changed"
    ):
        part.load(second)
    assert {path.name: path.read_text() for path in bank.iterdir()} == before
    assert sorted(path.name for path in shared_path.iterdir()) == ["rollout_bank", "stored1", "stored2"]
    for path in bank.iterdir():
        path.unlink()
    (bank / "lost+found").mkdir()

    def die_after(source: Path, target: Path) -> None:
        copy_durably(source, target)
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(module, "copy_durably", die_after)
        with pytest.raises(SystemExit):
            module._fill(bank, shared_path / "stored2")
    assert sorted(path.name for path in bank.iterdir()) == ["filling_by_mcore_ckpt", "ledger.log", "lost+found"]
    part.load(second)
    assert (bank / "ledger.log").read_text() == "groups of step 2"
    # From now on, it is a bank like any other.
    with pytest.raises(UnsupportedError, match="does not belong to step 1"):
        part.load(first)


@pytest.mark.world(1)
def test_a_load_without_a_bank_names_none(shared_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    part = drop_in.RolloutBankPart(lambda: Arguments(SimpleNamespace(save=str(shared_path))))
    part.load(stored_bank(shared_path / "stored1", 1))
    assert (shared_path / "rollout_bank" / "ledger.log").exists()
    assert "before_step" not in caplog.text
