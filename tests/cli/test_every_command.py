"""What every command must do, one row of `COMMANDS` for each: a new command without a row fails.

A row is run in a pipe, on a terminal of 40 columns without colors, into a pipe that nobody reads, and interrupted.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.cli.demo import command as demo
from mcore_ckpt.cli.demo.huggingface import Generated
from mcore_ckpt.cli.demo.runner import Outcome, Plan, Training
from mcore_ckpt.cli.main import INTERRUPTED, READER_GONE, main
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.tools.maintain.bench import bench, speeds
from tests.cli.test_command_line import parsers
from tests.cli.test_json_fields import FIELDS
from tests.support import owners
from tests.support.checkpoints import make as make_version
from tests.support.mcore_checkpoints import make_checkpoint
from tests.support.node_folders import divide
from tests.support.tiny_models import make_hf_folder

STYLE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
COLOR = re.compile(r"\x1b\[(?:[0-9]+;)*(?:3[0-9]|9[0-7])m")


@dataclass(frozen=True)
class Row:
    """How to try a command. `{out}` is a folder that is not there yet, `{copy}` a root with the steps 2 and 3.

    Attributes:
        success: arguments with which it succeeds.
        failures: arguments with which it fails, the exit status, and words of the message.
        interrupted_in: a function that it calls on its way, in which Ctrl-C is to come.
        has_bar: whether it takes long, and so shows speed and time left on a terminal.
        writes: arguments with which it writes `{out}`, for each kind of output, and whether that is in a root.
    """

    success: str
    failures: tuple[tuple[str, int, str], ...]
    interrupted_in: str
    has_bar: bool = False
    writes: tuple[tuple[str, bool], ...] = ()


BAR = "rich.progress.Progress.update"
COMMANDS = {
    "demo": Row(
        "--dir {out}",
        (("--dir checkpoints", 2, "was not made by the demo"), ("--dir {out} --steps 2", 2, "--steps 2 is too few")),
        "mcore_ckpt.cli.demo.command.perform",
    ),
    "doctor": Row(
        "checkpoints --megabytes 2",
        (("nowhere", 2, "there is no such folder"), ("checkpoints --timeout 0", 2, "use more than 0 seconds")),
        "mcore_ckpt.tools.examine.doctor.speed.measure",
        has_bar=True,
    ),
    "bench": Row(
        "checkpoints --megabytes 2 --model 1e6 --real 3",
        (("nowhere", 2, "there is no such folder"), ("checkpoints --tp 2", 2, "without --model")),
        BAR,
        has_bar=True,
    ),
    "list": Row(
        "checkpoints",
        (("nowhere", 2, "there is no such folder"), ("checkpoints --remote no://where", 2, "no://where")),
        "mcore_ckpt.tools.examine.step_list.step_list_of",
    ),
    "inspect": Row(
        "checkpoints --tensors --tensor decoder.final_layernorm.weight",
        (("nowhere", 2, "there is no such folder"), ("empty", 1, "no complete checkpoint")),
        BAR,
        has_bar=True,
    ),
    "watch": Row(
        "checkpoints --once",
        (("nowhere", 2, "there is no such folder"), ("checkpoints --last 0", 2, "use finite numbers above 0")),
        "mcore_ckpt.tools.examine.watch.Watch.look",
    ),
    "diff": Row(
        "checkpoints checkpoints",
        (
            ("checkpoints nowhere", 2, "there is no such folder"),
            ("checkpoints empty", 1, "no complete checkpoint"),
            ("versions/global_steps_2 versions/global_steps_3", 1, ""),
        ),
        BAR,
        has_bar=True,
    ),
    "verify": Row(
        "checkpoints",
        (("nowhere", 2, "there is no such folder"), ("empty", 1, "no checkpoint")),
        BAR,
        has_bar=True,
    ),
    "prune": Row(
        "{copy} --max-to-keep 1",
        (
            ("nowhere", 2, "there is no such folder"),
            ("versions --keep-every 2", 2, "give both"),
            ("versions --pin 7", 1, "7"),
        ),
        "mcore_ckpt.tools.maintain.prune.list_steps",
        has_bar=True,
    ),
    "collect": Row(
        "node0 node1 {out}",
        (("nowhere {out}", 2, "there is no such folder"), ("node0 {out}", 1, "that were on node1")),
        BAR,
        has_bar=True,
        writes=(("node0 node1 {out}", True),),
    ),
    "branch": Row(
        "versions 2 {out}",
        (
            ("nowhere 2 {out}", 2, "there is no such folder"),
            ("versions 7 {out}", 1, "no complete checkpoint of step 7"),
            ("versions 2 checkpoints", 2, "a fork needs a new folder"),
        ),
        BAR,
        has_bar=True,
    ),
    "merge": Row(
        "checkpoints {out}",
        (("checkpoints", 2, "target: give it once"), ("empty {out}", 1, "no complete checkpoint")),
        BAR,
        has_bar=True,
        writes=(("checkpoints {out}", False),),
    ),
    "test": Row(
        "hf --reference hf",
        (
            ("hf --reference nowhere", 2, "--reference nowhere: there is no such folder"),
            ("hf --reference hf --atol -1", 2, "use finite numbers of 0 or more"),
        ),
        BAR,
        has_bar=True,
    ),
    "convert": Row(
        "--hf_model_path hf --output_path {out}",
        (
            ("--hf_model_path nowhere --output_path {out}", 2, "there is no such folder"),
            ("--hf_model_path empty --output_path {out}", 1, "config.json"),
        ),
        BAR,
        has_bar=True,
        writes=(
            ("--hf_model_path hf --output_path {out}", True),
            ("--hf_model_path hf --output_path {out} --format torch_dist", False),
            ("checkpoints --output_path {out} --format torch_dist", True),
            ("checkpoints --output_path {out} --format torch_dist --layout verl", True),
        ),
    ),
    "reshard": Row(
        "checkpoints {out} --pp 2",
        (("empty {out}", 1, "no complete checkpoint"), ("checkpoints {out} --tp 0", 2, "tp")),
        BAR,
        has_bar=True,
        writes=(("checkpoints {out} --pp 2", True),),
    ),
    "completion": Row(
        "bash",
        (("fish", 2, "invalid choice"), ("", 2, "required")),
        "mcore_ckpt.cli.completion._commands",
    ),
}
EVERY = pytest.mark.parametrize("name", COMMANDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("every_command")
    hf = make_hf_folder(made / "hf", "llama")
    shutil.move(make_checkpoint(made / "made", hf, tp=2).parent.parent, made / "checkpoints")
    shutil.rmtree(made / "made")
    for step in (2, 3):
        make_version(file_names.step_dir(made / "versions", step) / "actor", step)
    (made / "empty").mkdir()
    (role_dir,) = (made / "checkpoints").glob("*/*/")
    divide(role_dir, [made / "node0", made / "node1"])
    return made


@pytest.fixture(autouse=True)
def at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder; a bench makes few saves, and a demo trains nothing, since tests of their own do that."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(speeds, "_SAVES", 1)
    monkeypatch.setattr(bench, "_REAL_SAVES", 1)
    monkeypatch.setattr(demo, "perform", performed)


def performed(plan: Plan, report: Any) -> Outcome:
    losses = {step: 1.0 / step for step in range(1, plan.steps + 1)}
    killed = {step: loss for step, loss in losses.items() if step <= plan.kill_after}
    resumed = {step: loss for step, loss in losses.items() if step > plan.kill_after - 2}
    step = file_names.step_dir(plan.checkpoints, plan.steps)
    step.mkdir(parents=True)
    (plan.checkpoints / file_names.TRACKER_FILE).write_text(str(plan.steps))
    trainings = Training("uninterrupted", losses), Training("killed", killed)
    last = Training("resumed", resumed, resumed_from=plan.kill_after - 2, held_out_loss=2.0)
    return Outcome(plan, *trainings, last, Generated(2.0, "def "))


def run(name: str, arguments: str, out: Path) -> int:
    copy = out.parent / "copy"
    if "{copy}" in arguments:
        shutil.copytree("versions", copy)
    try:
        return main([name, *shlex.split(arguments.format(out=out, copy=copy))])
    except SystemExit as ended:  # of argparse
        return int(ended.code or 0)


def test_every_command_has_a_row() -> None:
    assert COMMANDS.keys() == parsers().keys()
    assert all(len(row.failures) >= 2 for row in COMMANDS.values())
    assert COMMANDS.keys() - FIELDS.keys() == {"completion"}, "each that reports has documented JSON"
    writing = {name for name, row in COMMANDS.items() if "{out}" in row.success}
    writing -= {"demo", "branch"}  # The first writes its own folder, the second replaces nothing.
    assert writing == {name for name, row in COMMANDS.items() if row.writes}


@EVERY
def test_in_a_pipe_it_prints_its_result_alone(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(name, COMMANDS[name].success, tmp_path / "out") == 0
    captured = capsys.readouterr()
    assert captured.out
    assert "\x1b" not in captured.out
    assert captured.err == ""


@pytest.mark.parametrize(
    ("name", "failure"), [(name, failure) for name, row in COMMANDS.items() for failure in row.failures]
)
def test_it_fails_with_a_status_and_a_message(
    name: str, failure: tuple[str, int, str], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, status, words = failure
    before = tree(folder)
    assert run(name, arguments, tmp_path / "out") == status
    said = capsys.readouterr().err
    assert words in said
    assert "Traceback" not in said
    assert tree(folder) == before
    assert not (tmp_path / "out").exists()


@EVERY
def test_a_narrow_terminal_without_colors(
    name: str, tmp_path: Path, terminal: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    terminal(40)
    assert run(name, COMMANDS[name].success, tmp_path / "out") == 0
    shown = capsys.readouterr().out
    assert not COLOR.search(shown)
    if name != "completion":  # a script
        assert max(len(line) for line in STYLE.sub("", shown).splitlines()) <= 40, shown


@pytest.mark.parametrize("name", [name for name, row in COMMANDS.items() if row.has_bar])
def test_what_takes_long_shows_speed_and_time_left(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable, value in {"COLUMNS": "120", "TERM": "xterm", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run(name, COMMANDS[name].success, tmp_path / "out") == 0
    # Of amounts that take no time, the speed is not known.
    assert re.search(r"\d/\d.*([kMG]?B|bytes) +([\d.,]+ ([kMG]?B|bytes)/s|\?) +\d:\d\d:\d\d", capsys.readouterr().err)


@EVERY
def test_nobody_reads_its_output(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `| head`: no traceback, and a status of its own."""
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "w") as nowhere:
        monkeypatch.setattr(sys, "stdout", nowhere)
        assert run(name, COMMANDS[name].success, tmp_path / "out") == READER_GONE


