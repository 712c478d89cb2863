"""verl goes back to the step that was committed last, and only data that no step needs is removed."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import ManifestSummary, encode_manifest
from mcore_ckpt.checkpoint.provenance import Commit
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.integrations.kit.driver import driver_agreement
from mcore_ckpt.integrations.verl.driver_files import DRIVER, add_files, put_back
from mcore_ckpt.integrations.verl.place import Place
from mcore_ckpt.integrations.verl.resume import bare_steps, remove_steps, send_back, step_to_go_back_to, why_not_whole
from mcore_ckpt.steps import NodeStep, commit_role, write_tracker
from mcore_ckpt.steps.branches import Position
from tests.support.checkpoints import make


def write_data(root: Path, step: int) -> None:
    folder = root / f"global_step_{step}"
    folder.mkdir(exist_ok=True)
    torch.save({"seen": step}, folder / "data.pt")


class Life:
    """A training of verl's that saves to a root or only to the nodes, and goes back."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.position = Position()
        self.commits: dict[int, Commit] = {}
        self.on_nodes: dict[int, NodeStep] = {}

    def save(self, *steps: int, to_root: bool = True) -> None:
        for step in steps:
            commit = self.commits[step] = self.position.next()
            self.position = self.position.after(commit, str(step))
            if to_root:
                role_dir = self.root / f"global_step_{step}" / "actor"
                make(role_dir, step)
                manifest = replace(read_manifest(role_dir), commit=commit)
                (role_dir / file_names.MANIFEST_FILE).write_bytes(encode_manifest(manifest))
            else:
                self.on_nodes[step] = NodeStep(
                    step, (ManifestSummary(step, "actor", ("actor",), "", "", commit=commit),)
                )
            write_data(self.root, step)
            write_tracker(self.root, step)

    def go_back(self, step: int) -> None:
        self.position = self.position.at(step, self.commits[step], str(step))

    def place(self, step: int) -> Place:
        return Place.of(self.root / f"global_step_{step}" / "actor", "actor")

    @property
    def steps(self) -> list[int]:
        return sorted(file_names.step_dirs(self.root))


def test_data_of_what_the_nodes_have_stays_below_an_abandoned_step(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.save(100)
    life.save(102, to_root=False)
    life.save(200)
    life.go_back(100)
    life.save(105, 110, 115, to_root=False)
    write_tracker(tmp_path, 110)
    assert bare_steps(life.place(115)) == [105, 102]
    remove_steps(tmp_path, {102})
    assert life.steps == [100, 105, 110, 115, 200]


def test_what_is_not_verls_alone_stays(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.save(1, 2, 3, to_root=False)
    life.save(4)
    (tmp_path / "global_step_1/notes.txt").write_text("best so far")
    (tmp_path / "global_step_2/.staging").mkdir()
    assert bare_steps(life.place(4)) == [3]


def test_the_step_to_go_back_to_is_the_one_that_was_committed_last(tmp_path: Path) -> None:
    """Step 3 was saved again after a rollback, and later ones only on the nodes."""
    life = Life(tmp_path)
    life.save(1, 2, 3, 4, 5, 6)
    for step in (3, 4, 5):
        shutil.rmtree(tmp_path / f"global_step_{step}")
    life.go_back(2)
    life.save(3)
    life.save(4, 5, to_root=False)
    (tmp_path / "global_step_5/data.pt").unlink()
    lacking = life.place(5)
    assert "data.pt is missing" in (why_not_whole(lacking, life.on_nodes) or "")
    assert step_to_go_back_to(lacking, life.on_nodes) == 4
    assert "the newest complete step is 4, which" in send_back(lacking, has_copies=False, on_nodes=life.on_nodes)


def test_a_file_of_the_users_in_the_only_other_step_is_not_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    life = Life(tmp_path)
    life.save(10, 20)
    (tmp_path / "global_step_10/notes.txt").write_text("best so far")
    assert why_not_whole(life.place(20)) is None
    assert "lacks notes.txt, which is in global_step_10" in caplog.text
    (tmp_path / "global_step_20/data.pt").unlink()
    assert "data.pt is missing, but global_step_10 had this file" in (why_not_whole(life.place(20)) or "")


def test_an_abandoned_step_is_the_last_to_go_back_to(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.save(90, 100)
    life.go_back(90)
    life.save(95)
    assert step_to_go_back_to(life.place(95)) == 90


def test_the_driver_can_commit_while_the_interpreter_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the interpreter waits for an async save of the driver, but then no executor takes work any more."""
    monkeypatch.setattr("concurrent.futures.thread._shutdown", True)
    step = tmp_path / "global_step_1"
    (step / "transfer_queue").mkdir(parents=True)
    for number in range(20):
        (step / "transfer_queue" / f"{number}.bin").write_bytes(bytes([number]))
    agreement = driver_agreement(DRIVER, 20.0)
    commit_role(agreement, step / DRIVER, 1, [DRIVER], lambda files: add_files(step, files))
    assert len(read_manifest(step / DRIVER).files) == 20


@pytest.mark.parametrize("had_queue", [False, True])
def test_a_queue_that_was_not_committed_is_not_read_with_the_step(had_queue: bool, tmp_path: Path) -> None:
    """The driver died while it saved the step again, maybe in another mode."""
    step = tmp_path / "global_step_1"
    queue = step / "transfer_queue"
    (queue if had_queue else step).mkdir(parents=True)
    (step / "data.pt").write_bytes(b"committed")
    if had_queue:
        (queue / "0.bin").write_bytes(b"committed")
    commit_role(driver_agreement(DRIVER, 20.0), step / DRIVER, 1, [DRIVER], lambda files: add_files(step, files))
    (step / "notes").mkdir()
    queue.mkdir(exist_ok=True)
    (queue / "1.bin").write_bytes(b"later")
    put_back(step)
    # What a process leaves that dies just before its replacement is over.
    (step / ".transfer_queue.replaced").mkdir()
    (step / ".data.pt.committed").mkdir()
    put_back(step)
    left = {path.relative_to(step).as_posix() for path in step.iterdir()} | {path.name for path in queue.glob("*")}
    assert left == {"data.pt", "driver", "notes"} | ({"transfer_queue", "0.bin"} if had_queue else set())
