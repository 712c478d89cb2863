"""The files of a step's parts, in one process: what is taken, what is refused, and what stays where it was."""

import logging
import os
import random
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt import CheckpointConfig, CheckpointManager, FastTier, HandOver, SavedPart
from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CommitError,
    HungDiskError,
    InvalidArgumentError,
    InvalidStateError,
    InvalidTypeError,
)
from mcore_ckpt.io import file_copies, limits
from mcore_ckpt.save import part_files
from mcore_ckpt.steps import commit
from mcore_ckpt.steps.handed_over import LinkedFile, write_note
from mcore_ckpt.tools.examine.verify import verify
from tests.support.small_disks import ext4, frozen
from tests.support.unsharded_model import Model
from tests.support.waiting import LONG_S, wait_for, wait_for_hung_calls

WORDS = ("model", "extra")


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    with closing(manager_of(tmp_path / "root")) as manager:
        yield manager


def manager_of(root: Path, **config: Any) -> CheckpointManager:
    config = {"save_contents": WORDS, "load_contents": WORDS, "timeout_s": 20.0, **config}
    return CheckpointManager(root, Model(), config=CheckpointConfig(**config))


def part_of(root: Path, step: int = 1, part: str = "part") -> Path:
    return root / f"global_steps_{step}" / "actor" / "parts" / part / "rank_00000"


def refused(manager: CheckpointManager, save: Any, words: str, error: type[Exception] = CommitError) -> None:
    manager.attach("part", save=save)
    with pytest.raises(error, match=words):
        manager.save(1).wait(LONG_S)
    manager.detach("part")
    assert not list(manager.root.glob("*/actor"))


def linked(folder: Path) -> Path:
    (folder / "target").write_bytes(b"x")
    (folder / "link").symlink_to("target")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "mine"
    made.mkdir()
    return made


