"""Whatever changes in a committed checkpoint is found, and named by file, rank, tensor and bytes."""

import contextlib
import errno
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from mcore_ckpt.checkpoint import damage as damaging
from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.damage import Damage
from mcore_ckpt.checkpoint.index import BLOCK_BYTES, FileIndex
from mcore_ckpt.checkpoint.index_entries import IndexEntries
from mcore_ckpt.checkpoint.manifest import FileRecord, Manifest, encode_manifest
from mcore_ckpt.checkpoint.reading import read_index, read_manifest
from mcore_ckpt.cli.main import main
from mcore_ckpt.errors import CheckpointNotFoundError
from mcore_ckpt.formats.native.stored_tensors import StoredTensors
from mcore_ckpt.io import checksums, tuning
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.sharding.plan import ShardKey, StoredShard
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.steps import tracker, trainer_lock
from mcore_ckpt.steps.owner import Owner
from mcore_ckpt.steps.retention import PreservationPolicy, delete_old_steps
from mcore_ckpt.steps.trainer_lock import TrainerLock
from mcore_ckpt.tools.examine import step_problems
from mcore_ckpt.tools.examine import verify as verifying
from mcore_ckpt.tools.examine.verify import verify, verify_role
from tests.support.checkpoints import ROLE, SHAPES, make, stage

pytestmark = pytest.mark.slow

