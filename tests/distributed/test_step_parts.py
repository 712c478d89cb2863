"""Parts of a step that a trainer attaches: bytes, files and folders that are committed and loaded with the weights."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

from mcore_ckpt import FastTier, HandOver, SavedPart
from mcore_ckpt.checkpoint.file_names import parse_part, part_dir
from mcore_ckpt.checkpoint.manifest import encode_manifest
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CommitError,
    InvalidArgumentError,
)
from mcore_ckpt.tools.convert.reshard.reshard import reshard
from mcore_ckpt.tools.convert.reshard.target import WantedLayout
from mcore_ckpt.tools.examine.select import select
from tests.distributed.agreement import everywhere
from tests.distributed.checkpointing import assert_loads, manager_of
from tests.distributed.layouts import LAYOUTS
from tests.distributed.snapshot import assert_same, snapshot
from tests.distributed.training import build, parallel, train

LAYOUT = LAYOUTS["dp2-bf16"]


class Buffer:
    """What a trainer has beside its model: prompts in flight, which change with each step."""

    def __init__(self) -> None:
        self.prompts = [f"prompt {number} of rank {dist.get_rank()}" for number in range(3)]

    def dump(self, folder: Path) -> None:
        (folder / "nested").mkdir()
        (folder / "nested" / "prompts.json").write_text(json.dumps(self.prompts))
        (folder / "count").write_text(str(len(self.prompts)))

    def restore(self, saved: SavedPart) -> None:
        folder = saved.folder()
        self.prompts = json.loads((folder / "nested" / "prompts.json").read_text())
        assert (folder / "count").read_text() == str(len(self.prompts))


@pytest.mark.world(2)
@pytest.mark.parametrize("async_save", [False, True])
def test_parts_come_back_with_the_weights_of_their_step(async_save: bool, shared_path: Path) -> None:
    root, loaded = shared_path / "steps", dict[str, Any]()
    with parallel(LAYOUT):
        training = build(LAYOUT, seed=1)
        manager = manager_of(training, root, async_save=async_save, parts=("buffer", "text"))
        buffer, rank = Buffer(), dist.get_rank()
        manager.attach("buffer", save=buffer.dump, load=buffer.restore)
        if rank == 0:
            manager.attach("text", save=lambda folder: lambda: b"of rank 0", load=lambda part: _note(loaded, part))
        train(training, 0, 1)
        buffer.prompts.append("new")
        first, prompts = snapshot(training), list(buffer.prompts)
        manager.save(1).wait()
        train(training, 1, 2)
        buffer.prompts.append("newer")
        manager.save(2).wait()
        dist.barrier()
        assert_loads(manager, training, first, step=1)
        with everywhere():
            assert buffer.prompts == prompts
            assert loaded == ({"text": (b"of rank 0", 1, (0,))} if rank == 0 else {})
        manager.close()


def _note(loaded: dict[str, Any], part: SavedPart) -> None:
    loaded[part.name] = (part.read(), part.step, part.ranks)


@pytest.mark.world(2)
def test_files_and_folders_are_copied_or_taken(shared_path: Path) -> None:
    rank = dist.get_rank()
    mine = shared_path / f"of-{rank}"
    (mine / "kept" / "empty").mkdir(parents=True)
    (mine / "given").mkdir()
    (mine / "kept" / "a.bin").write_bytes(b"a" * 5000)
    (mine / "given" / "b.bin").write_bytes(b"b" * 5000)
    (mine / "c.bin").write_bytes(b"c")
    with parallel(LAYOUT):
        training = build(LAYOUT, seed=1)
        manager = manager_of(training, shared_path / "steps")
        manager.attach("kept", save=mine / "kept", load=lambda part: None)
        manager.attach("given", save=HandOver(mine / "given"))
        manager.attach("file", save=lambda folder: HandOver(mine / "c.bin"))
        manager.save(1).wait()
        manager.detach("given")
        manager.detach("file")
        dist.barrier()
        parts = shared_path / "steps" / "global_steps_1" / "actor" / "parts"
        with everywhere():
            assert (mine / "kept" / "a.bin").exists()
            assert not (mine / "given").exists()
            assert not (mine / "c.bin").exists()
            assert (parts / "kept" / f"rank_{rank:05d}" / "a.bin").read_bytes() == b"a" * 5000
            assert (parts / "kept" / f"rank_{rank:05d}" / "empty").is_dir()
            assert (parts / "given" / f"rank_{rank:05d}" / "b.bin").read_bytes() == b"b" * 5000
            assert (parts / "file" / f"rank_{rank:05d}" / "c.bin").read_bytes() == b"c"
        manager.load()
        manager.close()


def _fail(folder: Path) -> None:
    if dist.get_rank() == 1:
        raise ValueError("the buffer is closed")


def _later(folder: Path) -> Callable[[], None]:
    return lambda: _fail(folder)


@pytest.mark.world(2)
@pytest.mark.parametrize("async_save", [False, True])
def test_a_part_that_fails_on_one_rank_fails_the_step_everywhere(async_save: bool, shared_path: Path) -> None:
    root, given = shared_path / "steps", shared_path / f"given-{dist.get_rank()}"
    given.mkdir()
    (given / "rows").write_bytes(b"rows")
    with parallel(LAYOUT):
        training = build(LAYOUT, seed=1)
        manager = manager_of(training, root, async_save=async_save)
        manager.attach("given", save=HandOver(given))
        for save in (_fail, _later):
            manager.attach("buffer", save=save)
            with everywhere(), pytest.raises(CommitError, match=r"part 'buffer' .* ValueError: the buffer is closed"):
                manager.save(1).wait()
            with everywhere():
                assert (given / "rows").read_bytes() == b"rows"
                assert not list(root.glob("*/actor/manifest.json"))
            manager.detach("buffer")
        train(training, 0, 1)
        wanted = snapshot(training)
        manager.save(1).wait()
        manager.detach("given")
        assert_loads(manager, training, wanted)
        manager.close()


@pytest.mark.world(2)
def test_what_is_missing_is_named_before_anything_changes(shared_path: Path) -> None:
    with parallel(LAYOUT):
        training = build(LAYOUT, seed=1)
        manager = manager_of(training, shared_path, parts=("buffer",))
        with everywhere(), pytest.raises(CommitError, match="no rank has saved part 'buffer', which"):
            manager.save(1).wait()
        manager.attach("buffer", save=b"1")
        manager.save(1).wait()
        manager.close()
        other = manager_of(training, shared_path)
        other.attach("rollouts", load=lambda part: None)
        wanted = snapshot(training)
        train(training, 0, 1)
        changed = snapshot(training)
        with everywhere(), pytest.raises(CheckpointMismatchError, match="has no part 'rollouts', but it has 'buffer'"):
            other.load()
        found = snapshot(training)
        with everywhere():
            assert_same(found, changed)
        other.detach("rollouts")
        other.attach("rollouts", load=lambda part: None, optional=True)
        assert_loads(other, training, wanted)
        other.close()


@pytest.mark.world(2)
def test_a_damaged_part_sends_all_ranks_to_the_older_step(shared_path: Path) -> None:
    with parallel(LAYOUT):
        training = build(LAYOUT, seed=1)
        manager = manager_of(training, shared_path)
        seen: list[tuple[int, bytes]] = []
        state = {"rows": b"old"}
        manager.attach("rows", save=lambda _: state["rows"], load=lambda part: seen.append((part.step, part.read())))
        wanted = snapshot(training)
        manager.save(1).wait()
        train(training, 0, 1)
        state["rows"] = b"new"
        manager.save(2).wait()
        dist.barrier()
        if dist.get_rank() == 0:
            (shared_path / "global_steps_2/actor/parts/rows/rank_00001/data").write_bytes(b"nxw")
        dist.barrier()
        assert_loads(manager, training, wanted)
        with everywhere():
            assert seen == [(1, b"old")]
        with everywhere(), pytest.raises(CheckpointCorruptError, match=r"parts/rows/rank_00001/data: has a wrong CRC"):
            manager.load(step=2)
        manager.close()


@pytest.mark.world(2)
@pytest.mark.parametrize("place", ["root", "store"])
def test_a_part_that_one_rank_loads_is_checked_before_anything_changes(place: str, shared_path: Path) -> None:
    """Rank 0 alone loads a part that both ranks have saved. There is no older step to take."""
    root = shared_path / "root"
    with parallel(LAYOUT):
        training = build(LAYOUT, seed=1)
        manager = manager_of(training, root, remote=f"file://{shared_path}/store" if place == "store" else None)
        read: list[bytes] = []
        load = None if dist.get_rank() else lambda part: read.extend(map(part.read, part.ranks))
        manager.attach("rows", save=b"of rank %d" % dist.get_rank(), load=load)
        manager.save(1).wait()
        manager.wait()
        train(training, 0, 1)
        wanted = snapshot(training)
        dist.barrier()
        if dist.get_rank() == 0:
            if place == "store":
                shutil.rmtree(root / "global_steps_1")
            _write(shared_path / place, b"of rank x")
        dist.barrier()
        problem = r"parts/rows/rank_00001/data: .*Nothing has been changed"
        with everywhere(), pytest.raises(CheckpointCorruptError, match=problem):
            manager.load()
        found = snapshot(training)
        with everywhere():
            assert_same(found, wanted)
            assert read == []
        dist.barrier()
        if dist.get_rank() == 0:
            _write(shared_path / place, b"of rank 1")
        dist.barrier()
        manager.load()
        with everywhere():
            assert read == ([] if dist.get_rank() else [b"of rank 0", b"of rank 1"])
        manager.close()


def _write(root: Path, data: bytes) -> None:
    (file,) = root.glob("**/parts/rows/rank_00001/data")
    file.write_bytes(data)


@pytest.mark.world(2)
def test_other_numbers_of_ranks_get_the_parts_of_all(shared_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Saved by two ranks, resharded to one, and loaded by two."""
    first, other = shared_path / "first", shared_path / "other"
    with parallel(LAYOUT):
        training = build(LAYOUT, seed=1)
        manager = manager_of(training, first)
        manager.attach("prompts", save=b"of rank %d" % dist.get_rank())
        manager.save(1).wait()
        manager.close()
        dist.barrier()
        if dist.get_rank() == 0:
            reshard(select(first), other, WantedLayout(dp=1))
        dist.barrier()
        manager = manager_of(training, other)
        found: list[Any] = []
        manager.attach("prompts", load=lambda part: found.append((part.world_size, [part.read(n) for n in part.ranks])))
        manager.load()
        with everywhere():
            assert found == [(2, [b"of rank 0", b"of rank 1"])]
            assert "prompts" not in caplog.text
        manager.close()


