"""`mcore-ckpt reshard` as it is typed."""

import json
from pathlib import Path

import pytest

from mcore_ckpt.cli.main import main
from mcore_ckpt.steps import tracker
from tests.support.small_model import STEP, make, tensors_of

pytestmark = pytest.mark.slow

ROLE = Path(f"global_steps_{STEP}", "actor")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make(tmp_path / "a", tensors_of()).parent.parent


def test_a_result_for_programs(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reshard", str(source), str(tmp_path / "b"), "--tp", "2", "--pp", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == STEP
    (role,) = found["roles"]
    assert (role["role"], role["path"]) == ("actor", str(tmp_path / "b" / ROLE))
    assert {role["written"][name] for name in ("tp", "pp")} == {2}
    assert role["written"]["world_size"] == 4
    assert role["rng_reseeded"] is True
    assert tracker.read_tracker(tmp_path / "b") == STEP


def test_a_result_for_people(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["--pp", "2", "--pipeline-layout", "Et|tttL"]
    assert main(["reshard", str(source / ROLE), str(tmp_path / "b"), *layout]) == 0
    said = capsys.readouterr().out
    assert str(tmp_path / "b" / ROLE) in said
    assert "2 ranks (tp=1, pp=2, cp=1, dp=1)" in said
    assert "random number generators start anew" in said


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--tp", "3"], 1, "cannot be divided by"),
        (["--pp", "3"], 1, "4 layers on pp = 3"),
        (["--step", "4"], 1, "no complete checkpoint of step 4"),
        (["--tp", "0"], 2, "tp is 0"),
        (["--world", "3", "--tp", "2"], 2, "3 ranks cannot be divided"),
        (["--ep", "2"], 2, "no experts"),
    ],
)
def test_exit_status(
    source: Path, tmp_path: Path, arguments: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reshard", str(source), str(tmp_path / "b"), *arguments]) == status
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""
    assert not (tmp_path / "b").exists()


def test_writing_to_where_it_reads_is_refused(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reshard", str(source), str(source), "--tp", "2"]) == 2
    assert "name another folder" in capsys.readouterr().err