MODEL_FILE = file_names.model_file(0, 0)
OPTIMIZER_FILE = file_names.optimizer_file(0, 0, 0, 0)
FLIPS = os.environ.get("MCORE_CKPT_FLIPS")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two steps, which nobody changes."""
    root = tmp_path_factory.mktemp("saved")
    for step in (3, 5):
        make(file_names.step_dir(root, step) / ROLE, version=step)
    tracker.update_tracker(root)
    return root


@pytest.fixture
def role_dir(saved: Path, tmp_path: Path) -> Path:
    """A copy of one checkpoint, to damage."""
    shutil.copytree(saved, tmp_path / "root")
    return file_names.step_dir(tmp_path / "root", 5) / ROLE


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ (1 << bit % 8)]))


def index_of(role_dir: Path, path: str) -> FileIndex:
    (record,) = [file for file in read_manifest(role_dir).files if file.path == path]
    return read_index(role_dir, record)


@pytest.mark.parametrize("deep", [False, True])
def test_what_nobody_has_touched_is_sound(saved: Path, deep: bool) -> None:
    seen: list[tuple[int, int]] = []
    report = verify(saved, deep=deep, progress=lambda *of: seen.append(of))
    assert report.is_sound
    assert [verdict.path for verdict in report.roles] == [file_names.step_dir(saved, step) / ROLE for step in (3, 5)]
    nbytes = sum(verdict.nbytes for verdict in report.roles)
    assert seen[-1] == (nbytes, nbytes)
    assert nbytes == sum(path.stat().st_size for path in saved.rglob("*") if path.suffix == ".pt")


# CI flips some sixty bits of each file: small files are hit all over, and large ones in several tensors.
@pytest.mark.parametrize("flips", [int(FLIPS or 250), pytest.param(int(FLIPS or 1000), marks=pytest.mark.full)])
def test_every_flipped_bit_is_found_and_named(role_dir: Path, flips: int) -> None:
    """Over all files, each as often as the others, for most bits are in the large ones."""
    generator = random.Random(6)
    files = sorted(path for path in role_dir.rglob("*") if path.is_file())
    shards = {path: index_of(role_dir, path).shards for path in (MODEL_FILE, OPTIMIZER_FILE)}
    for _ in range(flips):
        path = generator.choice(files)
        bit = generator.randrange(path.stat().st_size * 8)
        name, byte = path.relative_to(role_dir).as_posix(), bit // 8
        flip(path, bit)
        damages = verify_role(role_dir).damages
        flip(path, bit)
        assert [damage.file for damage in damages] == [name], (name, bit)
        assert name in damages[0].problem
        hit = [shard for shard in shards.get(name, ()) if shard.offset <= byte < shard.offset + shard.nbytes]
        assert damages[0].tensor == (str(hit[0].key) if hit else None), (name, bit)
        assert damages[0].rank == (None if name == file_names.MANIFEST_FILE else 0)
        if hit:
            assert damages[0].span is not None
            start, stop = damages[0].span
            assert start <= byte < stop <= start + BLOCK_BYTES
    assert not verify_role(role_dir).damages


def test_each_run_of_bad_blocks_is_one_damage(role_dir: Path) -> None:
    large = max(index_of(role_dir, OPTIMIZER_FILE).shards, key=lambda shard: shard.nbytes)
    assert large.nbytes > BLOCK_BYTES, "else there is one block alone"
    other = min(index_of(role_dir, OPTIMIZER_FILE).shards, key=lambda shard: shard.nbytes)
    for byte in (large.offset, large.offset + BLOCK_BYTES, other.offset):
        flip(role_dir / OPTIMIZER_FILE, 8 * byte)
    damages = verify_role(role_dir).damages
    spans = {(shard.offset, shard.offset + shard.nbytes) for shard in (large, other)}
    assert {damage.span for damage in damages} == spans
    assert {damage.tensor for damage in damages} == {str(large.key), str(other.key)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: path.unlink(), "missing"),
        (lambda path: os.truncate(path, path.stat().st_size - 1), "cut or replaced"),
        (lambda path: os.truncate(path, 0), "cut or replaced"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "cut or replaced"),
    ],
)
@pytest.mark.parametrize("name", [MODEL_FILE, file_names.rng_file(0, 0, 0, 0)])
def test_files_that_are_gone_or_cut(role_dir: Path, name: str, change: Any, words: str) -> None:
    change(role_dir / name)
    (damage,) = verify_role(role_dir).damages
    assert (damage.file, damage.rank) == (name, 0)
    assert f"{role_dir / name}: " in damage.problem
    assert words in damage.problem


def test_other_files_are_read_though_one_is_gone(role_dir: Path) -> None:
    (role_dir / MODEL_FILE).unlink()
    flip(role_dir / OPTIMIZER_FILE, 8 * 5000)
    assert {damage.file for damage in verify_role(role_dir).damages} == {MODEL_FILE, OPTIMIZER_FILE}


def test_a_file_that_ends_while_it_is_read(role_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_first(files: Any, progress: Any) -> Any:
        os.truncate(role_dir / MODEL_FILE, 5000)
        return checksums.file_crcs(files, progress)

    monkeypatch.setattr(damaging, "file_crcs", cut_first)
    (damage,) = verify_role(role_dir).damages
    assert (damage.file, damage.problem.endswith("ends at byte 5000")) == (MODEL_FILE, True)


def rewrite(role_dir: Path, **changes: Any) -> Manifest:
    """Another manifest, as a writer that forgets something would make it."""
    manifest = replace(read_manifest(role_dir), **changes)
    (role_dir / file_names.MANIFEST_FILE).write_bytes(encode_manifest(manifest))
    return manifest


def test_a_rank_that_nobody_has_listed(role_dir: Path) -> None:
    manifest = read_manifest(role_dir)
    rewrite(role_dir, files=tuple(file for file in manifest.files if file.kind != "rng"))
    (damage,) = verify_role(role_dir).damages
    assert damage == Damage(
        f"{role_dir / file_names.MANIFEST_FILE}: does not list {file_names.rng_file(0, 0, 0, 0)}, a file of rank 0",
        file_names.rng_file(0, 0, 0, 0),
        0,
    )


def test_a_tensor_that_is_not_all_there(role_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(entries: IndexEntries, name: str) -> FileIndex:
        index = of(entries, name)
        cut = tuple(replace(s, region=s.region.with_flat(0, s.region.numel // 2)) for s in index.shards)
        return FileIndex(cut, index.aliases)

    of = IndexEntries.of
    monkeypatch.setattr(IndexEntries, "of", half)
    damages = verify_role(role_dir).damages
    wanted = {
        str(s.key): -(-s.region.numel // 2) for p in (MODEL_FILE, OPTIMIZER_FILE) for s in index_of(role_dir, p).shards
    }
    assert {d.tensor: int(d.problem.split(": ")[2].split()[0]) for d in damages} == wanted


def test_a_tensor_of_two_shapes(role_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the files of two ranks do not belong together."""
    shards_in = StoredTensors.shards

    def twice(stored: StoredTensors, key: ShardKey, files: Iterable[FileRecord]) -> list[StoredShard]:
        shards = shards_in(stored, key, files)
        return [*shards, *(replace(s, region=Region.whole((*s.region.global_shape, 1))) for s in shards)]

    monkeypatch.setattr(StoredTensors, "shards", twice)
    shapes = {
        str(s.key): [*s.region.global_shape] for p in (MODEL_FILE, OPTIMIZER_FILE) for s in index_of(role_dir, p).shards
    }
    assert {damage.tensor: damage.problem for damage in verify_role(role_dir).damages} == {
        key: f"{role_dir}: tensor {key}: has shapes {shape} and {[*shape, 1]} in its files"
        for key, shape in shapes.items()
    }