@pytest.mark.world(2)
def test_ranks_that_are_more_or_fewer_must_say_whose_part_they_want(
    shared_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Saved by four ranks, of which two are simulated, and by one rank alone; loaded by two."""
    root, rank = shared_path / "steps", dist.get_rank()
    with parallel(LAYOUT):
        training = build(LAYOUT, seed=1)
        manager = manager_of(training, root)
        manager.attach("prompts", save=b"of rank %d" % rank)
        if rank == 1:
            manager.attach("alone", save=b"of one rank")
        manager.save(1).wait()
        manager.detach("prompts")
        dist.barrier()
        if rank == 0:
            _pretend_more_ranks_have_saved(root / "global_steps_1" / "actor")
        dist.barrier()
        manager.close()
        manager = manager_of(training, root)
        alone: list[bytes] = []
        manager.attach("alone", load=lambda part: alone.append(part.read()))
        manager.attach("prompts", load=SavedPart.read)
        refusal = "was saved by 4 ranks, and 2 ranks load it.*have saved something: 0 to 3. Pass one of them"
        with everywhere(), pytest.raises(CheckpointError, match=refusal):
            manager.load()
        manager.detach("prompts")
        manager.attach("prompts", load=lambda part: part.read(part.rank))
        manager.load()
        told = "part 'prompts': no load function has asked for what these ranks have saved: 2 to 3."
        with everywhere():
            assert alone[-1] == b"of one rank"
            assert (told in caplog.text) == (rank == 0)
        manager.close()


def _pretend_more_ranks_have_saved(role_dir: Path) -> None:
    """Gives ranks 2 and 3 the files of ranks 0 and 1, as in a step of four ranks that was resharded."""
    manifest = read_manifest(role_dir)
    files = list(manifest.files)
    for record in manifest.files_of("part"):
        if (place := parse_part(record.path)) is not None and place[0] == "prompts":
            path = f"{part_dir('prompts', place[1] + 2)}/{place[2]}"
            (role_dir / path).parent.mkdir()
            (role_dir / path).write_bytes((role_dir / record.path).read_bytes())
            files.append(msgspec.structs.replace(record, path=path))
    parts = {**manifest.parts, "prompts": [(0, 3)]}
    (role_dir / "manifest.json").write_bytes(encode_manifest(replace(manifest, files=tuple(files), parts=parts)))


@pytest.mark.world(2)
@pytest.mark.parametrize("fast", [False, True])
def test_names_that_differ_only_in_case_between_ranks_are_refused(fast: bool, shared_path: Path) -> None:
    """On a file system that ignores case, both ranks would write into one folder."""
    root, calls = shared_path / "steps", list[Path]()
    tier = FastTier(shared_path / "node", replicas=0, durable_every=None) if fast else None
    with parallel(LAYOUT):
        training = build(LAYOUT, seed=1)
        manager = manager_of(training, root, fast=tier)
        name = "Buffer" if dist.get_rank() == 0 else "buffer"
        manager.attach(name, save=calls.append)
        refusal = "part 'buffer' of rank 1 differs from part 'Buffer' of rank 0 only in upper and lower case"
        with everywhere(), pytest.raises(InvalidArgumentError, match=refusal):
            manager.save(1).wait()
        with everywhere():
            assert not calls
            assert not list(shared_path.glob("**/*actor*staging*"))
            assert not list(shared_path.glob("**/parts"))
        manager.detach(name)
        manager.attach("buffer", save=b"1")
        manager.save(1).wait()
        manager.close()
