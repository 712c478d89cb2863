"""A step counts when its files are there, and not when its manifest says so."""

import json
import logging
import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import WrittenFile, encode_manifest
from mcore_ckpt.checkpoint.placement import Placement
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.cli.main import main
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.io.folder_sizes import sizes_below, sizes_of
from mcore_ckpt.io.store import Store
from mcore_ckpt.recover import resumable_steps
from mcore_ckpt.steps import leftovers, listing, tracker
from mcore_ckpt.steps.choice import choose
from mcore_ckpt.steps.node_files import as_in_folder
from mcore_ckpt.steps.remote_steps import RemoteSteps
from mcore_ckpt.steps.retention import PreservationPolicy, delete_old_steps, too_old
from mcore_ckpt.steps.upload import Upload
from mcore_ckpt.steps.upload_queue import UploadQueue
from mcore_ckpt.steps.worth import Worth
from mcore_ckpt.tools.examine.select import select
from mcore_ckpt.tools.examine.step_list import step_list_of
from tests.support.checkpoints import ROLE, make, manifest_of


def of_step(root: Path, step: int) -> Path:
    return file_names.step_dir(root, step) / ROLE


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three steps, of which the newest is only a manifest, as after an interrupted `cp -r` or an `rm -r`."""
    for step in (1, 2, 3):
        make(of_step(tmp_path, step), step)
    hollow(of_step(tmp_path, 3))
    return tmp_path


def hollow(role_dir: Path) -> None:
    for entry in role_dir.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)


def cut(role_dir: Path) -> None:
    file = next(iter(sorted(role_dir.rglob("*.pt"))))
    os.truncate(file, file.stat().st_size - 1)


def link_out(role_dir: Path) -> None:
    """A load reads nothing outside of the role's folder."""
    elsewhere = role_dir.parent.parent / "elsewhere"
    shutil.move(role_dir / "optim", elsewhere)
    (role_dir / "optim").symlink_to(elsewhere)


def lengthen(role_dir: Path) -> None:
    with next(iter(role_dir.rglob("*.pt"))).open("ab") as file:
        file.write(b"x")


@pytest.mark.parametrize("damage", [hollow, cut, link_out, lengthen])
def test_a_step_that_lacks_bytes_is_only_claimed(damage: Callable[[Path], None], tmp_path: Path) -> None:
    make(of_step(tmp_path, 1), 1)
    assert listing.step_status(file_names.step_dir(tmp_path, 1)).worth is Worth.WHOLE
    damage(of_step(tmp_path, 1))
    (status,) = listing.list_steps(tmp_path)
    assert (status.worth, status.is_claimed, status.is_complete) == (Worth.CLAIMED, True, False)
    assert "missing or cut: " in status.reason
    assert all(path in status.reason for lack in status.lacks for path in lack.paths[:3])


def test_links_within_the_folder_and_other_files_do_not_matter(tmp_path: Path) -> None:
    role_dir = of_step(tmp_path, 1)
    make(role_dir, 1)
    (role_dir / "optim").rename(role_dir / "shards")
    (role_dir / "optim").symlink_to("shards")
    file = next(iter((role_dir / "model").rglob("*.pt")))
    file.rename(role_dir / "notes")
    file.symlink_to(os.path.relpath(role_dir / "notes", file.parent))
    (role_dir / "loop").symlink_to(".")
    assert listing.step_status(role_dir.parent).is_complete
    assert sizes_below(role_dir)[str(file.relative_to(role_dir))] == file.stat().st_size
    assert sizes_of(role_dir, ["../actor/notes", "shards/../notes", "loop/notes"]) == {
        "loop/notes": (role_dir / "notes").stat().st_size
    }


def test_the_last_loadable_steps_are_not_deleted_for_one_that_is_only_a_manifest(root: Path) -> None:
    assert delete_old_steps(root, PreservationPolicy(max_to_keep=1)) == [1]
    assert [status.step for status in listing.complete_steps(root)] == [2]
    # It may be a copy under way. With enough newer steps it goes, as it would if it were whole.
    make(of_step(root, 4), 4)
    assert delete_old_steps(root, PreservationPolicy(max_to_keep=1)) == [2, 3]
    assert main(["prune", str(root), "--max-to-keep", "1"]) == 0
    assert [status.step for status in listing.list_steps(root)] == [4]


