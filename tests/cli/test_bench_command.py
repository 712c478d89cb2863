"""`mcore-ckpt bench`: what it prints, its exit status, and what it leaves behind."""

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_ckpt.cli.main import main
from mcore_ckpt.tools.maintain.bench import bench, speeds, trial_saves
from tests.support.privileges import without_privileges
from tests.support.small_disks import tmpfs
from tests.support.tiny_models import make_hf_folder

FAST = ("--megabytes", "2")
GIVEN_SPEEDS = speeds.Speeds(1, 10**6, ((10**6, 1e9), (4 * 10**6, 1e9)), *[1e9] * 5, "", *[0.01] * 4)


@pytest.fixture(autouse=True)
def few_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "_SAVES", 1)
    monkeypatch.setattr(bench, "_REAL_SAVES", 1)


def test_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "8B", "--tp", "2", "--dp", "8", "--ranks-per-node", "2", "--real", "3"]
    assert main(["bench", str(tmp_path), *FAST, *arguments]) == 0
    text = capsys.readouterr().out
    assert text.startswith(str(tmp_path))
    words = " ".join(text.split())
    assert (
        "8 billion parameters on 16 ranks (tp=2, pp=1, cp=1, dp=8): 112.0 GB a save, 14.0 GB a node, 7.0 GB a rank"
        in words
    )
    assert "the prediction holds if each of 8 nodes writes as fast as this one, all at once" in words
    for row in (
        "copying 2.0 MB in host memory",
        "commit",
        "first async save at once: stall",
        "ratio",
        "load, same layout",
    ):
        assert row in words
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("spread", "is_busy"), [((0.9, 1.2), False), ((0.8, 2.5), True)])
def test_a_busy_machine(
    spread: tuple[float, float],
    is_busy: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "measure", lambda *_: replace(GIVEN_SPEEDS, spread=spread))
    assert main(["bench", str(tmp_path), *FAST]) == 0
    text = capsys.readouterr().out
    assert ("busy: trial saves took 0.80 to 2.50 times their median" in text) is is_busy


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(tmp_path), *FAST, "--json", "--model", "1e6", "--dtype", "fp32", "--real", "3"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert captured.err == ""
    assert set(result) == {"root", "mount", "speeds", "size", "prediction", "fitting_saves", "real"}
    assert (result["root"], result["size"]["total_bytes"]) == (str(tmp_path), 12_000_000)
    assert result["fitting_saves"] > 0
    stall = result["prediction"]["stall"]
    assert stall["seconds"] == pytest.approx(sum(stall["parts"].values()))
    (real,) = result["real"]
    assert real["bytes"] == pytest.approx(3e6, rel=0.01)
    assert real["stall"]["ratio"] == pytest.approx(real["stall"]["predicted_s"] / real["stall"]["measured_s"])


def test_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *FAST, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["root"], result["size"], result["prediction"], result["real"]) == (str(tmp_path), None, None, [])
    assert result["speeds"]["ranks"] == 1
    assert min(value for name, value in result["speeds"].items() if name.endswith("_s")) > 0


@pytest.mark.parametrize(
    ("text", "parameters"),
    [
        ("8B", 8 * 10**9),
        ("8b", 8 * 10**9),
        ("0.6B", 600 * 10**6),
        ("350M", 350 * 10**6),
        ("1T", 10**12),
        ("2e9", 2 * 10**9),
    ],
)
def test_a_number_of_parameters(text: str, parameters: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(tmp_path), *FAST, "--model", text, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["size"]["parameters"] == parameters


def test_a_model_below_the_home_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell leaves `--model=~/hf` as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    make_hf_folder(tmp_path / "hf", "qwen3")
    (tmp_path / "root").mkdir()
    assert main(["bench", str(tmp_path / "root"), *FAST, "--model=~/hf", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["size"]["tensors"] > 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "large"), "--model large: is neither a folder nor a number"),
        (("--model", "8X"), "nor a number of parameters, such as 8B or 8e9"),
        (("--model", "B"), "--model B: is neither a folder nor a number"),
        (("--model", "8 billion"), "--model 8 billion: is neither a folder"),
        (("--model", "inf"), "--model inf: is neither a folder nor a number"),
        (("--model", "-5"), "a model of -5 parameters"),
        (("--tp", "2"), "--tp is given without --model"),
        (("--model", "8e9", "--optimizer", "none"), "optimizer is 'none'"),
        (("--model", "8e9", "--ep", "2"), "ep is 2"),
        (("--megabytes", "0"), "--megabytes 0: use 2 or more"),
        (("--real", "nan"), "--real nan: use 2 or more"),
        (("--megabytes", "1e9"), "needs twice as much memory"),
        (("--ranks-per-node", "0"), "ranks_per_node is 0"),
    ],
)
def test_unusable_arguments(
    arguments: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(tmp_path), *arguments]) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(tmp_path / "none"), *FAST]) == 2
    assert f"{tmp_path / 'none'}: there is no such folder" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o555)
    with without_privileges():
        status = main(["bench", str(tmp_path), *FAST])
    assert status == 1
    assert "cannot write here: Permission denied" in capsys.readouterr().err


def test_too_little_space(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tmpfs(tmp_path / "small", "8m") as small:
        assert main(["bench", str(small), "--megabytes", "5"]) == 1
        assert "bytes are needed, but only" in capsys.readouterr().err
        assert list(small.iterdir()) == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_a_signal_in_the_middle_of_a_save(
    number: signal.Signals, status: int, tmp_path: Path, ctrl_c: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def interrupt(root: Path) -> None:
        seen.append(len(list(tmp_path.iterdir())))
        signal.raise_signal(number)

    monkeypatch.setattr(trial_saves, "move_tracker", interrupt)
    assert status_of(["bench", str(tmp_path), *FAST]) == status
    assert seen == [1]
    assert list(tmp_path.iterdir()) == []


def status_of(arguments: list[str]) -> int:
    """The exit status of a command that may end by SystemExit."""
    try:
        return main(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)
