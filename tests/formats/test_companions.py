"""What a trainer keeps in a step beside the roles, whatever its name, is missed and found cut."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mcore_ckpt.formats.companions import companions_of, first_cut, what_is_missing


def make_step(root: Path, step: int, *, queue: bool = True, ranks: int = 2) -> Path:
    """As verl 0.9's asynchronous trainer and TransferQueue 0.1.11 leave a step."""
    path = root / f"global_step_{step}"
    (path / "actor").mkdir(parents=True)
    (path / "actor/manifest.json").write_text("{}")
    for rank in range(ranks):
        torch.save({"seen": step}, path / f"data_{rank}.pt")
    if queue:
        units = path / "transfer_queue/storage_units"
        units.mkdir(parents=True)
        (path / "transfer_queue/metadata.json").write_text(json.dumps({"storage_saved": True}))
        (path / "transfer_queue/controller_state.pkl").write_bytes(pickle.dumps({"step": step}))
        (units / f"su_0_unit-{step * 7919:08x}.pkl").write_bytes(pickle.dumps([step]))
        (units / "su_0.pkl.blobs").mkdir()
        (units / f"su_0.pkl.blobs/{step}.bin").write_bytes(b"")
    return path


def test_what_belongs_to_the_trainer(tmp_path: Path) -> None:
    step = make_step(tmp_path, 1)
    (step / "critic/model/dist_ckpt").mkdir(parents=True)
    (step / "critic/model/dist_ckpt/metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (step / ".hidden").touch()
    (step / "notes.txt").touch()
    assert list(companions_of(step)) == ["data_0.pt", "data_1.pt", "notes.txt", "transfer_queue"]
    assert companions_of(step / "nothing") == {}


def test_whole_steps_lack_nothing(tmp_path: Path) -> None:
    steps = [make_step(tmp_path, step, ranks=step) for step in (3, 2, 1)]
    for number, step in enumerate(steps):
        assert what_is_missing(step, steps[number + 1 :]) is None


def remove(step: Path, name: str) -> None:
    for path in sorted(step.glob(name), reverse=True):
        for below in sorted(path.rglob("*"), reverse=True):
            below.rmdir() if below.is_dir() else below.unlink()
        path.rmdir() if path.is_dir() else path.unlink()


def cut(step: Path, name: str) -> None:
    (path,) = step.glob(name)
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "name", "words"),
    [
        (remove, "data_*.pt", "data_0.pt is missing"),
        (remove, "transfer_queue", "transfer_queue is missing"),
        (remove, "transfer_queue/controller_state.pkl", "transfer_queue/controller_state.pkl is missing"),
        (remove, "transfer_queue/storage_units/*.pkl", "is missing"),
        (cut, "data_1.pt", "data_1.pt: is cut off"),
        (cut, "transfer_queue/metadata.json", "metadata.json: is cut off"),
        (cut, "transfer_queue/controller_state.pkl", "controller_state.pkl: is cut off"),
        (cut, "transfer_queue/storage_units/su_0_*.pkl", ".pkl: is cut off"),
    ],
)
def test_what_is_missing_or_cut_is_named(
    tmp_path: Path, damage: Callable[[Path, str], None], name: str, words: str
) -> None:
    newest, *others = [make_step(tmp_path, step) for step in (3, 2, 1)]
    damage(newest, name)
    found = what_is_missing(newest, others)
    assert found is not None
    assert words in found
    assert str(newest) in found


KNOWN = ("data.pt", "data_#.pt", "transfer_queue")


def test_what_only_one_of_two_steps_has_is_not_missed(tmp_path: Path) -> None:
    """It may be what a user has put there."""
    newest, before, first = [make_step(tmp_path, step, queue=False) for step in (3, 2, 1)]
    (before / "merged").mkdir()
    assert what_is_missing(newest, [before, first]) is None
    (first / "merged").mkdir()
    missing = (
        "merged is missing, but global_step_2 and global_step_1 had this file: if you put that file there yourself"
    )
    assert missing in (what_is_missing(newest, [before, first]) or "")


def test_a_single_step_shows_what_the_trainer_is_known_to_write(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newest, before = (make_step(tmp_path, step) for step in (20, 10))
    for name in ("notes.txt", "extra.pt", "eval/scores.json"):
        (before / name).parent.mkdir(exist_ok=True)
        (before / name).write_text("best so far")
    (newest / "eval.json").write_text("{}\n{}\n")
    assert what_is_missing(newest, [before], KNOWN) is None
    assert "lacks notes.txt, which is in global_step_10: if your trainer writes this file" in caplog.text
    remove(newest, "transfer_queue")
    missing = f"{newest}: transfer_queue is missing, but global_step_10 had this file"
    assert what_is_missing(newest, [before], KNOWN) == missing
    remove(newest, "data_*.pt")
    assert "data_0.pt is missing" in (what_is_missing(newest, [before], KNOWN) or "")


def test_a_users_file_that_looks_cut_in_every_step_is_not(tmp_path: Path) -> None:
    steps = [make_step(tmp_path, step) for step in (3, 2, 1)]
    for step in steps:
        (step / "scores.json").write_text("{}\n{}\n")
        (step / "extra.json").write_text("{}")
    assert what_is_missing(steps[0], steps[1:], KNOWN) is None
    (steps[0] / "extra.json").write_text("{")
    assert "extra.json: is cut off" in (what_is_missing(steps[0], steps[1:], KNOWN) or "")


def test_an_empty_file_is_cut(tmp_path: Path) -> None:
    step = make_step(tmp_path, 1)
    for name in ("data_0.pt", "transfer_queue/controller_state.pkl", "transfer_queue/metadata.json"):
        content = (step / name).read_bytes()
        (step / name).write_bytes(b"")
        assert first_cut(step, KNOWN) == step / name
        (step / name).write_bytes(content)
    assert first_cut(step, KNOWN) is None
