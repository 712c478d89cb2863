"""`list` and `inspect` on terminals of any width, and in a pipe."""

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from mcore_ckpt.amounts import age_text, duration_text, size_text
from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.cli.main import main
from mcore_ckpt.steps.pins import pin
from tests.support.checkpoints import ROLE, dead_owner, make, other_host, own, stage

STEPS = (10, 1_000_000)
STYLE = re.compile(r"\x1b\[[0-9;]*m")
COLOR = re.compile(r"\x1b\[(?:[0-9]+;)*(?:3[0-9]|9[0-7])m")

Become = Callable[[int], None]


@pytest.fixture
def root(tmp_path: Path, dead_pid: int) -> Path:
    """Two complete steps, one that lacks a role, one that this process saves, one whose saver died."""
    folder = tmp_path / "checkpoints"
    for step in STEPS:
        make(file_names.step_dir(folder, step) / ROLE, 1)
    make(file_names.step_dir(folder, 20) / ROLE, 1, (ROLE, "critic"))
    stage(file_names.step_dir(folder, 1_000_010) / ROLE, 1)
    dead, _ = stage(file_names.step_dir(folder, 30) / ROLE, 1)
    own(dead, dead_owner(dead_pid))
    pin(folder, 10)
    return folder


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*map(str, arguments)]) == 0
    return STYLE.sub("", capsys.readouterr().out)


def test_a_real_terminal(root: Path) -> None:
    """The fixture `terminal` stands in for it in the other tests."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    with subprocess.Popen(
        [sys.executable, "-m", "mcore_ckpt.cli.main", "list", str(root)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment | {"TERM": "xterm"},
    ) as command:
        os.close(theirs)
        text = b""
        with suppress(OSError):  # Linux says so when the other end is closed
            while data := os.read(ours, 4096):
                text += data
    os.close(ours)
    assert command.returncode == 0
    assert COLOR.search(text.decode())
    lines = STYLE.sub("", text.decode()).splitlines()
    assert max(map(len, lines)) <= 40
    assert "global_steps_1000000" in lines


@pytest.mark.parametrize("columns", [200, 80, 40, 12])
def test_a_step_s_name_is_never_cut(
    columns: int, root: Path, terminal: Become, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal(columns)
    text = shown(capsys, "list", str(root))
    assert max(map(len, text.splitlines())) <= columns
    joined = text if columns > 20 else "".join(line.strip() for line in text.splitlines())
    for step in (10, 20, 30, 1_000_000, 1_000_010):
        assert file_names.step_name(step) in joined
    assert "…" not in text


def test_a_table_says_state_age_and_place(root: Path, terminal: Become, capsys: pytest.CaptureFixture[str]) -> None:
    terminal(250)
    lines = {line.split()[0]: line for line in shown(capsys, "list", str(root)).splitlines()}
    assert re.search(r"actor +1\.3 MB +\d+ d ago +complete, pinned +local", lines["global_steps_10"])
    assert "complete, newest" in lines["global_steps_1000000"]
    assert "incomplete: not committed by critic" in lines["global_steps_20"]
    assert "died while saving it" in lines["global_steps_30"]
    assert "saving by process" in lines["global_steps_1000010"]


def test_a_pipe_gets_one_plain_line_for_each_step(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(root)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    lines = out.splitlines()
    assert len(lines) == 6
    assert [line.split()[0] for line in lines[:-1]] == [
        file_names.step_name(step) for step in (10, 20, 30, 1_000_000, 1_000_010)
    ]
    assert re.fullmatch(r"global_steps_10 +1\.3 MB  2025-01-01T00:00:00\+00:00  actor  pinned", lines[0])


def test_no_color_is_respected(
    root: Path, terminal: Become, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal(100)
    main(["list", str(root)])
    assert not COLOR.search(capsys.readouterr().out)
    monkeypatch.delenv("NO_COLOR")
    main(["list", str(root)])
    assert COLOR.search(capsys.readouterr().out)


def test_a_saver_on_another_host_may_be_alive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    staging, _ = stage(file_names.step_dir(tmp_path, 5) / ROLE, 1)
    own(staging, other_host())
    assert "global_steps_5  is being saved by process" in shown(capsys, "list", str(tmp_path))


def test_a_remote_store_is_listed_beside(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The store has step 10, too, and step 7 alone."""
    store = tmp_path / "store"
    for step in (7, 10):
        made = file_names.step_dir(tmp_path / "made", step) / ROLE
        make(made, 1)
        uploaded = store / file_names.remote_dir(step, ROLE, read_manifest(made).attempt)
        uploaded.parent.mkdir(parents=True)
        made.rename(uploaded)
    text = shown(capsys, "list", str(root), "--remote", f"file://{store}")
    lines = {line.split()[0]: line for line in text.splitlines()}
    assert lines["global_steps_7"].endswith("only remote")
    assert lines["global_steps_7"].split()[1:3] == ["1.3", "MB"]
    assert lines["global_steps_10"].endswith("also remote")
    assert "remote" not in lines["global_steps_1000000"]


