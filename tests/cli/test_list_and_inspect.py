"""`mcore-ckpt list` and `mcore-ckpt inspect` as they are typed."""

import json
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.cli.main import main
from mcore_ckpt.steps.pins import pin
from tests.support.checkpoints import ROLE, SHAPES, make

BOTH = ("actor", "critic")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (10, 20):
        for role in BOTH:
            make(file_names.step_dir(tmp_path, step) / role, step, BOTH)
    make(file_names.step_dir(tmp_path, 30) / "actor", 30, BOTH)
    make(tmp_path / "global_step_40", 40)
    (file_names.step_dir(tmp_path, 20) / "critic" / file_names.MANIFEST_FILE).write_text("{")
    (tmp_path / file_names.TRACKER_FILE).write_text("20")
    pin(tmp_path, 10)
    return tmp_path


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_list_says_what_counts_and_why_not(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "list", str(root))
    assert found["tracker"] == 20
    assert [(step["step"], step["complete"], step["pinned"]) for step in found["steps"]] == [
        (10, True, True),
        (20, False, False),
        (30, False, False),
        (40, True, False),
    ]
    whole, damaged, missing, flat = found["steps"]
    files = list((root / "global_steps_10").rglob("*.pt"))
    assert whole["bytes"] == sum(path.stat().st_size for path in files)
    assert "critic/manifest.json" in damaged["reason"]
    assert missing["reason"].endswith("not committed by critic")
    assert (flat["roles"], flat["path"]) == ([ROLE], str(root / "global_step_40"))
    assert main(["list", str(root)]) == 0
    shown = capsys.readouterr().out
    assert "global_steps_30  is not complete" in shown
    assert "newest complete step: 40; the tracker names 20" in shown


def test_a_list_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, "list", str(tmp_path)) == {"tracker": None, "steps": []}
    assert main(["list", str(tmp_path / "nowhere")]) == 2
    assert "there is no such folder" in capsys.readouterr().err


def test_what_a_checkpoint_holds(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "inspect", str(root), "--step", "10")
    assert (found["step"], [role["role"] for role in found["roles"]]) == (10, list(BOTH))
    actor = found["roles"][0]
    assert actor["topology"]["dp"] == 1
    assert actor["bytes"] == sum(file["bytes"] for file in actor["files"])
    assert actor["tensors"] is None
    assert answer(capsys, "inspect", str(root))["step"] == 40  # the newest that counts


def test_tensors_are_listed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (role,) = answer(capsys, "inspect", str(root / "global_step_40"), "--tensors")["roles"]
    assert {tensor["name"] for tensor in role["tensors"]} == set(SHAPES)
    norm = next(tensor for tensor in role["tensors"] if tensor["name"] == "decoder.norm.weight")
    assert norm == {"name": "decoder.norm.weight", "dtype": "float32", "shape": [577], "optimizer": ["exp_avg"]}
    (role,) = answer(capsys, "inspect", str(root / "global_step_40"), "--tensors", r"^decoder\.b")["roles"]
    assert [tensor["name"] for tensor in role["tensors"]] == ["decoder.bias"]
    assert main(["inspect", str(root / "global_step_40"), "--tensors", "norm"]) == 0
    assert "decoder.norm.weight  float32 [577]  exp_avg" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["nowhere"], 2, "there is no such folder"),
        ([".", "--step", "30"], 1, "not committed by critic"),
        ([".", "--step", "10", "--role", "reward"], 2, "has no role 'reward': it has actor, critic"),
        (["global_steps_10", "--step", "11"], 2, "is a checkpoint of step 10, not 11"),
        ([".", "--tensors", "("], 2, "is no regular expression"),
    ],
)
def test_exit_status(
    arguments: list[str], status: int, text: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(root / arguments[0]), *arguments[1:]]) == status
    assert text in capsys.readouterr().err