def test_what_torch_sees_is_compared(role_dir: Path) -> None:
    """Of a file whose CRCs are all right: one that a broken writer has made."""
    record = next(file for file in read_manifest(role_dir).files if file.path == MODEL_FILE)
    path = role_dir / MODEL_FILE
    data = path.read_bytes()
    name = b"decoder.norm.weight"
    assert record.index is not None
    assert data.index(name) < record.index.offset, "the pickle's, not the index's"
    with zipfile.ZipFile(path) as archive:
        (pickled,) = [archive.read(entry) for entry in archive.namelist() if entry.endswith("/data.pkl")]
    renamed = pickled.replace(name, b"decoder.norm.height")
    old, new = (zlib.crc32(part).to_bytes(4, "little") for part in (pickled, renamed))
    path.write_bytes(data.replace(pickled, renamed).replace(old, new))
    (crc,) = checksums.file_crcs([(path, record.size)])
    files = read_manifest(role_dir).files
    rewrite(role_dir, files=tuple(structs.replace(f, crc32=crc) if f.path == MODEL_FILE else f for f in files))
    assert not verify_role(role_dir).damages
    problems = [damage.problem for damage in verify_role(role_dir, deep=True).damages]
    assert any("decoder.norm.height (model) is not in the index" in problem for problem in problems)


@pytest.mark.parametrize(
    "state",
    [
        [1],
        {"a": 5},
        {1: torch.zeros(2)},
        {"a": torch.zeros(2, 2).to_sparse()},
        {"embedding.weight": torch.empty(SHAPES["embedding.weight"], device="meta")},
        {"state": {"a": 5}},
    ],
    ids=["a list", "a number", "a key of no text", "sparse", "without bytes", "an optimizer's without kinds"],
)
def test_what_torch_sees_may_be_anything(role_dir: Path, state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "load", lambda *args, **words: state)
    damages = verify_role(role_dir, deep=True).damages
    assert {damage.file for damage in damages} >= {MODEL_FILE}