def test_nobody_reads_the_output_of_a_program() -> None:
    """Python itself must not complain at its end. Of `--help` some versions of argparse hide the error."""
    for arguments, statuses in ((["list", "checkpoints"], (READER_GONE,)), (["--help"], (0, READER_GONE))):
        ours, theirs = os.pipe()
        os.close(ours)
        command = [sys.executable, "-m", "mcore_ckpt.cli.main", *arguments]
        done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, text=True)
        os.close(theirs)
        assert done.returncode in statuses
        assert done.stderr == ""


@pytest.mark.parametrize(
    ("name", "arguments", "in_root"), [(name, *written) for name, row in COMMANDS.items() for written in row.writes]
)
def test_it_replaces_only_what_it_was_told_to(
    name: str, arguments: str, in_root: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with pytest.raises(SystemExit):
        main([name, "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "a pinned step is never replaced" in said
    assert "in which a trainer that is alive saves" in said

    def refused(status: int, words: str, *more: str) -> None:
        before = tree(out)
        assert run(name, shlex.join([arguments, *more]).replace("'", ""), out) == status
        assert words in capsys.readouterr().err
        assert tree(out) == before

    out.mkdir()
    lock = file_names.trainer_file(out, "actor")
    if in_root:
        lock.write_bytes(fields.encode(asdict(owners.parent())))
        refused(1, "is alive")
        lock.unlink()
    assert run(name, arguments, out) == 0
    capsys.readouterr()
    refused(2, "with --force")
    if in_root:
        lock.write_bytes(fields.encode(asdict(owners.parent())))
        refused(1, "is alive", "--force")
        lock.unlink()
        (step,) = (entry for entry in out.iterdir() if entry.is_dir())
        if file_names.parse_step(step.name) is not None:
            (step / file_names.PINNED_FILE).touch()
            refused(2, "is pinned", "--force")
            (step / file_names.PINNED_FILE).unlink()
    before = tree(out)
    assert run(name, f"{arguments} --force", out) == 0
    assert {path for path, _ in tree(out)} == {path for path, _ in before}
    assert tree(out) != before


# -- Ctrl-C ------------------------------------------------------------------------------------------------


def tree(folder: Path) -> list[tuple[Path, float]]:
    return sorted((path, path.stat().st_mtime if path.is_file() else 0) for path in folder.rglob("*"))


def interrupt_in(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends this process a SIGINT when a function, or a method of a class, has been called for the first time."""
    owner_name, _, attribute = name.rpartition(".")
    try:
        owner = import_module(owner_name)
    except ModuleNotFoundError:
        module, _, cls = owner_name.rpartition(".")
        owner = getattr(import_module(module), cls)
    called = getattr(owner, attribute)
    is_first = threading.Lock()  # several threads call it

    def interrupting(*args: Any, **fields: Any) -> Any:
        result = called(*args, **fields)
        if is_first.acquire(blocking=False):
            os.kill(os.getpid(), signal.SIGINT)
        return result

    monkeypatch.setattr(owner, attribute, interrupting)


@EVERY
def test_ctrl_c_leaves_nothing_behind(
    name: str,
    folder: Path,
    tmp_path: Path,
    ctrl_c: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Other moments of those that write: test_interrupts.py."""
    interrupt_in(COMMANDS[name].interrupted_in, monkeypatch)
    before = tree(folder)
    assert run(name, COMMANDS[name].success, tmp_path / "out") == INTERRUPTED
    assert capsys.readouterr().err == "mcore-ckpt: interrupted\n"
    assert tree(folder) == before
    left = sorted((tmp_path / "out").rglob("*"))
    assert not left
    assert not (tmp_path / "out").exists()
