"""What a watcher sees of saves: who, how much, how fast, what has changed; and `mcore-ckpt watch` as it is typed."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import encode_manifest
from mcore_ckpt.checkpoint.provenance import Commit
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.cli import watch as command
from mcore_ckpt.cli.main import main
from mcore_ckpt.steps import commit
from mcore_ckpt.steps.owner import Life
from mcore_ckpt.steps.tracker import update_tracker
from mcore_ckpt.steps.trainer_lock import TrainerLock
from mcore_ckpt.tools.examine import watch as module
from mcore_ckpt.tools.examine.watch import Look, Watch, changes
from tests.support.checkpoint_fixtures import dead_pid
from tests.support.checkpoints import ROLE, dead_owner, make, other_host, own, stage

__all__ = ["dead_pid"]


def folder(root: Path, step: int, role: str = ROLE) -> Path:
    return file_names.step_dir(root, step) / role


def begin(root: Path, step: int, role: str = ROLE) -> tuple[Path, str]:
    """An empty staging folder of this process."""
    attempt = commit.new_attempt()
    return commit.open_staging(folder(root, step, role), attempt), attempt


def write_part(staging: Path, before: Path, part: float) -> None:
    """Writes what a save has written when it is that far: each file has its full size, and the first of its bytes."""
    for file in read_manifest(before).files:
        path = staging / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb", buffering=0) as stream:
            os.posix_fallocate(stream.fileno(), 0, file.size)
            stream.write((before / file.path).read_bytes()[: int(file.size * part)])


def told(before: Look | None, after: Look) -> list[tuple[str, int, str | None]]:
    return [(change.what, change.number, change.role) for change in changes(before, after)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time of the watcher, which passes only if a test says so."""
    now = SimpleNamespace(monotonic_s=100.0, wall_s=1e9)
    times = SimpleNamespace(monotonic=lambda: now.monotonic_s, time=lambda: now.wall_s)
    monkeypatch.setattr(module, "time", times)
    return now


def test_a_save_from_its_first_byte_to_its_commit(tmp_path: Path, clock: SimpleNamespace) -> None:
    make(folder(tmp_path, 10), 10)
    total = read_manifest(folder(tmp_path, 10)).nbytes
    watch = Watch(tmp_path)
    looks = [watch.look()]
    assert told(None, looks[0]) == [("there", 10, None)]

    staging, attempt = begin(tmp_path, 20)
    os.utime(staging / file_names.OWNER_FILE, (clock.wall_s, clock.wall_s))
    looks.append(watch.look())
    (save,) = looks[-1].saves
    assert (save.save.step, save.save.role, save.save.life) == (20, ROLE, Life.ALIVE)
    assert (save.written, save.total, save.rate, save.left_s) == (0, total, None, None)
    assert told(*looks[-2:]) == [("saving", 20, ROLE)]
    assert [step.state for step in looks[-1].steps] == ["complete", "saving"]

    for seconds, part in ((2, 0.25), (4, 0.5)):
        clock.monotonic_s, clock.wall_s = 100.0 + seconds, 1e9 + seconds
        write_part(staging, folder(tmp_path, 10), part)
        looks.append(watch.look())
        (save,) = looks[-1].saves
        assert save.written == pytest.approx(part * total, rel=0.05)  # in whole pages
        assert save.rate == pytest.approx(total / 8, rel=0.05)
        assert save.left_s == pytest.approx(8 * (1 - part), rel=0.1)
        assert save.seconds == seconds
        assert told(*looks[-2:]) == [("written", 20, ROLE)]

    shutil.rmtree(staging)
    real, attempt = stage(folder(tmp_path, 20), 20)
    commit.publish(real, folder(tmp_path, 20), attempt)
    looks.append(watch.look())
    assert told(*looks[-2:]) == [("committed", 20, ROLE), ("complete", 20, None)]
    assert not looks[-1].saves
    assert looks[-1].newest == 20


def test_the_speed_is_that_of_the_last_seconds(tmp_path: Path, clock: SimpleNamespace) -> None:
    make(folder(tmp_path, 10), 10)
    staging, _ = begin(tmp_path, 20)
    watch = Watch(tmp_path)
    for seconds, part in ((0, 0.5), (30, 0.5), (39, 0.5), (41, 0.5)):
        clock.monotonic_s = 100.0 + seconds
        write_part(staging, folder(tmp_path, 10), part)
        (save,) = watch.look().saves
    assert (save.rate, save.left_s) == (0.0, None)