@pytest.mark.parametrize("columns", [200, 40, 12])
def test_a_checkpoint_on_a_terminal(
    columns: int, root: Path, terminal: Become, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal(columns)
    text = shown(capsys, "inspect", str(root), "--tensors")
    assert max(map(len, text.splitlines())) <= columns
    joined = "".join(line.strip() for line in text.splitlines())
    for word in ("embedding.weight", "decoder.norm.weight", "exp_avg"):
        assert word in joined
    if columns == 200:
        assert re.search(r"embedding\.weight +float32 +150x101 +exp_avg", text)


# -- folders nearby ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [".", "checkpoints/global_steps_10", "checkpoints/global_steps_10/actor/model"])
def test_a_list_finds_the_root_nearby(
    where: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["list", str(tmp_path / where)]) == 0
    captured = capsys.readouterr()
    assert "newest complete step: 1000000" in captured.out
    assert captured.err.endswith(f"has no steps: taking {root}\n")


@pytest.mark.parametrize("command", ["inspect {}", "verify {}", "reshard {} {}/other", "prune {}", "diff {} {}"])
def test_other_commands_take_the_only_root_below(
    command: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # One of its steps is not complete.
    assert main([word.format(tmp_path) for word in command.split()]) == command.startswith("verify")
    assert f"has no steps: taking {root}" in capsys.readouterr().err


def test_several_roots_are_named(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(file_names.step_dir(tmp_path / "other", 1) / ROLE, 1)
    assert main(["list", str(tmp_path)]) == 2
    assert f"name one of these folders of steps: {root}, {tmp_path / 'other'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("prune", "{}/checkpoints/global_steps_10"), 2),
        (("prune", "{}/checkpoints/global_steps_10/actor", "--max-to-keep", "1"), 2),
        (("inspect", "{}/checkpoints/global_steps_10/actor/model"), 2),
        (("verify", "{}/checkpoints/global_steps_10/actor/model"), 2),
    ],
)
def test_other_commands_name_it(
    arguments: tuple[str, ...], status: int, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert main([argument.format(tmp_path) for argument in arguments]) == status
    assert f"steps are in {root}" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_root_without_steps_is_nothing_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    assert main(["prune", str(tmp_path)]) == 0
    assert main(["list", str(tmp_path)]) == 0
    assert "no step is complete" in capsys.readouterr().out


# -- amounts, progress -------------------------------------------------------------------------------------


def test_amounts_for_people() -> None:
    assert [size_text(size) for size in (0, 999, 1000, 68_400_000, 10**13)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "68.4 MB",
        "10.0 TB",
    ]
    assert [age_text(seconds) for seconds in (None, 3, 200, 90_000)] == ["", "3 s ago", "3 min ago", "1 d ago"]
    assert [duration_text(seconds) for seconds in (7.4, 120, 200, 3600, 90_060)] == [
        "7 s",
        "2 min",
        "3 min 20 s",
        "1 h",
        "25 h 1 min",
    ]


def test_a_log_gets_no_progress(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["verify", str(root), "--step", "10"]
    assert main(arguments) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    assert main(arguments) == 0
    assert "verify" in capsys.readouterr().err
