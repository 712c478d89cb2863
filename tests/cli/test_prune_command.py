"""`mcore-ckpt prune` as it is typed."""

import datetime
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.cli.main import main
from tests.support.checkpoints import ROLE, checkpoints, dead_owner, make, own, stage
from tests.support.privileges import without_privileges
from tests.support.small_steps import save_small


def make_steps(root: Path, *numbers: int) -> None:
    for step in numbers:
        make(file_names.step_dir(root, step) / ROLE, step)


def prune(root: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main(["prune", str(root), "--json", *flags]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def deleted(answer: dict[str, Any]) -> list[int | None]:
    return [folder["step"] for folder in answer["folders"] if folder["deleted"]]


def test_a_dry_run_says_what_the_run_does_and_touches_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_steps(tmp_path, 10, 20, 25, 30, 35)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    dry = prune(tmp_path, capsys, "--max-to-keep", "1", "--keep-every", "20", "--dry-run")
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    assert deleted(dry) == [10, 25, 30]
    reasons = {folder["step"]: folder["reason"] for folder in dry["folders"]}
    assert reasons[20] == "a multiple of 20"
    assert reasons[35] == "among the newest 1 of actor"
    files = [path for step in (10, 25, 30) for path in file_names.step_dir(tmp_path, step).rglob("*") if path.is_file()]
    assert dry["deleted_bytes"] == sum(path.stat().st_size for path in files)
    wet = prune(tmp_path, capsys, "--max-to-keep", "1", "--keep-every", "20")
    assert wet == dry | {"dry_run": False}
    assert checkpoints(tmp_path) == {20: 20, 35: 35}


def test_without_a_number_every_step_stays_and_remains_go(
    tmp_path: Path, dead_pid: int, capsys: pytest.CaptureFixture[str]
) -> None:
    make_steps(tmp_path, 1, 2)
    dead, _ = stage(file_names.step_dir(tmp_path, 3) / ROLE, 3)
    own(dead, dead_owner(dead_pid))
    living, _ = stage(file_names.step_dir(tmp_path, 4) / ROLE, 4)
    of_critic, _ = stage(file_names.step_dir(tmp_path, 3) / "critic", 3)
    own(of_critic, dead_owner(dead_pid))
    gone = file_names.deleted_dir(file_names.step_dir(tmp_path, 0), "a" * 32)
    gone.mkdir()
    answer = prune(tmp_path, capsys, "--role", "critic", "--dry-run")
    assert [folder["path"] for folder in answer["folders"] if folder["deleted"]] == [str(gone), str(of_critic)]
    answer = prune(tmp_path, capsys)
    assert deleted(answer) == [None, None, None]
    assert (dead.exists(), of_critic.exists(), gone.exists(), living.exists()) == (False, False, False, True)
    assert checkpoints(tmp_path) == {1: 1, 2: 2}


def test_pins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_steps(tmp_path, 1, 2, 3)
    assert deleted(prune(tmp_path, capsys, "--pin", "1", "--max-to-keep", "1")) == [2]
    assert deleted(prune(tmp_path, capsys, "--max-to-keep", "1")) == []
    assert deleted(prune(tmp_path, capsys, "--unpin", "1", "--max-to-keep", "1")) == [1]
    assert checkpoints(tmp_path) == {3: 3}


def test_a_step_that_cannot_be_deleted_is_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_steps(tmp_path, 1, 2)
    tmp_path.chmod(0o500)
    with without_privileges():
        assert main(["prune", str(tmp_path), "--max-to-keep", "1"]) == 1
    assert "global_steps_1: cannot be deleted: " in capsys.readouterr().out
    tmp_path.chmod(0o700)
    assert checkpoints(tmp_path) == {1: 1, 2: 2}


def test_a_role_s_steps_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_steps(tmp_path, 1, 2)
    for step in (3, 4):
        make(file_names.step_dir(tmp_path, step) / "critic", step)
    answer = prune(tmp_path, capsys, "--role", "critic", "--max-to-keep", "1")
    assert deleted(answer) == [3]
    assert sorted(os.listdir(tmp_path)) == ["global_steps_1", "global_steps_2", "global_steps_4"]


def test_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_steps(tmp_path, 1, 2)
    assert main(["prune", str(tmp_path), "--max-to-keep", "1", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "keep" in shown
    assert "global_steps_1: not among the newest 1 of any role" in shown
    assert "1 of 2 folders would be deleted" in shown


@pytest.mark.parametrize(
    "flags", [["--max-to-keep", "0"], ["--keep-every", "5"], ["--max-to-keep", "x"], ["--pin", "1", "--dry-run"]]
)
def test_arguments_that_make_no_sense(tmp_path: Path, flags: list[str]) -> None:
    make_steps(tmp_path, 1)
    try:
        status = main(["prune", str(tmp_path), *flags])
    except SystemExit as end:
        status = int(end.code or 0)
    assert status == 2
    assert checkpoints(tmp_path) == {1: 1}


def test_a_root_or_a_step_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", str(tmp_path / "none")]) == 2
    assert main(["prune", str(tmp_path), "--pin", "7"]) == 1
    assert "there is no step 7" in capsys.readouterr().err


def test_all_rules_of_a_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run says which rule keeps each step, and what would lose its optimizer; the run does just that."""
    now = datetime.datetime.now(datetime.UTC)
    for step in range(1, 7):
        created = now - datetime.timedelta(hours=6 - step)
        save_small(tmp_path, step, metrics={"val/reward": -step}, created=created.isoformat(timespec="seconds"))
    flags = ["--max-to-keep", "1", "--keep-best", "val/reward:1:max", "--keep-for", "1.5h", "--optimizer-for-last", "1"]
    dry = prune(tmp_path, capsys, *flags, "--dry-run")
    assert {folder["step"]: folder["reason"] for folder in dry["folders"] if not folder["deleted"]} == {
        1: "among the best 1 by val/reward (max): -1; loses the optimizer of actor",
        5: "younger than 1 h 30 min; loses the optimizer of actor",
        6: "among the newest 1 of actor; younger than 1 h 30 min",
    }
    sizes = {folder["step"]: folder["bytes"] for folder in dry["folders"]}
    assert [folder["lost_bytes"] for folder in dry["folders"] if folder["loses_optimizer"]] == [64, 64]
    wet = prune(tmp_path, capsys, *flags)
    assert wet == dry | {"dry_run": False}
    role_dirs = {step: tmp_path / f"global_steps_{step}" / ROLE for step in (1, 5, 6)}
    assert {step: (role_dir / "optim").exists() for step, role_dir in role_dirs.items()} == {
        1: False,
        5: False,
        6: True,
    }
    files = [path for path in role_dirs[5].rglob("*") if path.is_file() and path.name != "manifest.json"]
    others = sum(path.stat().st_size for path in files)
    assert sizes[5] >= others
    assert main(["prune", str(tmp_path), *flags, "--dry-run"]) == 0
    assert "would lose" not in capsys.readouterr().out
    assert main(["list", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("actor  without optimizer  val/reward -1")
    assert lines[2].endswith("actor  newest  val/reward -6")
    assert main(["inspect", str(role_dirs[1])]) == 0
    assert "holds model, extra (retention has removed: optimizer)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--keep-best", "reward:1:max"], "--keep-best is given, but without --max-to-keep every step stays"),
        (["--keep-for", "2d"], "--keep-for is given"),
        (["--max-to-keep", "1", "--keep-best", "reward"], "keep_best is 'reward': use"),
        (["--max-to-keep", "1", "--keep-for", "2 weeks"], "2 weeks: use a time, such as 45min, 12h or 2d"),
        (["--max-to-keep", "1", "--keep-for", "0s"], "0s: use a time"),
        (["--optimizer-for-last", "0"], "0: use 1 or more"),
    ],
)
def test_rules_that_make_no_sense(
    tmp_path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with suppress(SystemExit):
        assert main(["prune", str(tmp_path), *flags]) == 2
    assert message in capsys.readouterr().err