def test_what_cannot_be_in_a_checkpoint_is_refused_by_name(
    manager: CheckpointManager, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(manager, linked(folder), "'part': .*/link is a link")
    (folder / "link").unlink()
    os.mkfifo(folder / "pipe")
    refused(manager, HandOver(folder), "/pipe is a link, pipe")
    (folder / "pipe").unlink()
    (folder / "TARGET").write_bytes(b"y")
    refused(manager, folder, "name differs only in upper and lower case")
    (folder / "TARGET").unlink()
    for name in (b"\xff", b"a\nb", b"a\\b"):
        bad = os.path.join(os.fsencode(folder), name)
        os.close(os.open(bad, os.O_CREAT))
        refused(manager, folder, "cannot be the name of a file")
        os.unlink(bad)
    monkeypatch.setattr(limits, "PART_FILES", 3)
    for number in range(3):
        (folder / str(number)).write_bytes(b"")
    refused(manager, folder, "has more than 3 files and folders: put them in archives")
    refused(manager, folder / "absent", "/absent does not exist")
    assert (folder / "target").read_bytes() == b"x"


@pytest.mark.parametrize("take", [Path, HandOver])
def test_names_of_folders_are_checked_as_those_of_files(
    manager: CheckpointManager, folder: Path, take: Callable[[Path], Any]
) -> None:
    (folder / "a\nb").mkdir()
    refused(manager, take(folder), r"'a\\nb' cannot be the name of a file")
    (folder / "a\nb").rmdir()
    (folder / "Rows").mkdir()
    (folder / "Rows" / "1").write_bytes(b"x")
    (folder / "rows").write_bytes(b"y")
    refused(manager, take(folder), "name differs only in upper and lower case")
    assert (folder / "Rows" / "1").exists()


@pytest.mark.parametrize("take", [Path, HandOver])
def test_links_that_lead_to_each_other(manager: CheckpointManager, folder: Path, take: Callable[[Path], Any]) -> None:
    (folder / "a").symlink_to("b")
    (folder / "b").symlink_to("a")
    refused(manager, take(folder / "a"), r"part 'part': .*/a is a link")


@pytest.mark.parametrize("take", [Path, HandOver])
def test_a_folder_with_the_checkpoints_in_it_is_refused(
    manager: CheckpointManager, folder: Path, take: Callable[[Path], Any]
) -> None:
    (folder / "file").write_bytes(b"x")
    for place in (manager.root, manager.root.parent, Path("/")):
        refused(manager, take(place), "contains the checkpoints")
    refused(
        manager,
        lambda folder: take(folder),
        "is in the folder of the step that is being saved|contains the checkpoints",
    )
    assert (folder / "file").exists()


def test_a_link_is_not_followed_out_of_the_step(manager: CheckpointManager, folder: Path) -> None:
    def replace(staging: Path) -> None:
        staging.rmdir()
        staging.symlink_to(folder)

    (folder / "secret").write_bytes(b"x")
    refused(manager, replace, "is a link")
    (folder.parent / "link").symlink_to(folder)
    refused(manager, HandOver(folder.parent / "link"), "is a link")
    assert (folder / "secret").exists()
    manager.attach("part", save=folder.parent / "link")
    manager.save(1).wait(LONG_S)
    assert (part_of(manager.root) / "secret").read_bytes() == b"x"


def test_a_committed_step_cannot_be_handed_over(manager: CheckpointManager) -> None:
    manager.attach("part", save=b"first")
    manager.save(1).wait(LONG_S)
    manager.detach("part")
    for place in (part_of(manager.root), manager.root / "global_steps_1", part_of(manager.root) / "data"):
        manager.attach("part", save=HandOver(place))
        with pytest.raises(CommitError, match="belongs to a saved step"):
            manager.save(2).wait(LONG_S)
        manager.detach("part")
    manager.attach("part", save=part_of(manager.root))
    manager.save(2).wait(LONG_S)
    assert verify(manager.root).is_sound
    assert (part_of(manager.root, 2) / "data").read_bytes() == b"first"


def test_steps_of_other_roots_and_stores_cannot_be_handed_over(manager: CheckpointManager, tmp_path: Path) -> None:
    """Such as the folder that `load` has got of a step of another run."""
    other, store = tmp_path / "other", tmp_path / "store"
    with closing(manager_of(other, remote=store.as_uri())) as saving:
        saving.attach("part", save=b"precious")
        saving.save(1).wait(LONG_S)
        saving.wait()
    (uploaded,) = store.glob("**/parts/part/rank_00000")
    for place in (part_of(other), part_of(other) / "data", other / "global_steps_1", other, uploaded, store):
        refused(manager, HandOver(place), f"'part': {place}.* belongs to a saved step")
    refused(manager, HandOver(other / ".run.json"), ".run.json is a file that mcore_ckpt keeps in a folder of steps")
    assert verify(other).is_sound
    (other / "global_steps_1" / "actor" / "manifest.json").write_bytes(b"{")
    refused(manager, HandOver(part_of(other)), "belongs to a saved step")
    foreign = tmp_path / "data"
    (foreign / "rows").mkdir(parents=True)
    (foreign / "model").mkdir()
    (foreign / "manifest.json").write_text("{}")  # of a data set
    manager.attach("part", save=HandOver(foreign))
    manager.save(1).wait(LONG_S)
    assert not foreign.exists()


def test_only_what_is_in_the_step_is_removed(
    manager: CheckpointManager, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "below").mkdir()
    (folder / "below" / "a").write_bytes(b"a")
    (folder / "b").write_bytes(b"b")
    removing = part_files.PartFiles._remove

    def late(files: part_files.PartFiles) -> None:
        (folder / "b").unlink()
        (folder / "b").write_bytes(b"the next one")
        (folder / "c").write_bytes(b"c")
        removing(files)

    monkeypatch.setattr(part_files.PartFiles, "_remove", late)
    manager.attach("part", save=HandOver(folder))
    with caplog.at_level(logging.WARNING):
        manager.save(1).wait(LONG_S)
    assert sorted(path.name for path in folder.iterdir()) == ["b", "c"]
    assert (part_of(manager.root) / "below" / "a").read_bytes() == b"a"
    assert "was handed over to a checkpoint, but is still there: " in caplog.text


def test_two_parts_may_hand_over_the_same_folder(manager: CheckpointManager, folder: Path) -> None:
    (folder / "a").write_bytes(b"a")
    manager.attach("one", save=HandOver(folder))
    manager.attach("two", save=lambda _: HandOver(folder))
    manager.save(1).wait(LONG_S)
    assert not folder.exists()
    assert {(part_of(manager.root, 1, part) / "a").read_bytes() for part in ("one", "two")} == {b"a"}
    with pytest.raises(CommitError, match=r"part 'one': .* does not exist: make it before the save"):
        manager.save(2).wait(LONG_S)


@pytest.mark.parametrize("is_made", [False, True], ids=["handed over", "made by the function"])
def test_a_file_with_a_second_name_keeps_its_mode_there(
    manager: CheckpointManager, folder: Path, is_made: bool
) -> None:
    """The name elsewhere may be in a private folder of the trainer, and the mode belongs to both names."""
    kept, closed, opened = folder.parent / "kept", folder / "closed", folder / "open"
    kept.mkdir()
    for file, mode in ((closed, 0o600), (opened, 0o666)):
        file.write_bytes(b"x" * 5000)
        file.chmod(mode)
        os.link(file, kept / file.name)

    def links(made: Path) -> None:
        for file in (closed, opened):
            os.link(file, made / file.name)

    manager.root.mkdir()
    manager.root.chmod(0o755)
    manager.attach("part", save=links if is_made else HandOver(folder))
    manager.save(1).wait(LONG_S)
    assert folder.exists() == is_made
    assert (kept / "closed").stat().st_mode & 0o777 == 0o600
    part = part_of(manager.root)
    assert (part / "closed").stat().st_mode & 0o777 == 0o644
    assert {(part / name).read_bytes() for name in ("closed", "open")} == {b"x" * 5000}
    assert (part / "open").samefile(kept / "open")
    assert verify(manager.root).is_sound
    assert sorted(path.name for path in part.parent.iterdir()) == ["rank_00000"]


def test_a_handed_over_folder_of_another_file_system_is_copied(manager: CheckpointManager) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        given = Path(memory, "given")
        given.mkdir()
        if given.stat().st_dev == manager.root.parent.stat().st_dev:
            pytest.skip("the root is in memory, too")
        (given / "a").write_bytes(b"a" * 70000)
        manager.attach("part", save=HandOver(given))
        manager.save(1).wait(LONG_S)
        assert not given.exists()
    assert (part_of(manager.root) / "a").read_bytes() == b"a" * 70000
    assert verify(manager.root).is_sound


@pytest.mark.parametrize("take", [Path, HandOver])
def test_a_file_that_changes_while_it_is_saved_fails_the_save(
    manager: CheckpointManager, folder: Path, take: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "log").write_bytes(b"a" * 70000)
    read = file_copies._read

    def grows(descriptor: int, memory: bytearray, path: Path) -> int:
        count = read(descriptor, memory, path)
        with (folder / "log").open("ab") as file:
            file.write(b"b")
        return count

    monkeypatch.setattr(file_copies, "_read", grows)
    refused(manager, take(folder), "has changed while it was saved")
    monkeypatch.setattr(file_copies, "_read", read)

    put = part_files._each

    def comes(*args: Any) -> None:
        put(*args)
        (folder / "new").write_bytes(b"")

    monkeypatch.setattr(part_files, "_each", comes)
    refused(manager, take(folder), "has changed while it was saved: leave it as it is")


@pytest.mark.parametrize("returned", [7, lambda: 7], ids=["at once", "later"])
def test_what_a_part_cannot_consist_of(manager: CheckpointManager, returned: Any) -> None:
    refused(manager, lambda _: returned, "part 'part' is a int: use bytes", InvalidTypeError)


def test_every_kind_of_bytes_and_a_part_without_files(manager: CheckpointManager) -> None:
    wide = memoryview(bytes(range(100)))
    found: dict[str, Any] = {}
    contents = {"wide": wide.cast("H"), "strided": wide[::2], "array": bytearray(b"array"), "empty": b"", "none": None}
    for name, content in contents.items():
        manager.attach(name, save=lambda _, content=content: content, load=_keep(found))
    manager.save(1).wait(LONG_S)
    (part_of(manager.root, 1, "none")).rmdir()  # as a copy of the step would lack it
    manager.load()
    assert found == {"wide": bytes(wide), "strided": bytes(wide[::2]), "array": b"array", "empty": b"", "none": []}


def _keep(found: dict[str, Any]) -> Callable[[SavedPart], None]:
    def keep(part: SavedPart) -> None:
        files = list(part.folder().iterdir())
        found[part.name] = part.read() if files else files
        if not files:
            with pytest.raises(CheckpointMismatchError, match="does not have exactly one file"):
                part.read()

    return keep


def test_thousands_of_files(manager: CheckpointManager, folder: Path) -> None:
    for number in range(2000):
        (folder / f"{number:05d}").write_bytes(b"%d" % number)
    manager.attach("part", save=HandOver(folder), load=lambda part: seen.append(len(list(part.folder().iterdir()))))
    seen: list[int] = []
    manager.save(1).wait(LONG_S)
    manager.load()
    assert seen == [2000]
    assert len(read_manifest(manager.root / "global_steps_1" / "actor").files_of("part")) == 2000


@pytest.mark.parametrize("is_async", [False, True])
def test_a_function_that_hangs_fails_the_save_by_the_deadline(
    tmp_path: Path, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    def hangs(folder: Path) -> Callable[[], None]:
        def polls() -> None:
            while not released.wait(0.01):
                pass

        return polls

    monkeypatch.setattr(part_files.deadlines, "EXTRA_WAIT_S", 0.1)
    with closing(manager_of(tmp_path / "root", timeout_s=1.0, async_save=is_async)) as manager:
        try:
            began = time.monotonic()
            refused(manager, hangs, "part 'part': its function has not returned for 1 s")
            assert time.monotonic() - began < LONG_S / 2
        finally:
            released.set()
        manager.save(1).wait(LONG_S)


def test_a_disk_that_hangs_under_a_function_is_found(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    with (
        ext4(place, mebibytes=24),
        (place / "file").open("wb", buffering=0) as file,
        closing(manager_of(tmp_path / "root", timeout_s=2.0)) as manager,
    ):
        # The call is one of the function itself, and not one of a module that is known to call file systems.
        manager.attach("part", save=lambda _: lambda: file.write(b"x" * 100_000) and None)
        with frozen(place), pytest.raises(HungDiskError, match=r"has not returned for .* s: the disk"):
            manager.save(1).wait(LONG_S)
        wait_for_hung_calls(manager)
        manager.save(1).wait(LONG_S)


def test_the_need_of_a_save_counts_what_parts_took_in_the_last_one(
    manager: CheckpointManager, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").write_bytes(b"x" * 5000)
    needs: list[list[int]] = []
    prepare = type(manager._destination).prepare

    def noting(root: Any, saving: Any, need: Any) -> None:
        needs.append(sorted(size for size in need.sizes if size in (5000, 700, 300)))
        prepare(root, saving, need)

    monkeypatch.setattr(type(manager._destination), "prepare", noting)
    given = folder.parent / "given"
    given.write_bytes(b"y" * 300)
    manager.attach("bytes", save=b"z" * 700)
    manager.attach("copied", save=lambda _: folder)
    manager.attach("given", save=lambda _: HandOver(given) if given.exists() else None)
    manager.save(1).wait(LONG_S)
    manager.save(2).wait(LONG_S)
    assert needs == [[700], [700, 5000]]


def test_parts_without_their_words_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="parts names 'a', but save_contents has no 'extra'"):
        CheckpointConfig(parts=("a",), save_contents=("model",))
    with closing(manager_of(tmp_path, save_contents=("model",), load_contents=("model",))) as manager:
        manager.attach("part", save=b"1")
        with pytest.raises(InvalidArgumentError, match="part 'part' is attached, but it would not be saved"):
            manager.save(1)
    with closing(manager_of(tmp_path, parts=("a", "b"))) as manager:
        with pytest.raises(InvalidArgumentError, match=r"'c' is not in CheckpointConfig.parts, which has 'a', 'b'"):
            manager.attach("c", save=b"1")
        for name in ("..", "a/b", "", "x" * 129, "\udcff"):
            with pytest.raises(InvalidArgumentError, match="is not a folder name"):
                manager.attach(name, save=b"1")


def test_a_load_that_would_leave_out_a_part_is_refused(tmp_path: Path) -> None:
    root, loaded = tmp_path / "root", list[SavedPart]()
    with closing(manager_of(root)) as manager:
        manager.attach("part", save=b"1")
        manager.save(1).wait(LONG_S)
    with closing(manager_of(root, load_contents=("model",))) as manager:
        manager.attach("part", load=loaded.append)
        refusal = "part 'part' is attached, but it would not be loaded, because load_contents has no 'extra'"
        with pytest.raises(InvalidArgumentError, match=refusal):
            manager.load()
        manager.detach("part")
        manager.attach("part", load=loaded.append, optional=True)
        assert manager.load().step == 1
        assert not loaded


def test_functions_of_parts_may_draw_random_numbers(manager: CheckpointManager) -> None:
    """The run that loads goes on with the numbers of the run that saved and went on."""

    def draw(_: object) -> bytes:
        return b"%d %d" % (random.getrandbits(8), torch.randint(256, ()).item())

    random.seed(1)
    torch.manual_seed(1)
    manager.attach("part", save=draw, load=lambda part: [draw(part), draw(part)])
    manager.save(1).wait(LONG_S)
    wanted = draw(None)
    manager.load()
    assert draw(None) == wanted


def test_an_interrupt_in_a_function_is_raised_as_it_is(manager: CheckpointManager) -> None:
    def stops(folder: Path) -> None:
        raise KeyboardInterrupt

    manager.attach("part", save=stops)
    with pytest.raises(KeyboardInterrupt):
        manager.save(1)
    manager.detach("part")
    manager.save(2).wait(LONG_S)


def _remove(folder: Path) -> None:
    (folder / "buffer").write_bytes(b"x")
    shutil.rmtree(folder)


def _remove_later(folder: Path) -> Callable[[], None]:
    return lambda: _remove(folder)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_an_exit_in_a_second_function_fails_the_save_by_name(
    tmp_path: Path, is_async: bool, error: BaseException
) -> None:
    """It runs on a thread of the save, which no signal interrupts, and whose exit would not end the process."""

    def exits() -> None:
        raise error

    with closing(manager_of(tmp_path / "root", async_save=is_async)) as manager:
        refused(manager, lambda _: exits, f"part 'part' could not be saved: {type(error).__name__}: ")
        manager.save(2).wait(LONG_S)


def test_what_the_process_needs_cannot_be_handed_over(
    manager: CheckpointManager, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "below").mkdir()
    monkeypatch.chdir(folder / "below")
    for place in (Path("."), folder):
        refused(manager, HandOver(place), "is the current folder of this process or contains it")
    manager.save(1).wait(LONG_S)
    (manager.root / ".critic.retention.json").write_text("{}")
    for name in (".actor.trainer.json", ".critic.retention.json", ".run.json", "latest_checkpointed_iteration.txt"):
        manager.attach("part", save=HandOver(manager.root / name))
        with pytest.raises(CommitError, match=f"{name} is a file that mcore_ckpt keeps in a folder of steps"):
            manager.save(2).wait(LONG_S)
        manager.detach("part")
        assert (manager.root / name).exists()
    manager.attach("part", save=Path("."))
    manager.save(2).wait(LONG_S)
    assert folder.exists()
    manager.detach("part")
    shutil.rmtree(folder)  # what is gone is in no part
    place = manager.root.parent / "handed over"
    place.write_bytes(b"all there is")
    manager.attach("part", save=HandOver(place))
    manager.save(3).wait(LONG_S)
    assert not place.exists()


@pytest.mark.parametrize("remove", [_remove, _remove_later])
def test_a_function_that_removes_its_folder_fails_the_save(
    manager: CheckpointManager, remove: Callable[[Path], Any], folder: Path
) -> None:
    """What it has written would be missing, and nobody would know."""
    refused(manager, remove, "'part': its function has removed or moved the folder")
    (folder / "mine").write_bytes(b"x")

    def return_another(given: Path) -> Path:
        given.rmdir()
        return folder

    manager.attach("part", save=return_another)
    manager.save(1).wait(LONG_S)
    assert (part_of(manager.root) / "mine").read_bytes() == b"x"


@pytest.mark.parametrize("is_later", [False, True])
@pytest.mark.parametrize("call", ["save", "load"])
def test_a_function_may_not_call_its_manager(manager: CheckpointManager, call: str, is_later: bool) -> None:
    """A save would call the function again, without end."""
    calls = {"save": lambda: manager.save(5), "load": manager.load}

    def save(folder: Path) -> object:
        return calls[call] if is_later else calls[call]()

    manager.attach("other", save=b"1")
    manager.save(1).wait(LONG_S)
    manager.attach("part", save=save)
    with pytest.raises(InvalidStateError, match=f"the function of part 'part' calls {call} of its own manager"):
        manager.save(2).wait(LONG_S)
    manager.detach("part")
    manager.detach("other")
    manager.attach("other", load=lambda saved: calls[call]())
    with pytest.raises(InvalidStateError, match=f"the function of part 'other' calls {call}"):
        manager.load()
    manager.detach("other")
    manager.attach("other", save=b"2", load=lambda saved: None)
    manager.save(3).wait(LONG_S)
    assert manager.load().step == 3


def test_a_load_function_that_damages_the_step_is_told(
    manager: CheckpointManager, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Such as one that moves a buffer out of the step."""
    manager.attach("part", save=b"1", load=lambda saved: saved.read())
    manager.attach("sound", save=b"2", load=lambda saved: saved.read())
    manager.save(1).wait(LONG_S)
    manager.load()
    assert not caplog.records
    manager.detach("part")
    manager.attach("part", load=lambda saved: os.rename(saved.folder() / "data", tmp_path / "mine"))
    manager.load()
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(f"{part_of(manager.root) / 'data'}: the load function of part 'part' has changed this file")


def test_what_is_no_path_and_what_is_no_name(manager: CheckpointManager) -> None:
    """An empty path would be the folder that the process runs in, and a HandOver of it would take all of it away."""
    for content in ("", HandOver(""), "a\0b"):
        with pytest.raises(InvalidArgumentError, match="name a file or folder"):
            manager.attach("part", save=content)
        refused(manager, lambda folder, content=content: content, "name a file or folder", InvalidArgumentError)
    with pytest.raises(InvalidTypeError, match="a HandOver of a int"):
        manager.attach("part", save=HandOver(5))  # type: ignore[arg-type]
    manager.attach("part", save=b"1")
    with pytest.raises(InvalidArgumentError, match="only in upper and lower case"):
        manager.attach("Part", save=b"2")


def test_a_load_that_fails_in_a_function_is_one_error(manager: CheckpointManager) -> None:
    def breaks(part: SavedPart) -> None:
        raise ValueError("no room in the buffer")

    manager.attach("part", save=b"1", load=breaks)
    manager.save(1).wait(LONG_S)
    with pytest.raises(CheckpointError, match="part 'part' could not be loaded: ValueError: no room in the buffer"):
        manager.load()


def test_nothing_keeps_what_was_handed_over_alive(manager: CheckpointManager) -> None:
    class Content(bytearray):
        pass

    alive: list[Any] = []

    def save(folder: Path) -> Any:
        content = Content(b"x" * 100)
        alive.append(weakref.ref(content))
        return content

    manager.attach("part", save=save)
    handle = manager.save(1)
    handle.wait(LONG_S)
    manager.wait()
    wait_for(lambda: alive[0]() is None)  # the worker returns from its last call a moment after it has told


def given_by(folder: Path) -> Path:
    given = folder / "buffer"
    given.write_bytes(b"of step 1" * 10)
    return given


def saved_until_the_commit(root: Path, given: Path, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
    """Saves step 1 with a process that is killed before it removes what was handed over."""
    with closing(manager_of(root, **config)) as manager, monkeypatch.context() as killed:
        killed.setattr(part_files.PartFiles, "_remove", lambda files: None)
        killed.setattr(part_files.PartFiles, "_end_links", lambda files: None)
        manager.attach("part", save=HandOver(given))
        manager.save(1).wait(LONG_S)


def test_a_file_whose_removal_a_crash_has_prevented_cannot_change_the_step(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, nested = tmp_path / "root", folder / "given"
    nested.mkdir()
    given = given_by(nested)
    saved_until_the_commit(root, nested, monkeypatch)
    stored = part_of(root) / "buffer"
    if not stored.samefile(given):
        pytest.skip("the file system shares blocks, so there is no link")
    with closing(manager_of(root)):
        assert not nested.exists()
        nested.mkdir()
        given.write_bytes(b"of the restarted run")
        assert verify(root).is_sound
        assert stored.stat().st_nlink == 1
        assert not list(root.glob("**/*handed_over*"))


def test_a_link_of_another_mount_is_replaced_by_a_copy(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that starts sees the file that was handed over under another path."""
    root, given = tmp_path / "root", given_by(folder)
    saved_until_the_commit(root, given, monkeypatch)
    elsewhere = given.rename(folder / "elsewhere")
    with closing(manager_of(root)):
        elsewhere.write_bytes(b"changed")
        assert verify(root).is_sound
        assert (part_of(root) / "buffer").read_bytes() == b"of step 1" * 10
    assert sorted(path.name for path in (root / "global_steps_1").iterdir()) == ["actor"]


def test_a_handed_over_file_that_has_changed_before_the_next_start_is_told(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root, given = tmp_path / "root", given_by(folder)
    saved_until_the_commit(root, given, monkeypatch)
    given.write_bytes(b"changed")
    with closing(manager_of(root)):
        assert given.read_bytes() == b"changed"
    assert f"{given} was handed over to a checkpoint and has been changed since, so " in caplog.text
    caplog.clear()
    with closing(manager_of(root)):
        assert "handed over" not in caplog.text


def test_a_new_file_with_the_name_of_one_handed_over_stays(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, given = tmp_path / "root", given_by(folder)
    saved_until_the_commit(root, given, monkeypatch)
    given.unlink()
    given.write_bytes(b"new")
    with closing(manager_of(root)):
        assert given.read_bytes() == b"new"
    assert verify(root).is_sound


def test_a_save_that_is_committed_though_it_has_failed_takes_what_was_handed_over(
    manager: CheckpointManager, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, publish = given_by(folder), commit.publish

    def hangs(*args: Any) -> None:
        publish(*args)
        raise HungDiskError("the disk hangs after the rename")

    monkeypatch.setattr(commit, "publish", hangs)
    manager.attach("part", save=HandOver(given))
    with pytest.raises(HungDiskError):
        manager.save(1).wait(LONG_S)
    assert not given.exists()
    assert (part_of(manager.root) / "buffer").stat().st_nlink == 1
    assert not list(manager.root.glob("**/*handed_over*"))


def test_a_failed_save_leaves_no_note(
    manager: CheckpointManager, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, noted = given_by(folder), list[Path]()

    def fails(staging: Path, *args: Any) -> None:
        noted.extend(staging.parent.glob(".actor.handed_over-*"))
        raise OSError("no rename")

    monkeypatch.setattr(commit, "publish", fails)
    refused(manager, HandOver(given), "no rename")
    assert given.exists()
    assert noted
    assert not list(manager.root.glob("global_steps_1"))


def test_a_note_of_a_save_that_was_killed_before_its_commit_is_removed(tmp_path: Path, folder: Path) -> None:
    root, given = tmp_path / "root", given_by(folder)
    role_dir = root / "global_steps_1" / "actor"
    staging = file_names.staging_dir(role_dir, "0" * 32)
    staging.mkdir(parents=True)
    os.link(given, staging / "buffer")
    write_note(staging, 0, [LinkedFile.of(given, staging, staging / "buffer")], [])
    with closing(manager_of(root)) as manager:
        manager.save(2).wait(LONG_S)
        assert given.exists()
        assert not list(root.glob("**/*handed_over*"))


def test_a_step_that_is_the_folder_of_its_role(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its notes are in the root."""
    root, given = tmp_path / "root", given_by(folder)
    with closing(manager_of(root)) as manager, monkeypatch.context() as killed:
        killed.setattr(part_files.PartFiles, "_remove", lambda files: None)
        killed.setattr(part_files.PartFiles, "_end_links", lambda files: None)
        manager.attach("part", save=HandOver(given))
        manager.save(1, path=root / "global_step_1").wait(LONG_S)
    with closing(manager_of(root)):
        assert not given.exists()
        assert not list(root.glob("**/*handed_over*"))


def test_a_crash_after_a_commit_on_the_nodes(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, node = given_by(folder), tmp_path / "node"
    tier = FastTier(node, replicas=0, durable_every=None)
    saved_until_the_commit(tmp_path / "root", given, monkeypatch, fast=tier)
    (stored,) = node.glob("**/parts/part/rank_00000/buffer")
    assert stored.samefile(given)
    with closing(manager_of(tmp_path / "root", fast=tier)):
        assert not given.exists()
        assert stored.read_bytes() == b"of step 1" * 10
        assert not list(node.glob("**/*handed_over*"))


def test_where_blocks_can_be_shared_there_is_no_link(
    manager: CheckpointManager, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disks of the tests cannot share blocks, so this copies them."""

    def copies(writing: int, reading: int) -> bool:
        return bool(os.write(writing, os.pread(reading, 1 << 20, 0)))

    monkeypatch.setattr(file_copies, "_shares_blocks", copies)
    linked: list[Path] = []
    monkeypatch.setattr(part_files, "link_file", lambda source, target: linked.append(source))
    given = given_by(folder)
    manager.attach("part", save=HandOver(given))
    manager.save(1).wait(LONG_S)
    assert not linked
    assert not given.exists()
    assert verify(manager.root).is_sound