def test_keep_every_keeps_what_may_be_mended(root: Path) -> None:
    for step in (4, 5):
        make(of_step(root, step), step)
    assert delete_old_steps(root, PreservationPolicy(max_to_keep=1, keep_every=3)) == [1, 2, 4]


def test_retention_does_not_look_at_steps_that_are_too_old_anyway(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []
    look = listing.lack_of
    monkeypatch.setattr(listing, "lack_of", lambda folder, *how: looked_at.append(folder) or look(folder, *how))
    assert delete_old_steps(root, PreservationPolicy(max_to_keep=1)) == [1]
    assert looked_at == [of_step(root, 3), of_step(root, 2)]


def test_newest_and_tracker_are_of_a_whole_step(root: Path) -> None:
    newest = listing.newest_complete(root)
    assert newest is not None
    assert newest.step == tracker.update_tracker(root) == tracker.read_tracker(root) == 2
    tracker.update_tracker(root, committed=3)
    assert tracker.read_tracker(root) == 2


def test_a_recovery_skips_it_and_says_what_it_lacks(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    hollow(of_step(root, 1))
    with caplog.at_level(logging.WARNING):
        assert [status.step for status in resumable_steps(root, [ROLE])] == [2]
    assert "model/mp_rank_00_000/model_states.pt (missing)" in caplog.text
    with pytest.raises(CheckpointCorruptError, match=r"no step 3 .*\n.*3 of its 3 files are missing or cut"):
        resumable_steps(root, [ROLE], 3)
    # Nobody may take this for a new training.
    hollow(of_step(root, 2))
    with pytest.raises(CheckpointCorruptError, match="no step is complete"):
        resumable_steps(root, [ROLE])


def test_a_step_that_is_replaced_during_the_look_is_looked_at_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = listing.step_status(file_names.step_dir(root, 3))
    from mcore_ckpt.steps import worth

    compare = worth.compare

    def saved_meanwhile(*args: object) -> worth.Lack | None:
        monkeypatch.setattr(worth, "compare", compare)
        make(of_step(root, 3), 4)
        return compare(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(worth, "compare", saved_meanwhile)
    assert status.is_complete


def leave_part_of_a_node(role_dir: Path) -> None:
    """Makes of a checkpoint what one of two nodes of the fast tier has of it."""
    manifest = read_manifest(role_dir)
    by_file = tuple((number % 2,) for number in range(len(manifest.files)))
    placed = encode_manifest(replace(manifest, placement=Placement(("a", "b"), by_file)))
    (role_dir / file_names.MANIFEST_FILE).write_bytes(placed)
    (role_dir / manifest.files[1].path).unlink()


def test_a_node_of_the_fast_tier_has_its_own_files(tmp_path: Path) -> None:
    """The files of the other nodes are elsewhere by design. If its own are gone, its part is nothing."""
    role_dir = of_step(tmp_path, 1)
    make(role_dir, 1)
    leave_part_of_a_node(role_dir)
    assert as_in_folder(tmp_path, listing.list_steps(tmp_path))[0].is_complete
    assert listing.step_status(role_dir.parent).worth is Worth.CLAIMED
    (role_dir / read_manifest(role_dir).files[0].path).unlink()
    assert as_in_folder(tmp_path, listing.list_steps(tmp_path))[0].worth is Worth.CLAIMED


def test_a_part_of_one_node_is_not_whole_in_a_root(tmp_path: Path) -> None:
    """As after `rsync -a node0/global_steps_3 root/`."""
    for step in (1, 2, 3):
        make(of_step(tmp_path, step), step)
    leave_part_of_a_node(of_step(tmp_path, 3))
    assert [status.step for status in resumable_steps(tmp_path, [ROLE])] == [2, 1]
    assert select(tmp_path).step == 2
    for last in (None, 1):
        listed = step_list_of(tmp_path, last=last).steps[-1]
        assert (listed.step, listed.state, listed.newest) == (3, "damaged", False)
        assert "one node's part of a checkpoint: put the folders of all nodes together" in listed.reason
    assert main(["prune", str(tmp_path), "--max-to-keep", "1"]) == 0
    assert [status.step for status in listing.complete_steps(tmp_path)] == [2]


def test_a_manifest_that_only_a_full_decoding_understands(tmp_path: Path) -> None:
    """Such as one that another program has written anew, in another form with the same checksum."""
    role_dir = of_step(tmp_path, 1)
    role_dir.mkdir(parents=True)
    files = [(0, WrittenFile('a "name".pt', "extra", 1, 0))]
    (role_dir / file_names.MANIFEST_FILE).write_bytes(encode_manifest(manifest_of(files, 1, 1, "a", ROLE, (ROLE,))))
    (role_dir / 'a "name".pt').write_bytes(b"")
    assert listing.step_status(role_dir.parent).worth is Worth.CLAIMED
    (role_dir / 'a "name".pt').write_bytes(b"x")
    assert listing.step_status(role_dir.parent).is_complete


def test_list_says_what_is_missing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(root), "--json"]) == 0
    *_, second, third = json.loads(capsys.readouterr().out)["steps"]
    assert (second["state"], second["complete"], second["newest"]) == ("complete", True, True)
    assert (third["state"], third["complete"], third["newest"]) == ("damaged", False, False)
    assert "model/mp_rank_00_000/model_states.pt (missing)" in third["reason"]
    assert main(["list", str(root)]) == 0
    shown = capsys.readouterr().out
    assert "global_steps_3  is damaged: " in shown
    assert "newest complete step: 2; " in shown
    assert main(["inspect", str(root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 2
    assert main(["inspect", str(root), "--step", "3"]) == 1
    assert "missing or cut" in capsys.readouterr().err
    assert main(["verify", str(root)]) == 1
    assert "global_steps_2/actor: sound" in capsys.readouterr().out


def test_a_store_counts_what_it_has(root: Path, tmp_path: Path) -> None:
    """As after a rule of the store that deletes old objects, or an interrupted copy of a bucket."""
    remote = RemoteSteps(Store(f"file://{tmp_path}/store"))
    make(of_step(root, 3), 3)
    for step in (1, 2, 3):
        Upload(remote.store, of_step(root, step), threading.Event()).run()
    assert [step.is_complete for step in remote.steps()] == [True, True, True]
    hollow(next((tmp_path / "store" / "global_steps_3" / ROLE).iterdir()))
    *_, second, third = remote.steps()
    assert (second.worth, third.worth, third.is_claimed) == (Worth.WHOLE, Worth.CLAIMED, True)
    assert "missing or cut" in third.reason
    assert [step.step for step in too_old(remote.steps(), PreservationPolicy(1))] == [1]
    assert [step.step for step in choose(remote.steps(), (ROLE,)).steps] == [2, 1]
    # What the store has lost is sent again, and the step counts once more.
    uploads = UploadQueue(remote, root, ROLE, PreservationPolicy(1))
    assert uploads.committed(3).wait(60)
    assert uploads.wait(60)
    assert [(step.step, step.worth) for step in remote.steps()] == [(3, Worth.WHOLE)]
    assert remote.read_tracker() == 3


def test_nothing_is_sent_of_a_step_that_lacks_files(root: Path, tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}/store")
    cut(of_step(root, 2))
    for step in (2, 3):
        with pytest.raises(CheckpointCorruptError, match="missing or cut"):
            Upload(store, of_step(root, step), threading.Event()).run()
    assert store.names("") == []


def test_an_old_checkpoint_stays_if_the_one_in_its_place_has_lost_files(root: Path) -> None:
    """It was moved aside by a save that died after its commit."""
    aside = file_names.replaced_dir(of_step(root, 3), "a" * 32)
    make(of_step(root, 2), 2)
    shutil.copytree(of_step(root, 2), aside)
    leftovers.remove_leftovers(root, ROLE, alone=True)
    assert leftovers.find_leftovers(root) == []
    assert aside.exists()
    make(of_step(root, 3), 3)
    leftovers.remove_leftovers(root, ROLE, alone=True)
    assert not aside.exists()