def test_the_first_save_has_no_total(tmp_path: Path) -> None:
    staging, _ = stage(folder(tmp_path, 10), 10)
    (save,) = Watch(tmp_path).look().saves
    files = [path for path in staging.rglob("*") if path.is_file() and path.name != file_names.OWNER_FILE]
    assert save.written >= sum(path.stat().st_size for path in files)
    assert (save.total, save.percent, save.left_s) == (None, None, None)


def test_a_save_of_other_files_than_before(tmp_path: Path) -> None:
    """Under another layout the files have other names."""
    make(folder(tmp_path, 10), 10)
    staging, _ = begin(tmp_path, 20)
    (staging / "other").mkdir()
    (staging / "other" / "file.pt").write_bytes(b"x" * 8192)
    (save,) = Watch(tmp_path).look().saves
    assert save.written == 8192
    assert save.total == read_manifest(folder(tmp_path, 10)).nbytes


def test_few_files_stand_for_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(folder(tmp_path, 10), 10)
    opened: list[Path] = []
    monkeypatch.setattr(module, "_MOST_FILES", 1)
    monkeypatch.setattr(module, "written_bytes", lambda path: opened.append(path) or 0)
    begin(tmp_path, 20)
    Watch(tmp_path).look()
    assert len(opened) == 1


def test_whose_save_it_is(tmp_path: Path, dead_pid: int) -> None:
    for step, owner in ((1, dead_owner(dead_pid)), (2, other_host())):
        staging, _ = begin(tmp_path, step)
        own(staging, owner)
    look = Watch(tmp_path).look()
    assert [save.save.life for save in look.saves] == [Life.DEAD, Life.UNKNOWN]
    assert [step.state for step in look.steps] == ["incomplete", "saving"]
    assert told(None, look) == [("died", 1, ROLE), ("saving", 2, ROLE)]


def test_a_save_that_fails_and_steps_that_go(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        make(folder(tmp_path, step), step)
    staging, _ = begin(tmp_path, 4)
    watch = Watch(tmp_path, last=3)
    before = watch.look()
    commit.discard(staging)
    shutil.rmtree(file_names.step_dir(tmp_path, 3))
    after = watch.look()
    assert told(before, after) == [("ended", 4, ROLE), ("deleted", 3, None)]
    assert [step.step for step in after.steps] == [1, 2]


def test_a_step_that_frees_space_is_not_deleted(tmp_path: Path) -> None:
    make(folder(tmp_path, 1), 1)
    watch = Watch(tmp_path, last=1)
    before = watch.look()
    make(folder(tmp_path, 2), 2)
    assert told(before, watch.look()) == [("committed", 2, ROLE), ("complete", 2, None)]


def numbered(root: Path, step: int, number: int, *branch: tuple[int, int]) -> None:
    role_dir = folder(root, step)
    make(role_dir, step)
    manifest = replace(read_manifest(role_dir), commit=Commit(number, None, branch))
    (role_dir / file_names.MANIFEST_FILE).write_bytes(encode_manifest(manifest))
    update_tracker(root, step)


@pytest.mark.parametrize("start", [None, 60], ids=["a fresh start", "a rollback"])
def test_after_a_rollback_nothing_is_said_to_be_deleted(tmp_path: Path, start: int | None) -> None:
    for number, step in enumerate((60, 70, 80, 90, 100), 1):
        numbered(tmp_path, step, number, (1, number))
    watch, before = Watch(tmp_path), ((1, 1),) if start else ()
    looks, new = [watch.look()], [65, 67] if start else [5, 4]
    for number, step in enumerate(new, 6):
        numbered(tmp_path, step, number, *before, (6, number))
        looks.append(watch.look())
        assert told(*looks[-2:]) == [("committed", step, ROLE), ("complete", step, None)]
        assert looks[-1].newest == step
    shutil.rmtree(folder(tmp_path, new[0]).parent)
    assert told(looks[-1], watch.look()) == [("deleted", new[0], None)]


def test_the_last_role_completes_a_step(tmp_path: Path) -> None:
    roles = (ROLE, "critic")
    watch = Watch(tmp_path)
    before = watch.look()
    make(folder(tmp_path, 1), 1, roles)
    between = watch.look()
    assert told(before, between) == [("committed", 1, ROLE)]
    make(folder(tmp_path, 1, "critic"), 1, roles)
    assert told(between, watch.look()) == [("committed", 1, "critic"), ("complete", 1, None)]


def test_a_flat_step(tmp_path: Path) -> None:
    step = tmp_path / "global_step_7"
    watch = Watch(tmp_path)
    looks = [watch.look()]
    staging, attempt = stage(step, 7)
    looks.append(watch.look())
    assert told(*looks[-2:]) == [("saving", 7, None)]
    commit.publish(staging, step, attempt)
    looks.append(watch.look())
    assert told(*looks[-2:]) == [("committed", 7, ROLE), ("complete", 7, None)]


def test_trainers_are_named(tmp_path: Path) -> None:
    lock = TrainerLock(tmp_path, ROLE)
    lock.take(patience_s=1.0)
    try:
        ((role, (owner, life)),) = Watch(tmp_path).look().trainers.items()
        assert (role, owner.pid, life) == (ROLE, os.getpid(), Life.ALIVE)
    finally:
        lock.release()


# -- as it is typed ----------------------------------------------------------------------------------------


@pytest.fixture
def then(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Callable[[], object]]], None]:
    """Lets things happen between the looks, instead of a wait."""

    def happen(actions: list[Callable[[], object]]) -> None:
        left: Iterator[Callable[[], object]] = iter(actions)
        monkeypatch.setattr(command, "time", SimpleNamespace(sleep=lambda seconds: next(left)()))

    return happen