@pytest.mark.parametrize(
    "change", [lambda seen: seen.view(torch.int32), lambda seen: seen.flatten()[1:]], ids=["dtype", "elements"]
)
def test_dtype_and_number_of_elements_are_compared(
    role_dir: Path, change: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = torch.load

    def changed(*args: Any, **words: Any) -> Any:
        state = load(*args, **words)
        return {key: change(value) if key == "embedding.weight" else value for key, value in state.items()}

    monkeypatch.setattr(torch, "load", changed)
    (damage,) = verify_role(role_dir, deep=True).damages
    assert re.search(
        r"embedding.weight.*: torch reads \d+ elements of torch\.\w+, but the index has \d+ of", damage.problem
    )


def test_a_save_that_is_under_way_is_no_problem(role_dir: Path) -> None:
    root = role_dir.parent.parent
    stage(file_names.step_dir(root, 6) / ROLE, 6)
    assert verify(root).is_sound


@pytest.mark.parametrize(("where", "above", "roles"), [("", "..", 1), ("..", "..", 2), ("..", ".", 1), ("", ".", 1)])
def test_a_folder_above(role_dir: Path, where: str, above: str, roles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(role_dir / where)
    report = verify(Path(above))
    assert report.is_sound
    assert len(report.roles) == roles


def test_a_name_that_is_no_text(role_dir: Path) -> None:
    """In a locale whose terminals take nothing else Python prints nothing else, and raises."""
    strange = os.fsencode(role_dir.parent.parent.with_name("ck")) + b"\xff"
    os.rename(role_dir.parent.parent, strange)
    # One process for all commands: to import torch takes longer than they do.
    script = (
        "import sys\nfrom mcore_ckpt.cli.main import main\n"
        "for command in (['verify'], ['list'], ['prune', '--dry-run']):\n"
        "    assert main([*command, sys.argv[1]]) == 0, command\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, strange],
        env=os.environ | {"PYTHONIOENCODING": "utf-8:strict"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("at", ["files", "tensors"])
def test_a_step_that_is_saved_again_meanwhile(role_dir: Path, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its old files are gone before they are read. The new ones are sound, and what is damaged later is found."""
    name = {"files": "verify_files", "tensors": "_incomplete_tensors"}[at]
    original, saves = getattr(verifying, name), iter((6, 7))

    def saved_again(*arguments: Any) -> Any:
        version = next(saves, None)
        if version is not None:
            make(role_dir, version)
        return original(*arguments)

    monkeypatch.setattr(verifying, name, saved_again)
    assert verify(role_dir.parent).is_sound
    assert next(saves, None) is None
    flip(role_dir / MODEL_FILE, 8000)
    assert not verify(role_dir.parent).is_sound


def test_what_is_verified_is_not_deleted_and_what_comes_later_may_be(role_dir: Path) -> None:
    root = role_dir.parent.parent
    make(file_names.step_dir(root, 6) / ROLE, 6)
    tracker.update_tracker(root)
    deleted: list[list[int]] = []
    report = verify(root, progress=lambda done, total: deleted.append(delete_old_steps(root, PreservationPolicy(1))))
    assert report.is_sound
    # While the first one is read, the second goes; the first goes when it has been read.
    assert list(itertools.chain(*deleted)) == [5, 3]
    assert [verdict.path.parent.name for verdict in report.roles] == ["global_steps_3", "global_steps_6"]


@pytest.mark.parametrize(
    ("text", "words"),
    [("3", "names step 3, but the newest complete step is 5"), ("", "does not name a step"), ("7", "names step 7")],
)
def test_the_tracker(saved: Path, tmp_path: Path, text: str, words: str) -> None:
    root = tmp_path / "root"
    shutil.copytree(saved, root)
    (root / file_names.TRACKER_FILE).write_text(text)
    (problem,) = verify(root).problems
    assert words in problem
    assert verify(root, step=5).is_sound, "one step is asked for"
    (root / file_names.TRACKER_FILE).unlink()
    assert "missing" in verify(root).problems[0]


def test_steps_that_do_not_count(saved: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(saved, root)
    make(file_names.step_dir(root, 9) / ROLE, version=9, roles=(ROLE, "critic"))
    report = verify(root)
    assert not report.is_sound
    assert report.problems == (f"{file_names.step_dir(root, 9)}: not committed by critic",)
    assert len(report.roles) == 3
    (file_names.step_dir(root, 9) / ROLE / file_names.MANIFEST_FILE).write_text("{")
    (damage,) = verify(root).roles[-1].damages
    assert damage.file == file_names.MANIFEST_FILE


@pytest.mark.parametrize("asked", ["root", "step", "role"])
def test_a_step_that_retention_deletes_meanwhile(role_dir: Path, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the steps and the lock on them. What is left is verified; what was asked for is missing."""
    root = role_dir.parent.parent
    oldest = file_names.step_dir(root, 3)
    original = verifying.reading

    @contextlib.contextmanager
    def reading_late(role_dirs: Iterable[Path]) -> Iterator[None]:
        if oldest.exists():
            assert delete_old_steps(root, PreservationPolicy(1)) == [3]
        with original(role_dirs):
            yield

    monkeypatch.setattr(verifying, "reading", reading_late)
    if asked == "root":
        report = verify(root)
        assert report.is_sound
        assert [verdict.path for verdict in report.roles] == [role_dir]
    else:
        with pytest.raises(CheckpointNotFoundError, match="was deleted while it was being verified"):
            verify({"step": oldest, "role": oldest / ROLE}[asked])


@pytest.mark.parametrize("asked", ["root", "role"])
def test_a_role_that_is_between_two_renames(role_dir: Path, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is verified where it was moved to, or where it is then."""
    aside = file_names.replaced_dir(role_dir, "a" * 32)
    os.rename(role_dir, aside)
    assert [verdict.path for verdict in verify(role_dir.parent.parent).roles][1:] == [aside]
    original, renames = verifying.verify_files, iter([(aside, role_dir)])

    def renamed(*arguments: Any) -> Any:
        for of in renames:
            os.rename(*of)
        return original(*arguments)

    monkeypatch.setattr(verifying, "verify_files", renamed)
    report = verify({"root": role_dir.parent.parent, "role": role_dir}[asked])
    assert report.is_sound
    assert report.roles[-1].path == role_dir


class Trainers:
    """Two roles' trainers of a root whose step 9 has only one of its roles."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.step = file_names.step_dir(root, 9)
        make(self.step / ROLE, version=9, roles=(ROLE, "critic"))
        self._locks = contextlib.ExitStack()

    def live(self, role: str) -> None:
        lock = TrainerLock(self.root, role)
        lock.take(0.0)
        self._locks.callback(lock.release)

    def claim(self, role: str, owner: Owner) -> None:
        path = file_names.trainer_file(self.root, role)
        path.write_bytes(fields.encode(asdict(owner) | {"claim": "f" * 32}))

    def end(self) -> None:
        self._locks.close()


ELSEWHERE = Owner("node7 another-boot pid:[1]", 4321, 99)
DEAD = replace(Owner.this_process(), start=1)


@pytest.fixture
def trainers(role_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainers]:
    monkeypatch.setattr(tuning, "SETTLE_POLL_S", 0.01)
    monkeypatch.setattr(tuning, "TRACKER_SETTLES_S", 0.2)
    trainers = Trainers(role_dir.parent.parent)
    yield trainers
    trainers.end()


@pytest.mark.parametrize("role", [ROLE, "critic"])
def test_a_step_that_a_living_trainer_is_saving(
    trainers: Trainers, role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The critic's first save has no lock yet: then the step is its actor's trainer's."""
    trainers.live(role)
    for path in (trainers.root, trainers.step):
        report = verify(path)
        assert report.is_sound
        assert report.under_way == (f"{trainers.step}: not committed by critic",)
    assert main(["verify", str(trainers.root)]) == 0
    assert "not committed by critic. This is no damage: a trainer of this step is alive" in capsys.readouterr().out


def test_a_step_whose_trainer_is_dead(trainers: Trainers) -> None:
    trainers.live(ROLE)
    trainers.claim("critic", DEAD)
    assert verify(trainers.root).problems == (f"{trainers.step}: not committed by critic",)


def test_a_step_that_living_trainers_have_left_behind(trainers: Trainers) -> None:
    trainers.live(ROLE)
    trainers.live("critic")
    make(file_names.step_dir(trainers.root, 12) / ROLE, 12)
    tracker.update_tracker(trainers.root)
    assert verify(trainers.root).problems == (f"{trainers.step}: not committed by critic",)


@pytest.mark.parametrize("beats", ["while files are read", "afterwards", "never"])
def test_a_trainer_on_another_host(trainers: Trainers, beats: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is alive if its lock file is touched within two beats."""
    monkeypatch.setattr(trainer_lock, "TRAINER_BEAT_S", 0.05 if beats == "never" else 1000.0)
    trainers.claim("critic", ELSEWHERE)
    verify_files, sleep = verifying.verify_files, time.sleep

    def beat_if(now: str) -> None:
        if beats == now:
            os.utime(file_names.trainer_file(trainers.root, "critic"), ns=(7, 7))

    def read(*arguments: Any) -> Any:
        beat_if("while files are read")
        return verify_files(*arguments)

    def poll(seconds: float) -> None:
        beat_if("afterwards")
        sleep(seconds)

    monkeypatch.setattr(verifying, "verify_files", read)
    monkeypatch.setattr(step_problems.time, "sleep", poll)
    report = verify(trainers.root)
    reason = f"{trainers.step}: not committed by critic"
    assert (report.problems, report.under_way) == (((reason,), ()) if beats == "never" else ((), (reason,)))


def complete(trainers: Trainers) -> str:
    """Completes the step, and returns what is wrong with the tracker then."""
    make(trainers.step / "critic", version=9, roles=(ROLE, "critic"))
    return f"{trainers.root / file_names.TRACKER_FILE}: names step 5, but the newest complete step is 9"


def test_a_tracker_that_is_about_to_move(trainers: Trainers, monkeypatch: pytest.MonkeyPatch) -> None:
    trainers.live(ROLE)
    complete(trainers)
    monkeypatch.setattr(tuning, "TRACKER_SETTLES_S", 1000.0)
    monkeypatch.setattr(step_problems.time, "sleep", lambda seconds: tracker.update_tracker(trainers.root))
    report = verify(trainers.root)
    assert (report.problems, report.under_way, len(report.roles)) == ((), (), 4)


def test_a_tracker_that_does_not_move(trainers: Trainers) -> None:
    trainers.live(ROLE)
    problem = complete(trainers)
    assert verify(trainers.root).problems == (problem,)


def test_a_tracker_that_does_not_move_while_steps_are_committed(
    trainers: Trainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each commit changes what there is to say about it."""
    trainers.live(ROLE)
    complete(trainers)
    verify_files, commits = verifying.verify_files, iter((11,))

    def read(*arguments: Any) -> Any:
        for step in commits:
            make(file_names.step_dir(trainers.root, step) / ROLE, step)
        return verify_files(*arguments)

    monkeypatch.setattr(verifying, "verify_files", read)
    (problem,) = verify(trainers.root).problems
    assert problem.endswith("names step 5, but the newest complete step is 11")


def test_steps_that_one_trainer_saves_alone(trainers: Trainers) -> None:
    """The critic's has ended in order, so there is no lock. The actor's goes on, and no step is complete any more."""
    trainers.live(ROLE)
    for step in (10, 11, 12):
        make(file_names.step_dir(trainers.root, step) / ROLE, step, roles=(ROLE, "critic"))
    report = verify(trainers.root)
    assert [str(step) in text for step, text in zip((9, 10), report.problems, strict=True)] == [True, True]
    assert [str(step) in text for step, text in zip((11, 12), report.under_way, strict=True)] == [True, True]


def test_thousands_of_steps_are_not_complete(trainers: Trainers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root is not listed once for each of them."""
    scans = []
    step_dirs = file_names.step_dirs
    for step in range(20, 60):
        make(file_names.step_dir(trainers.root, step) / ROLE, step, roles=(ROLE, "critic"))
    monkeypatch.setattr(file_names, "step_dirs", lambda root: scans.append(root) or step_dirs(root))
    assert len(verify(trainers.root).problems) == 41
    assert len(scans) < 10


def test_a_root_that_cannot_be_looked_at_again(trainers: Trainers, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found in hours of reading is reported all the same."""

    def fail(root: Path) -> dict[int, list[Path]]:
        raise OSError(errno.ESTALE, "Stale file handle")

    def read(*arguments: Any) -> Any:
        monkeypatch.setattr(file_names, "step_dirs", fail)
        return verify_files(*arguments)

    verify_files = verifying.verify_files
    monkeypatch.setattr(verifying, "verify_files", read)
    report = verify(trainers.root)
    assert len(report.roles) == 3
    assert report.problems[0] == f"{trainers.step}: not committed by critic"
    assert "could not be read again" in report.problems[1]
    assert "Stale file handle" in report.problems[1]


def test_as_it_is_typed(role_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = role_dir.parent.parent
    assert main(["verify", str(root), "--deep"]) == 0
    assert "sound" in capsys.readouterr().out
    flip(role_dir / MODEL_FILE, 8 * index_of(role_dir, MODEL_FILE).shards[0].offset)
    assert main(["verify", str(role_dir)]) == 1
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "embedding.weight: bytes [" in line)
    assert line.endswith(" (written by rank 0)")
    assert main(["verify", str(root), "--step", "3"]) == 0
    capsys.readouterr()
    assert main(["verify", str(root), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert not answer["sound"]
    assert [bool(role["damages"]) for role in answer["roles"]] == [False, True]
    (damage,) = answer["roles"][1]["damages"]
    assert (damage["file"], damage["rank"], damage["tensor"]) == (MODEL_FILE, 0, "embedding.weight")
    assert main(["verify", str(root), "--step", "4"]) == 1
    assert "no checkpoint of step 4: there are the steps " in capsys.readouterr().err
    assert main(["verify", str(root / "nowhere")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_nothing_to_verify(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint"):
        verify(tmp_path)
