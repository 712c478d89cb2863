"""Roles of plain files: files of any size are taken in and given back, and an older branch completes no step."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import Manifest, encode_manifest
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import CheckpointCorruptError, CommitError
from mcore_ckpt.ranks.meeting import single_process_agreement
from mcore_ckpt.steps import commit
from mcore_ckpt.steps.history import RunHistory
from mcore_ckpt.steps.listing import step_status
from mcore_ckpt.steps.role_files import RoleReader, RoleWriter, commit_role, uncommit_earlier_save, uncommit_role
from tests.support.checkpoints import alone_in_the_world, begin, finish, make, stage

ROLES = ("actor", "driver")


def save(step_path: Path, step: int, files: dict[str, bool], **more: Any) -> RoleReader:
    """Commits a role with files from the step's folder. The values tell whether they are shared."""

    def write(writer: RoleWriter) -> None:
        for path, shares in files.items():
            writer.add(path, step_path / path, shares)

    agreement = single_process_agreement("driver", 10)
    commit_role(agreement, step_path / "driver", step, ROLES, write, **more)
    return RoleReader(step_path / "driver")


@pytest.fixture
def step_path(tmp_path: Path) -> Path:
    folder = tmp_path / "global_step_1"
    (folder / "queue").mkdir(parents=True)
    (folder / "data.pt").write_bytes(b"position")
    (folder / "queue/unit.pkl").write_bytes(b"prompts")
    return folder


def test_files_are_copied_or_shared(step_path: Path) -> None:
    role = save(step_path, 1, {"data.pt": False, "queue/unit.pkl": True})
    assert (step_path / "queue/unit.pkl").samefile(role.role_dir / "queue/unit.pkl")
    assert not (step_path / "data.pt").samefile(role.role_dir / "data.pt")
    (step_path / "data.pt").write_bytes(b"another!")
    assert role.read("data.pt", 100) == b"position"
    assert role.read("queue/unit.pkl", 100) == b"prompts"


def test_what_is_the_same(step_path: Path) -> None:
    role = save(step_path, 1, {"data.pt": False, "queue/unit.pkl": True})
    assert role.is_same("data.pt", step_path / "data.pt")
    assert role.is_same("queue/unit.pkl", step_path / "queue/unit.pkl")
    for other in ("missing", "data.pt/missing", "queue", "queue/unit.pkl"):
        assert not role.is_same("data.pt", step_path / other)
    (step_path / "data.pt").write_bytes(b"Position")
    assert not role.is_same("data.pt", step_path / "data.pt")


def test_files_are_given_back(step_path: Path, tmp_path: Path) -> None:
    role = save(step_path, 1, {"data.pt": False, "queue/unit.pkl": True})
    role.put("data.pt", tmp_path / "back.pt")
    role.put("queue/unit.pkl", tmp_path / "back.pkl", shares=True)
    assert (tmp_path / "back.pt").read_bytes() == b"position"
    assert (tmp_path / "back.pkl").samefile(role.role_dir / "queue/unit.pkl")
    (role.role_dir / "data.pt").write_bytes(b"Position")
    with pytest.raises(CheckpointCorruptError, match="it is damaged"):
        role.put("data.pt", tmp_path / "damaged.pt")


def test_a_file_system_without_links(step_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*paths: object, **more: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    role = save(step_path, 1, {"queue/unit.pkl": True})
    assert role.read("queue/unit.pkl", 100) == b"prompts"
    assert not (step_path / "queue/unit.pkl").samefile(role.role_dir / "queue/unit.pkl")


def commit_actor(step_path: Path, step: int, history: RunHistory) -> None:
    staging, attempt = stage(step_path / "actor", step, ROLES)
    manifest = history.stamp(read_manifest(staging), step_path / "actor")
    (staging / file_names.MANIFEST_FILE).write_bytes(encode_manifest(manifest))
    commit.publish(staging, step_path / "actor", attempt)
    history.committed(manifest)


def test_a_role_of_a_branch_that_was_given_up_completes_no_step(step_path: Path) -> None:
    root = step_path.parent

    def save_driver(folder: Path, step: int) -> None:
        def stamp(manifest: Manifest) -> Manifest:
            actor = read_manifest(folder / "actor")
            return replace(manifest, run=actor.run, commit=actor.commit)

        (folder / "data.pt").write_bytes(b"position")
        save(folder, step, {"data.pt": False}, stamp=stamp)

    history = RunHistory(root, "actor", root)
    for step in (1, 2):
        commit_actor(root / f"global_step_{step}", step, history)
        assert not step_status(root / f"global_step_{step}").is_complete
        save_driver(root / f"global_step_{step}", step)
        assert step_status(root / f"global_step_{step}").is_complete
    # The training goes back to step 1, in a new process, and saves step 2 again.
    history = RunHistory(root, "actor", root)
    history.loaded(read_manifest(step_path / "actor").head, step_path / "actor")
    commit_actor(root / "global_step_2", 2, history)
    assert "not committed again by driver" in step_status(root / "global_step_2").reason
    save_driver(root / "global_step_2", 2)
    assert step_status(root / "global_step_2").is_complete


def test_a_role_never_completes_a_step_whose_models_are_being_saved_again(tmp_path: Path) -> None:
    """An async save of the actor has returned, but not committed, when the driver commits."""
    step_path = file_names.step_dir(tmp_path, 1)
    step_path.mkdir()
    (step_path / "data.pt").write_bytes(b"position")
    make(step_path / "actor", 1, ROLES)
    save(step_path, 1, {"data.pt": False})
    agreement = alone_in_the_world()
    uncommit_role(step_path / "driver")
    attempt = begin(agreement, tmp_path, 1)
    (step_path / "data.pt").write_bytes(b"later position")
    with pytest.raises(CommitError, match=r"global_steps_1/actor: process .* is saving this role again"):
        save(step_path, 1, {"data.pt": False})
    assert not step_status(step_path).is_complete
    uncommit_earlier_save(step_path, "actor", "driver")
    save(step_path, 1, {"data.pt": False})
    assert step_status(step_path).missing == {"actor"}
    finish(agreement, attempt, tmp_path, 1, 2, ROLES)
    assert step_status(step_path).is_complete
    assert RoleReader(step_path / "driver").read("data.pt", 100) == b"later position"


def test_a_replaced_checkpoint_that_is_not_removed_yet_delays_no_role(
    step_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the exchange, the staging folder of the new actor holds the old one until all its files are removed."""
    make(step_path / "actor", 1, ROLES)
    staging, attempt = stage(step_path / "actor", 1, ROLES)
    read: list[bytes] = []

    def commit_driver(old: Path, role_dir: Path) -> None:
        if old.exists() and not read:
            assert (old / file_names.OWNER_FILE).exists()
            read.append(save(step_path, 1, {"data.pt": False}).read("data.pt", 100))

    monkeypatch.setattr(commit, "remove_replaced", commit_driver)
    commit.publish(staging, step_path / "actor", attempt)
    assert read == [b"position"]
