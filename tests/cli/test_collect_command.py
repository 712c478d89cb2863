"""`mcore-ckpt collect` as it is typed, and what the other commands say of one node's folder."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import encode_manifest
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.cli.main import main
from mcore_ckpt.errors import NoRoomError
from mcore_ckpt.steps import new_step, tracker
from mcore_ckpt.tools.examine.verify import verify
from mcore_ckpt.tools.maintain import collect as tool
from tests.support import small_model
from tests.support.node_folders import divide
from tests.support.small_model import STEP, make, stored, tensors_of

ROLE = Path(f"global_steps_{STEP}", "actor")
LAST = file_names.optimizer_file(0, 3, 0, 0)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`whole`, a checkpoint of four ranks; `alone` and `copied`: four nodes' folders without and with one copy each."""
    folder = tmp_path_factory.mktemp("nodes")
    role_dir = make(folder / "whole", tensors_of(), tp=4)
    for name, replicas in (("alone", 0), ("copied", 1)):
        divide(role_dir, [folder / name / f"node{number}" for number in range(4)], replicas)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(made, tmp_path / "made")
    monkeypatch.chdir(tmp_path / "made")
    return tmp_path / "made"


def answer(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> Any:
    assert main([*arguments, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def nodes(kind: str, *numbers: int) -> list[str]:
    return [f"{kind}/node{number}" for number in numbers]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (1, 3, 0, 2)])
def test_of_two_saves_of_a_step_the_second_one_is_taken(order: tuple[int, ...], folder: Path) -> None:
    """As a load does. Nodes 0 and 2 were away when the step was saved once more."""
    for number in (1, 3):
        place = folder / f"copied/node{number}" / ROLE
        again = replace(read_manifest(place), attempt="f" * 32, created="2099-01-01T00:00:00+00:00")
        (place / file_names.MANIFEST_FILE).write_bytes(encode_manifest(again))
    found = tool.choose(tool.find_steps([folder / f"copied/node{number}" for number in order]))
    assert found is not None
    assert found.roles[0].manifest.attempt == "f" * 32


@pytest.mark.parametrize("folders", [nodes("alone", 0, 1, 2, 3), nodes("copied", 0, 2)])
def test_the_folders_become_the_checkpoint(
    folders: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(capsys, "collect", *folders, "out")
    whole = read_manifest(folder / "whole" / ROLE)
    assert (found["step"], found["not_whole"]) == (STEP, [])
    (role,) = found["roles"]
    assert (role["path"], role["bytes"], role["damaged"]) == (str(folder / "out" / ROLE), whole.nbytes, [])
    assert read_manifest(folder / "out" / ROLE) == whole  # the attempt's id, and no placement
    assert verify(folder / "out").is_sound
    assert tracker.read_tracker(folder / "out") == STEP
    assert {path.name for path in (folder / "out").iterdir()} == {ROLE.parent.name, file_names.TRACKER_FILE}
    wanted, got = stored(folder / "whole" / ROLE), stored(folder / "out" / ROLE)
    assert wanted.keys() == got.keys()
    assert all(wanted[key].equal(got[key]) for key in wanted)


def test_missing_files_are_named_with_their_nodes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect", *nodes("copied", 0, 1), "out"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"step {STEP} is not whole" in captured.err
    assert "files that were on node2, node3:" in captured.err
    assert file_names.optimizer_file(0, 2, 0, 0) in captured.err
    assert LAST not in captured.err  # its copy is on node0
    assert not (folder / "out").exists()
    found = answer(capsys, "collect", *nodes("alone", 0, 1, 2), "out", status=1)
    assert (found["step"], found["roles"]) == (None, [])
    ((missing,),) = [step["missing"] for step in found["not_whole"]]
    assert missing["nodes"] == ["node3"]
    assert LAST in missing["files"]


def test_a_damaged_file_is_taken_from_another_node(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(folder / "copied" / "node3" / ROLE / LAST)
    found = answer(capsys, "collect", *nodes("copied", 3, 0, 1, 2), "out")
    (damage,) = found["roles"][0]["damaged"]
    assert "copied/node3" in damage
    assert LAST in damage
    assert verify(folder / "out").is_sound
    flip(folder / "copied" / "node0" / ROLE / LAST)
    assert main(["collect", *nodes("copied", 0, 1, 2, 3), "again"]) == 1
    assert f"{LAST} of actor is intact in none of the folders" in capsys.readouterr().err
    assert not (folder / "again").exists()


def test_an_older_step_that_is_whole_precedes_a_newer_one_that_is_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(small_model, "STEP", STEP + 1)
    divide(make(folder / "newer", tensors_of(), tp=4), [folder / name for name in nodes("alone", 0, 1, 2, 3)])
    os.unlink(folder / "alone" / "node3" / f"global_steps_{STEP + 1}" / "actor" / LAST)
    found = answer(capsys, "collect", *nodes("alone", 0, 1, 2, 3), "out")
    assert found["step"] == STEP
    (newer,) = found["not_whole"]
    assert (newer["step"], newer["missing"][0]["files"]) == (STEP + 1, [LAST])
    assert (
        answer(capsys, "collect", *nodes("alone", 0, 1, 2, 3), "o", "--step", str(STEP + 1), status=1)["step"] is None
    )


def test_a_save_that_one_node_has_committed_counts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(4):
        role_dir = folder / "alone" / f"node{number}" / ROLE
        if number:
            role_dir.rename(file_names.staging_dir(role_dir, read_manifest(role_dir).attempt))
    assert answer(capsys, "collect", *nodes("alone", 0, 1, 2, 3), "out")["step"] == STEP
    (found,) = answer(capsys, "collect", *nodes("alone", 1, 2, 3), "o", status=1)["not_whole"]
    assert "is committed in none of the folders" in found["problems"][0]


def test_all_roles_of_a_step_are_needed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = ("actor", "critic")
    folders = [folder / name for name in nodes("both", 0, 1)]
    for role in both:
        divide(make(folder / "roles", tensors_of(), tp=2, role=role, roles=both), folders)
    assert [role["role"] for role in answer(capsys, "collect", *nodes("both", 0, 1), "out")["roles"]] == [*both]
    for each in folders:
        shutil.rmtree(each / ROLE.parent / "critic")
    (found,) = answer(capsys, "collect", *nodes("both", 0, 1), "o", status=1)["not_whole"]
    assert found["problems"] == ["critic: is in none of the folders"]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["nowhere", "out"], 2, "there is no such folder"),
        (["whole", "out"], 1, "none of these folders has a step of the fast tier"),
        (["alone/node0", "out", "--step", "7"], 1, "has step 7 of the fast tier"),
        ([*nodes("alone", 0, 1, 2, 3), "alone/node0"], 2, "is the folder of a node"),
    ],
)
def test_exit_status(
    arguments: list[str], status: int, words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["collect", *arguments]) == status
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""
    assert not (folder / "out").exists()


