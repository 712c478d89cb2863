"""`mcore-ckpt doctor`: what it prints, and its exit status."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_ckpt.cli.main import main
from mcore_ckpt.tools.examine.doctor import speed, trial
from mcore_ckpt.tools.examine.doctor.findings import Finding

NOBODY = 65534
FAST = ("--megabytes", "0")


def test_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path), *FAST]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0] == str(tmp_path)
    assert lines[-1].startswith("checkpoints can be saved here: ")
    assert any(line.startswith("fine      exclusive creation ") for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path), "--json", "--megabytes", "4"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["root"], result["usable"], result["ranks"]) == (str(tmp_path), True, 1)
    assert result["mount"]["kind"]
    by_topic = {finding["topic"]: finding for finding in result["findings"]}
    assert by_topic[speed.WRITE]["values"]["raw_bytes_per_s"] > 0
    assert set(by_topic[speed.WRITE]) == {"topic", "severity", "fact", "cost", "advice", "values", "ranks"}


@pytest.mark.parametrize(("kind", "words"), [("missing", "there is no such folder"), ("file", "is a file")])
def test_what_is_no_folder(kind: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["doctor", str(tmp_path / kind)]) == 2
    assert f"{tmp_path / kind}: {words}" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("--timeout", "nan"), ("--megabytes", "-1"), ("--megabytes", "x")])
def test_unusable_arguments(arguments: tuple[str, str], tmp_path: Path) -> None:
    assert status_of(["doctor", str(tmp_path), *arguments]) == 2


def status_of(arguments: list[str]) -> int:
    """The exit status of a command that may end by SystemExit, as for arguments that cannot be parsed."""
    try:
        return main(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)


def in_a_fork(work: Callable[[], int]) -> int:
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            status = work()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_folder_of_another_user(capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> None:
    # Not pytest's, whose folders no other user may enter.
    folder = Path(tempfile.mkdtemp(dir=os.environ.get("TESTS_DISK")))
    request.addfinalizer(folder.rmdir)
    folder.chmod(0o755)

    def work() -> int:
        os.setuid(NOBODY)
        return main(["doctor", str(folder), "--json", *FAST])

    assert in_a_fork(work) == 1
    result = json.loads(capfd.readouterr().out)
    (finding,) = (finding for finding in result["findings"] if finding["topic"] == trial.FOLDER)
    assert finding["severity"] == "bad"
    assert "user nobody cannot write here: Permission denied" in finding["fact"]
    assert "belongs to root" in finding["fact"]
    assert "mode 0755" in finding["fact"]


def test_incomplete_variables_of_torchrun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    assert main(["doctor", str(tmp_path)]) == 2
    assert "RANK" in capsys.readouterr().err


def test_a_job_whose_other_rank_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", str(tmp_path), "--timeout", "1", *FAST]) == 1
    text = capsys.readouterr().out
    assert "no word from rank 1 within 1 s" in text
    assert "exclusive creation" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_a_signal(number: signal.Signals, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(folder: Path, *_: object) -> list[Finding]:
        (tmp_path / "seen").write_text(str(len(list(folder.parent.parent.iterdir()))))
        os.kill(os.getpid(), number)
        return []

    def work() -> int:
        # A shell ignores Ctrl-C for what it starts in the background, and so would this process.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return status_of(["doctor", str(tmp_path)])

    monkeypatch.setattr(speed, "measure", measure)
    assert in_a_fork(work) == status
    assert (tmp_path / "seen").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["seen"]


@pytest.mark.full
def test_under_torchrun(tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "mcore_ckpt.cli.main"]
    done = subprocess.run(
        [sys.executable, *command, "doctor", str(tmp_path), "--json", *FAST], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["usable"], result["ranks"], len(result["hosts"])) == (True, 2, 2)
    assert list(tmp_path.iterdir()) == []
