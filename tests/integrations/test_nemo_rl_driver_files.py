"""What NeMo-RL's driver writes into a step is sealed with it. With NEMO_RL_SOURCE, its own CheckpointManager is run."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt.config import TIMEOUT_S
from mcore_ckpt.errors import CheckpointNotFoundError, HungDiskError, UnsupportedError
from mcore_ckpt.integrations.nemo_rl import driver_files
from mcore_ckpt.io import checksums, file_copies, tuning
from mcore_ckpt.ranks import single_process_agreement
from mcore_ckpt.steps import RoleReader, commit_role, role_files
from tests.support.document_examples import run_in_shell

STAND_IN = Path(__file__).parents[1] / "bridge" / "nemo_rl_stand_in"
NAME = "nemo_rl.utils.checkpoint"


@pytest.fixture
def manager_class(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Any]:
    """CheckpointManager in a driver that has called `keep_driver_files`, with the parameter as `timeout_s`."""
    monkeypatch.syspath_prepend(STAND_IN)
    for name in [name for name in sys.modules if name.partition(".")[0] == "nemo_rl"]:
        monkeypatch.delitem(sys.modules, name)
    module = import_module(NAME)
    if source := os.environ.get("NEMO_RL_SOURCE"):
        spec = spec_from_file_location(NAME, Path(source).expanduser() / "nemo_rl" / "utils" / "checkpoint.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[NAME] = module_from_spec(spec)
        spec.loader.exec_module(module)
    driver_files.keep_driver_files(getattr(request, "param", TIMEOUT_S))
    yield module.CheckpointManager
    for name in [name for name in sys.modules if name.partition(".")[0] == "nemo_rl"]:
        del sys.modules[name]


def made(manager_class: Any, root: Path, **more: Any) -> Any:
    plain = {"metric_name": None, "higher_is_better": True, "keep_top_k": 9, "save_period": 1, "save_optimizer": True}
    return manager_class({"checkpoint_dir": root, **plain, **more})


def begin(manager: Any, step: int, weights: str = "policy") -> Path:
    """What the driver and its workers write before the rename."""
    folder = Path(manager.init_tmp_checkpoint(step, {"total_steps": step}))
    role = folder / "policy" / "weights" / weights
    commit_role(single_process_agreement(weights, 20.0), role, 0, [weights], lambda files: files.write("w", b"weights"))
    torch.save({"trajectories": list(range(step))}, folder / "replay_buffer.pt")
    torch.save({"next_nemo_gym_task_index": step}, folder / "rollouts.pt")
    (folder / "policy" / "tokenizer").mkdir()
    (folder / "policy" / "tokenizer" / "tokenizer.json").write_text("{}")
    return folder


def save(manager: Any, step: int) -> Path:
    folder = begin(manager, step)
    manager.begin_finalization(folder, wait_fn=lambda: None)
    manager.finalize_pending()
    return folder.with_name(f"step_{step}")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.shows("NeMo-RL", "parts")
def test_a_step_lists_what_the_driver_wrote(manager_class: Any, tmp_path: Path) -> None:
    step = save(made(manager_class, tmp_path), 7)
    role = RoleReader(step)
    assert (role.manifest.role, role.manifest.step) == ("driver", 7)
    names = sorted(file.path for file in role.manifest.files)
    assert names == ["policy/tokenizer/tokenizer.json", "replay_buffer.pt", "rollouts.pt", "training_info.json"]
    for command, status in (("verify", 0), ("inspect", 0)):
        typed = run_in_shell(f"mcore-ckpt {command} step_7", tmp_path, {})
        assert typed.returncode == status, typed.stderr + typed.stdout
    flip(step / "replay_buffer.pt")
    typed = run_in_shell("mcore-ckpt verify step_7", tmp_path, {})
    assert typed.returncode == 1
    assert "replay_buffer.pt" in typed.stdout + typed.stderr


@pytest.mark.shows("NeMo-RL", "parts")
@pytest.mark.parametrize("harm", ["flipped", "cut", "missing", "weights"])
def test_a_step_that_is_not_whole_is_skipped(
    harm: str, manager_class: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = made(manager_class, tmp_path)
    first, second = save(manager, 1), save(manager, 2)
    assert made(manager_class, tmp_path).get_latest_checkpoint_path() == str(second)
    for step in (second, first):
        buffer = step / "replay_buffer.pt"
        if harm == "flipped":
            flip(buffer)
        elif harm == "cut":
            buffer.write_bytes(b"")  # what a power loss leaves of a file that nobody synced
        elif harm == "missing":
            buffer.unlink()
        else:
            (step / "policy" / "weights" / "policy" / "w").write_bytes(b"")
        driver_files.keep_driver_files()  # as a driver that starts again
        again = made(manager_class, tmp_path)
        if step == second:
            assert again.get_latest_checkpoint_path() == str(first)
            assert f"{second} is skipped" in caplog.text
        else:
            with pytest.raises(CheckpointNotFoundError, match=r"no step is whole(.|\n)*step_2(.|\n)*step_1"):
                again.get_latest_checkpoint_path()


@pytest.mark.shows("NeMo-RL", "parts")
def test_a_driver_that_dies_before_the_rename_leaves_the_step_before(manager_class: Any, tmp_path: Path) -> None:
    manager = made(manager_class, tmp_path)
    first = save(manager, 1)
    folder = begin(manager, 2)
    driver_files.seal(folder)  # and dies
    driver_files.keep_driver_files()
    again = made(manager_class, tmp_path)
    assert again.get_latest_checkpoint_path() == str(first)
    second = save(again, 2)
    assert again.get_latest_checkpoint_path() == str(second)


def test_a_seal_that_fails_gives_the_step_no_name(
    manager_class: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(driver_files, "seal_role", fail)
    with pytest.raises((OSError, RuntimeError)):
        save(made(manager_class, tmp_path), 1)
    assert [path.name for path in tmp_path.iterdir()] == ["tmp_step_1"]


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ([b"Vocab.txt", b"vocab.txt"], r"policy/vocab\.txt: another file's name differs only in upper and lower case"),
        ([b"a\\b"], r"'policy/a\\\\b' cannot be the name of a file: use printable characters"),
        ([b"a\nb"], r"'policy/a\\nb' cannot be the name of a file: use printable characters"),
    ],
    ids=["case", "backslash", "control"],
)
def test_a_name_that_a_manifest_cannot_list_costs_the_seal_but_not_the_step(
    names: list[bytes],
    problem: str,
    manager_class: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hashed: list[Path] = []
    synced: list[Path] = []
    hash_durably, sync_file = role_files.hash_durably, role_files.sync_file
    monkeypatch.setattr(role_files, "hash_durably", lambda path: (hashed.append(path), hash_durably(path))[1])
    monkeypatch.setattr(role_files, "sync_file", lambda path: (synced.append(path), sync_file(path))[1])
    manager = made(manager_class, tmp_path)
    folder = begin(manager, 1)
    for name in names:
        Path(os.fsdecode(os.path.join(os.fsencode(folder / "policy"), name))).write_bytes(b"x")
    with pytest.raises(UnsupportedError, match=problem):
        driver_files.seal(folder)
    assert not hashed  # the names are checked before the bytes, which may be many
    assert {folder / "replay_buffer.pt", folder / "policy" / os.fsdecode(names[-1])} <= set(synced)
    manager.begin_finalization(folder, wait_fn=lambda: None)
    manager.finalize_pending()
    step = tmp_path / "step_1"
    assert not (step / "manifest.json").exists()
    assert re.search(rf"has no manifest, so a resume does not check the driver's files: .*{problem}", caplog.text)
    assert made(manager_class, tmp_path).get_latest_checkpoint_path() == str(step)


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Path]:
    """A file that stands for a hung disk: opening it waits until somebody opens its other end."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    yield path
    with suppress(OSError):  # nobody waits
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))