def test_too_little_space_is_said_before_anything_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, sizes: Any) -> None:
        raise NoRoomError(f"{path}: {sum(sizes)} bytes")

    monkeypatch.setattr(new_step, "check_space", full)
    nbytes = read_manifest(folder / "whole" / ROLE).nbytes
    steps = tool.find_steps([folder / name for name in nodes("alone", 0, 1, 2, 3)])
    with pytest.raises(NoRoomError, match=f"{nbytes} bytes"):
        tool.collect(steps[0], folder / "out")
    assert not (folder / "out").exists()


# -- one node's folder ------------------------------------------------------------------------------------------


def test_a_list_says_how_much_is_here(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (step,) = answer(capsys, "list", "copied/node0")["steps"]
    assert (step["state"], step["complete"], step["newest"]) == ("partial", False, True)
    assert (step["nodes"]["here"], step["nodes"]["of"]) == (2, 4)
    there = list((folder / "copied" / "node0" / ROLE).rglob("*.pt"))
    assert (step["nodes"]["files_here"], step["bytes"]) == (len(there), sum(path.stat().st_size for path in there))
    assert main(["list", "copied/node0"]) == 0
    assert "but this node's folder has only 2 of 4 nodes' files" in capsys.readouterr().out


def test_inspect_shows_which_nodes_have_the_rest(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (role,) = answer(capsys, "inspect", "copied/node0")["roles"]
    (rest, _) = role["nodes"]["elsewhere"]
    assert rest["nodes"] == ["node1", "node2"]
    assert file_names.optimizer_file(0, 1, 0, 0) in rest["files"]
    assert main(["inspect", "copied/node0"]) == 0
    shown = capsys.readouterr().out
    assert "here: 2 of 4 nodes' files" in shown
    assert "on node1, node2: " in shown
    assert answer(capsys, "inspect", "whole")["roles"][0]["nodes"] is None


def test_verify_checks_what_is_here(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "verify", "copied/node0")
    (role,) = found["roles"]
    assert (found["sound"], found["problems"], role["files"]) == (True, [], role["nodes"]["files_here"])
    assert main(["verify", "copied/node0", "--deep"]) == 0
    assert "on node1, node2: " in capsys.readouterr().out
    own = folder / "copied" / "node0" / ROLE / file_names.optimizer_file(0, 0, 0, 0)
    os.truncate(own, own.stat().st_size - 1)
    assert main(["verify", "copied/node0"]) == 1
    assert str(own) in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ("reshard", "copied/node0", "out", "--tp", "2"),
        ("merge", "copied/node0", "out"),
        ("convert", "copied/node0", "--format", "torch_dist", "--output_path", "out"),
        ("diff", "whole", "copied/node0"),
        ("inspect", "copied/node0", "--tensors"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_other_commands_say_what_to_do(
    arguments: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert "2 of 4 nodes' files" in captured.err
    assert "mcore-ckpt collect NODEFOLDER... DST" in captured.err
    assert captured.out == ""


def test_a_node_that_has_all_files_is_a_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    divide(folder / "whole" / ROLE, [folder / "one"])
    assert answer(capsys, "list", "one")["steps"][0]["state"] == "complete"
    assert answer(capsys, "verify", "one")["sound"]
    assert answer(capsys, "diff", "whole", "one")["same"]
    assert answer(capsys, "reshard", "one", "out", "--tp", "2")["step"] == STEP
    assert read_manifest(folder / "out" / ROLE).placement is None