def interrupt() -> None:
    raise KeyboardInterrupt


def test_a_pipe_gets_a_line_for_each_change(
    tmp_path: Path, then: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    make(folder(tmp_path, 10), 10)
    staged: list[tuple[Path, str]] = []
    then(
        [
            lambda: None,
            lambda: staged.append(stage(folder(tmp_path, 20), 20)),
            lambda: commit.publish(staged[0][0], folder(tmp_path, 20), staged[0][1]),
        ]
    )
    assert main(["watch", str(tmp_path), "--until", "20"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"global_steps_10  complete, newest  1\.\d MB  \d+ d ago", lines[0])
    assert lines[1] == "no trainer holds a role here"
    assert lines[2].startswith(f"step 20  actor  is being saved by process {os.getpid()} on ")
    assert lines[3] == "global_steps_20  actor  committed"
    assert lines[4].startswith("global_steps_20  complete, newest")
    assert len(lines) == 5


def test_ctrl_c_ends_it(tmp_path: Path, then: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    make(folder(tmp_path, 10), 10)
    then([interrupt])
    before = sorted(tmp_path.rglob("*"))
    assert main(["watch", str(tmp_path)]) == 130
    assert sorted(tmp_path.rglob("*")) == before


def test_json_lines(tmp_path: Path, then: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    make(folder(tmp_path, 10), 10)
    then([lambda: None, lambda: begin(tmp_path, 20), interrupt])
    assert main(["watch", str(tmp_path), "--json"]) == 130
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["newest"] == 10
    assert second["changes"] == [{"what": "saving", "step": 20, "role": ROLE}]
    assert (second["saves"][0]["pid"], second["saves"][0]["written"]) == (os.getpid(), 0)


@pytest.mark.parametrize("columns", [160, 40])
def test_a_terminal_gets_tables(
    columns: int,
    tmp_path: Path,
    then: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make(folder(tmp_path, 10), 10)
    stage(folder(tmp_path, 20), 20)
    for name, value in {"COLUMNS": str(columns), "TERM": "xterm", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    then([interrupt])
    assert main(["watch", str(tmp_path)]) == 130
    live = capsys.readouterr().out
    assert main(["watch", str(tmp_path), "--once"]) == 0
    once = capsys.readouterr().out
    for text in (live, once):
        assert "global_steps_20" in text
        assert f"process {os.getpid()}" in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--last", "0"), "use finite numbers above 0"),
        (("--interval", "0"), "use finite numbers above 0"),
        (("--interval", "nan"), "use finite numbers above 0"),
        (("--interval", "inf"), "use finite numbers above 0"),
        (("--once", "--until", "3"), "leave out --until"),
    ],
)
def test_arguments_that_make_no_sense(
    arguments: tuple[str, ...], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(tmp_path), *arguments]) == 2
    assert text in capsys.readouterr().err
    assert main(["watch", str(tmp_path / "nowhere")]) == 2