HANGS: dict[str, tuple[Any, str]] = {
    "seal": (role_files, "hash_durably"),
    "rename": (os, "rename"),
    "sync": (driver_files, "sync_dir"),
}


@pytest.mark.parametrize("manager_class", [1.0], indirect=True)
@pytest.mark.parametrize("call", HANGS)
def test_a_disk_that_hangs_ends_the_save(
    call: str, manager_class: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipe: Path
) -> None:
    manager = made(manager_class, tmp_path / "run")
    folder = begin(manager, 1)
    monkeypatch.setattr(*HANGS[call], lambda *args: pipe.open("rb"))
    with pytest.raises(HungDiskError, match=f"^driver: {pipe}: "):
        manager._rename_checkpoint(folder)


@pytest.mark.parametrize("manager_class", [1.0], indirect=True)
def test_a_disk_that_hangs_ends_a_resume(
    manager_class: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipe: Path
) -> None:
    save(made(manager_class, tmp_path), 1)
    monkeypatch.setattr(checksums, "_read_piece", lambda piece, buffer: pipe.open("rb"))
    with pytest.raises(HungDiskError, match=f"^driver: {pipe}: "):
        made(manager_class, tmp_path).get_latest_checkpoint_path()


@pytest.mark.parametrize("manager_class", [1.0], indirect=True)
def test_a_seal_that_takes_long_but_goes_on_is_not_given_up(
    manager_class: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = file_copies._read

    def slowly(*args: Any) -> int:
        time.sleep(0.1)
        return real(*args)

    monkeypatch.setattr(file_copies, "_read", slowly)
    monkeypatch.setattr(tuning, "READ_BYTES", 128)
    manager = made(manager_class, tmp_path)
    began = time.monotonic()
    step = save(manager, 7)
    assert time.monotonic() - began > 2
    assert RoleReader(step).manifest.step == 7


def test_steps_of_nemo_rl_and_of_older_versions_count(manager_class: Any, tmp_path: Path) -> None:
    manager = made(manager_class, tmp_path)
    assert manager.get_latest_checkpoint_path() is None
    stock = tmp_path / "step_3"
    (stock / "policy" / "weights" / "iter_0000000").mkdir(parents=True)
    (stock / "training_info.json").write_text("{}")
    assert manager.get_latest_checkpoint_path() == str(stock)
    older = begin(manager, 12).rename(tmp_path / "step_12")
    assert manager.get_latest_checkpoint_path() == str(older)
    shutil.rmtree(older)
    assert manager.get_latest_checkpoint_path() == str(stock)


def test_the_rules_of_the_driver_go_on(manager_class: Any, tmp_path: Path) -> None:
    """Deleting is NeMo-RL's own: a seal hinders it as little as it hinders a resume."""
    manager = made(manager_class, tmp_path, keep_top_k=2)
    for step in range(1, 5):
        save(manager, step)
    if hasattr(manager, "shutdown"):
        manager.shutdown()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_3", "step_4"]


def test_a_step_that_is_not_whole_displaces_no_whole_one(manager_class: Any, tmp_path: Path) -> None:
    """NeMo-RL's rules keep the highest numbers, and read `training_info.json` of every step."""
    manager = made(manager_class, tmp_path)
    for step in (2, 4, 6):
        save(manager, step)
    for step in (4, 6):
        (tmp_path / f"step_{step}" / "training_info.json").write_bytes(b"")
    driver_files.keep_driver_files()  # as a driver that starts again
    again = made(manager_class, tmp_path, keep_top_k=1)
    assert again.get_latest_checkpoint_path() == str(tmp_path / "step_2")
    assert (tmp_path / "step_6").exists()  # a driver that only evaluates changes nothing
    third, fourth = save(again, 3), save(again, 4)
    if hasattr(again, "shutdown"):
        again.shutdown()
    assert not third.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged_step_4", "damaged_step_6", "step_4"]
    assert again.get_latest_checkpoint_path() == str(fourth)
