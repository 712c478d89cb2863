"""What the doctor finds out about a folder, and that nothing of it stays there."""

import errno
import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import encode_manifest
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.errors import CheckpointCorruptError, InvalidArgumentError
from mcore_ckpt.io import files
from mcore_ckpt.io.disk_space import Amount, DiskSpace, Limit, Need, space_of
from mcore_ckpt.io.mounts import Mount, mount_of, parse_mount
from mcore_ckpt.ranks.meeting import single_process_agreement
from mcore_ckpt.steps import commit
from mcore_ckpt.steps.leftovers import find_leftovers, remove_leftovers
from mcore_ckpt.steps.listing import StepStatus
from mcore_ckpt.steps.owner import Owner
from mcore_ckpt.steps.trainer_lock import TORN_LEASE_S
from mcore_ckpt.steps.work_folders import TRIAL_LASTS_S
from mcore_ckpt.tools.examine.doctor import examine as examination
from mcore_ckpt.tools.examine.doctor import free_space, known, probes, speed, trial
from mcore_ckpt.tools.examine.doctor.examine import Report, examine
from mcore_ckpt.tools.examine.doctor.findings import Finding, Severity, fine, merged, worst
from tests.support.checkpoints import own
from tests.support.mounting import mounted, mounted_image, shown_by
from tests.support.small_model import STEP, make, tensors_of

ROLE = "actor"


def report_on(root: Path, megabytes: int = 0) -> Report:
    report = examine(root, single_process_agreement("doctor", 10.0), megabytes)
    assert report is not None
    assert [entry.name for entry in root.iterdir() if file_names.is_trial_dir(entry.name)] == []
    return report


def finding_of(report: Report, topic: str) -> Finding:
    (finding,) = (finding for finding in report.findings if finding.topic == topic)
    return finding


def test_a_sound_folder_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "global_steps_1").mkdir()
    before = tmp_path / "global_steps_1"
    report = report_on(tmp_path, megabytes=8)
    assert report.is_usable
    assert [finding for finding in report.findings if finding.severity is Severity.BAD] == []
    assert list(tmp_path.iterdir()) == [before]
    topics = [finding.topic for finding in report.findings]
    wanted = {topic for topic, _ in probes._PROBES} | {known.FILE_SYSTEM, trial.FOLDER, speed.WRITE, speed.READ}
    assert wanted | {speed.SYNC_TIME, speed.SMALL_FILES, free_space.FREE_SPACE} <= set(topics)
    values = finding_of(report, speed.WRITE).values
    assert values["file_bytes"] == 7 << 20
    assert values["ratio"] > 0


def refuse(number: int) -> Callable[..., Any]:
    def call(*args: object, **kwargs: object) -> Any:
        raise OSError(number, os.strerror(number))

    return call


def open_without_direct(path: Any, flags: int, *args: Any, **more: Any) -> int:
    if flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return _OPEN(path, flags, *args, **more)


def mmap_without_files(file: int, *args: Any, **more: Any) -> Any:
    if file >= 0:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
    return _MMAP(file, *args, **more)


_OPEN, _MMAP = os.open, probes.mmap.mmap
EMULATED = {
    probes.EXCHANGE: (commit, "exchange", lambda first, second: False, "two renames"),
    probes.LINKS: (
        os,
        "link",
        refuse(errno.EPERM),
        f"damaged lock file, and the next trainer waits {TORN_LEASE_S:g} s;",
    ),
    probes.FLOCK: (fcntl, "flock", refuse(errno.ENOLCK), "while it is read"),
    probes.RESERVE: (probes, "fallocate", lambda descriptor, nbytes: errno.EOPNOTSUPP, "full disk"),
    probes.DIRECT: (os, "open", open_without_direct, "page cache"),
    probes.MAPPING: (probes.mmap, "mmap", mmap_without_files, "torch.load"),
}


@pytest.mark.parametrize("topic", EMULATED)
def test_what_is_missing_is_named_with_its_cost(topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "mount_of", lambda root: None)  # as on a disk, if the test is in memory
    module, name, instead, words = EMULATED[topic]
    monkeypatch.setattr(module, name, instead)
    report = report_on(tmp_path)
    finding = finding_of(report, topic)
    assert finding.severity is Severity.EMULATED
    assert words in f"{finding.fact}; {finding.cost}"
    assert report.is_usable


BAD = {
    probes.SYNC: (probes, "sync_dir", refuse(errno.EINVAL), "Invalid argument"),
    probes.RENAME: (os, "rename", refuse(errno.EPERM), "Operation not permitted"),
    probes.WRITES: (os, "pwrite", refuse(errno.EINVAL), "Invalid argument"),
    probes.EXCLUSIVE: (probes, "claim_file", lambda path, data: None, "can be made again"),
    probes.TIMES: (os, "utime", lambda *args: None, "does not change its time"),
    probes.EXCHANGE: (commit, "exchange", refuse(errno.EXDEV), "cross-device"),
}


@pytest.mark.parametrize("topic", BAD)
def test_where_checkpoints_cannot_be_saved(topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "mount_of", lambda root: None)
    module, name, instead, words = BAD[topic]
    monkeypatch.setattr(module, name, instead)
    report = report_on(tmp_path, megabytes=8)
    finding = finding_of(report, topic)
    assert finding.severity is Severity.BAD
    assert words in finding.fact
    assert finding.cost
    assert not report.is_usable
    assert speed.WRITE not in {finding.topic for finding in report.findings}


def test_names_that_are_too_long_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """eCryptfs takes names of 143 letters. Only roles with long names cannot be saved there."""
    mkdir = Path.mkdir

    def refuse_long(path: Path, *args: Any, **more: Any) -> None:
        if len(path.name) > 143:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        mkdir(path, *args, **more)

    monkeypatch.setattr(Path, "mkdir", refuse_long)
    report = report_on(tmp_path)
    assert finding_of(report, probes.NAMES).severity is Severity.RISK
    assert report.is_usable


def test_locks_without_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, kind: None)
    assert "no effect" in finding_of(report_on(tmp_path), probes.FLOCK).fact


def test_other_bytes_than_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pread", lambda descriptor, nbytes, offset: bytes(nbytes))
    assert "differ from the written bytes" in finding_of(report_on(tmp_path), probes.WRITES).fact


def test_a_disk_that_fails_while_it_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "measure", refuse(errno.EIO))
    report = report_on(tmp_path)
    assert not report.is_usable
    assert "Input/output error" in finding_of(report, speed.WRITE).fact


def test_the_clock_of_a_file_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = probes.time.time
    monkeypatch.setattr(probes.time, "time", lambda: now() + 100)
    finding = finding_of(report_on(tmp_path), probes.TIMES)
    assert finding.severity is Severity.RISK
    assert "100 s behind" in finding.fact
    assert finding.values["server_clock_ahead_s"] == pytest.approx(-100, abs=2)


# -- the folder in which it tries things


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, ValueError])
def test_nothing_stays_after_an_interruption(
    interrupt: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> list[Finding]:
        assert len(list(tmp_path.iterdir())) == 1
        raise interrupt

    monkeypatch.setattr(speed, "measure", fail)
    with pytest.raises(BaseException) as raised:  # noqa: PT011
        examine(tmp_path, single_process_agreement("doctor", 10.0), 0)
    assert isinstance(raised.value, interrupt) or "ValueError" in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def leave_a_trial(root: Path) -> Path:
    """What a doctor leaves that is killed."""
    pid = os.fork()
    if pid == 0:
        with trial.trial_folder(root) as folder:
            (folder / "file").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    (left,) = root.iterdir()
    return left


def test_what_a_killed_doctor_leaves_is_removed(tmp_path: Path) -> None:
    left = leave_a_trial(tmp_path)
    assert find_leftovers(tmp_path) == [left]
    remove_leftovers(tmp_path, ROLE, alone=False)
    assert not left.exists()
    left = leave_a_trial(tmp_path)
    report_on(tmp_path)
    assert not left.exists()


def test_the_folder_of_a_living_doctor_stays(tmp_path: Path) -> None:
    with trial.trial_folder(tmp_path) as folder:
        assert find_leftovers(tmp_path) == []
        remove_leftovers(tmp_path, ROLE, alone=True)
        trial.remove_dead_trials(tmp_path)
        assert folder.is_dir()


@pytest.fixture(params=["elsewhere", "nobody"])
def foreign_trial(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A trial folder of another host, or one whose owner file was not written yet."""
    folder = file_names.trial_dir(tmp_path, "a" * 32)
    (folder / "rank-0").mkdir(parents=True)
    if request.param == "elsewhere":
        own(folder, Owner("node7 another-boot pid:[1]", 4321, 99))
    return folder


@pytest.mark.parametrize("clock", [0.0, 1e11])
def test_a_doctor_elsewhere_may_be_alive(
    foreign_trial: Path, clock: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's lock says nothing about doctors, and this host's clock nothing about the age of a folder."""
    monkeypatch.setattr(time, "time", lambda: clock)
    remove_leftovers(tmp_path, ROLE, alone=True)
    trial.remove_dead_trials(tmp_path)
    assert list(tmp_path.iterdir()) == [foreign_trial]


@pytest.mark.parametrize("by", ["first save", "doctor"])
def test_an_old_trial_folder_of_elsewhere_is_removed(foreign_trial: Path, by: str, tmp_path: Path) -> None:
    made = foreign_trial.stat().st_mtime - TRIAL_LASTS_S - 60
    os.utime(foreign_trial, (made, made))
    assert find_leftovers(tmp_path) == [], "a look writes nothing, so it cannot know the age"
    remove_leftovers(tmp_path, ROLE, alone=False)
    assert foreign_trial.exists(), "a trainer that only loads writes nothing either"
    if by == "doctor":
        trial.remove_dead_trials(tmp_path)
    else:
        remove_leftovers(tmp_path, ROLE, alone=True)
    assert list(tmp_path.iterdir()) == []


def test_a_trial_folder_whose_age_cannot_be_told_stays(
    foreign_trial: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.utime(foreign_trial, (0, 0))

    def refuse(path: Path, *arguments: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    remove_leftovers(tmp_path, ROLE, alone=True)
    assert list(tmp_path.iterdir()) == [foreign_trial]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="no such folder"):
        examine(tmp_path / "missing", single_process_agreement("doctor", 10.0), 0)


# -- file systems


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_read_only_mount(tmp_path: Path, stack: ExitStack) -> None:
    root = stack.enter_context(mounted(tmp_path / "root", "-t", "tmpfs", "-o", "ro", "tmpfs"))
    report = report_on(root)
    assert not report.is_usable
    assert "Read-only file system" in finding_of(report, trial.FOLDER).fact
    assert "rw" in finding_of(report, trial.FOLDER).advice


def test_a_full_disk(tmp_path: Path, stack: ExitStack) -> None:
    root = stack.enter_context(mounted(tmp_path / "root", "-t", "tmpfs", "-o", "size=64k", "tmpfs"))
    with pytest.raises(OSError, match="No space"):
        files.write_file(root / "file", [bytes(1 << 20)])
    report = report_on(root)
    assert not report.is_usable
    assert finding_of(report, free_space.FREE_SPACE).fact == "no byte is free"


def test_a_small_disk_is_not_filled(tmp_path: Path, stack: ExitStack) -> None:
    root = stack.enter_context(mounted(tmp_path / "root", "-t", "tmpfs", "-o", "size=36m", "tmpfs"))
    report = report_on(root, megabytes=256)
    assert report.is_usable
    assert finding_of(report, speed.WRITE).values["file_bytes"] == 2 << 20
    assert finding_of(report, known.FILE_SYSTEM).severity is Severity.RISK


def test_ext4_on_a_loop_device(tmp_path: Path, stack: ExitStack) -> None:
    root = stack.enter_context(mounted_image(tmp_path / "root", "ext4", "loop,nobarrier"))
    report = report_on(root)
    assert report.is_usable
    assert report.mount is not None
    assert report.mount.kind == "ext4"
    assert "nobarrier" in finding_of(report, known.OPTIONS).fact


@pytest.mark.full
def test_ext4_with_its_data_in_the_journal(tmp_path: Path, stack: ExitStack) -> None:
    root = stack.enter_context(mounted_image(tmp_path / "root", "ext4", "loop,data=journal"))
    report = report_on(root, megabytes=16)
    assert finding_of(report, probes.DIRECT).severity is Severity.EMULATED
    assert finding_of(report, known.OPTIONS).severity is Severity.SLOW
    assert report.is_usable


@pytest.mark.full
@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "tmpfs", "overlay"])
def test_what_the_start_line_says_of_file_systems_is_true(kind: str, tmp_path: Path, stack: ExitStack) -> None:
    place = tmp_path / "root"
    if kind == "tmpfs":
        root = stack.enter_context(mounted(place, "-t", "tmpfs", "tmpfs"))
    elif kind == "overlay":
        for name in ("lower", "upper", "work"):
            (tmp_path / name).mkdir()
        options = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
        root = stack.enter_context(mounted(place, "-t", "overlay", "-o", options, "overlay"))
    else:
        root = stack.enter_context(mounted_image(place, kind))
    mount = mount_of(root)
    assert mount is not None
    able = known.abilities_of(mount)
    assert able is not None
    report = report_on(root, megabytes=16)
    works = {finding.topic: finding.severity is Severity.FINE for finding in report.findings}
    assert (able.exchange, able.locks) == (works[probes.EXCHANGE], works[probes.FLOCK])
    assert able.direct == (works[probes.DIRECT] and "not needed" not in finding_of(report, probes.DIRECT).fact)
    assert report.is_usable


@pytest.mark.full
@pytest.mark.parametrize("program", ["bindfs", "unionfs"])
def test_a_fuse_file_system(program: str, tmp_path: Path, stack: ExitStack) -> None:
    (tmp_path / "folder").mkdir()
    root = stack.enter_context(shown_by(program, tmp_path / "root", tmp_path / "folder"))
    report = report_on(root, megabytes=16)
    assert report.is_usable
    assert "FUSE" in finding_of(report, known.FILE_SYSTEM).fact


OPTIONS = [
    ("ext4 /dev/a rw,nobarrier", Severity.RISK, "power loss"),
    ("ext4 /dev/a rw,barrier=0", Severity.RISK, "power loss"),
    ("ext4 /dev/a rw,data=journal", Severity.SLOW, "twice"),
    ("ext4 /dev/a rw,data=writeback,relatime", Severity.FINE, ""),
    ("overlay overlay rw,volatile", Severity.RISK, "crash of the machine"),
    ("overlay overlay rw,fsync=volatile", Severity.RISK, "crash of the machine"),
    ("nfs4 a:/b rw,hard,local_lock=none", Severity.FINE, ""),
    ("nfs4 a:/b rw,soft", Severity.RISK, "busy server"),
    ("nfs a:/b rw,hard,nolock", Severity.EMULATED, "another host is reading"),
    ("nfs a:/b rw,hard,local_lock=all", Severity.EMULATED, "another host is reading"),
    ("nfs a:/b rw,hard,local_lock=posix", Severity.FINE, ""),
    ("nfs4 a:/b rw,hard,noac", Severity.SLOW, "writing is slower"),
    ("nfs4 a:/b rw,hard,acregmax=600", Severity.RISK, "lock file"),
    ("lustre a@tcp:/b rw,localflock", Severity.EMULATED, "another host is reading"),
    ("lustre a@tcp:/b rw,flock", Severity.FINE, ""),
    ("xfs /dev/a rw,sync", Severity.SLOW, "take longer"),
    ("tmpfs tmpfs rw", Severity.RISK, "restarts"),
    ("overlay overlay rw", Severity.RISK, "removed"),
    ("xfs /dev/a ro", Severity.BAD, "no checkpoint"),
]


@pytest.mark.parametrize(("system", "severity", "words"), OPTIONS)
def test_options_that_matter(system: str, severity: Severity, words: str) -> None:
    findings = known.known_of(parse_mount(f"1 1 0:1 / /mnt rw - {system}"))
    assert worst(findings) is severity
    costs = [finding.cost for finding in findings if finding.severity is severity]
    assert any(words in cost for cost in costs)
    assert all(finding.advice for finding in findings if finding.severity is not Severity.FINE)


def test_an_unknown_mount_is_no_error() -> None:
    assert worst(known.known_of(None)) is Severity.FINE
    assert known.abilities_of(Mount("newfs", "a", "/")) is None


# -- space


def test_space_in_saves(tmp_path: Path) -> None:
    """In whole blocks, with folders, as a save counts them."""
    make(tmp_path, tensors_of())
    (tmp_path / file_names.step_name(STEP + 1) / ROLE).mkdir(parents=True)  # a newer step that is not complete
    space = free_space.free_space(tmp_path)
    step_path = file_names.step_dir(tmp_path, STEP)
    below = list(step_path.rglob("*"))
    assert space.step == STEP
    block = space_of(tmp_path).block
    sizes = [path.stat().st_size for path in below if path.is_file()]
    folders = 1 + sum(path.is_dir() for path in below)
    assert space.taken == Amount(
        sum(-(-size // block) for size in [*sizes, 1]) * block + folders * space_of(tmp_path).folder_bytes,
        len(sizes) + 1 + folders,
    ), "with the step's own folder and the owner file"
    assert space.saves == space.disk.times(space.taken)
    assert f"more saves like step {STEP}" in str(space)


@pytest.mark.parametrize("keeps_model", [True, False])
def test_what_a_save_deletes_before_its_commit_takes_space_once(keeps_model: bool, tmp_path: Path) -> None:
    """The model's own files, where only HuggingFace's are kept. They need space in the last save that fits."""
    make(tmp_path, tensors_of())
    role_dir = file_names.step_dir(tmp_path, STEP) / ROLE
    manifest = read_manifest(role_dir)
    largest = max(manifest.files, key=lambda file: file.size)
    exported = structs.replace(largest, path=f"{file_names.HUGGINGFACE_DIR}/model.safetensors", kind="huggingface")
    contents = ("hf_model", *(["model"] if keeps_model else []))
    (role_dir / file_names.MANIFEST_FILE).write_bytes(
        encode_manifest(replace(manifest, contents=contents, files=(*manifest.files, exported)))
    )
    (role_dir / exported.path).parent.mkdir(exist_ok=True)
    os.link(role_dir / largest.path, role_dir / exported.path)  # a step counts only with all of its files
    space = free_space.free_space(tmp_path)
    assert space.passing == (0 if keeps_model else largest.size)
    assert ("more until it is committed" in str(space)) is not keeps_model
    limits = (Limit("nbytes", 2 * space.taken.nbytes, "disk"),)
    assert replace(space, disk=DiskSpace(limits)).saves == (2 if keeps_model else 1)


def test_a_damaged_newest_step_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing reads only the beginning of a manifest, so it may not have seen the damage."""
    make(tmp_path, tensors_of())

    def fail(status: StepStatus) -> Need:
        raise CheckpointCorruptError("damaged")

    monkeypatch.setattr(free_space, "need_of", fail)
    assert free_space.free_space(tmp_path).saves is None


def left(nbytes: int, entries: int = 1000, is_certain: bool = True) -> free_space.FreeSpace:
    limits = (Limit("nbytes", nbytes, "disk"), Limit("entries", entries, "inodes"))
    return free_space.FreeSpace(DiskSpace(limits, is_certain=is_certain), 5, Amount(100, 10))


@pytest.mark.parametrize(
    ("space", "severity", "cost"),
    [
        (left(99), Severity.BAD, "the next save fails"),
        (left(150), Severity.RISK, "after the next one fails"),
        (left(200), Severity.FINE, ""),
        (left(200, entries=9), Severity.BAD, "the next save fails"),
        (left(0), Severity.BAD, "no checkpoint can be saved"),
        (left(99, is_certain=False), Severity.RISK, "the next save may fail"),
        (left(150, is_certain=False), Severity.RISK, "after the next one may fail"),
        (left(0, is_certain=False), Severity.RISK, "saves may fail"),
    ],
)
def test_too_little_space(space: free_space.FreeSpace, severity: Severity, cost: str) -> None:
    """Where a save would be tried nevertheless, the folder stays usable."""
    finding = free_space.finding_of_space(space)
    assert finding.severity is severity
    assert cost in finding.cost
    assert ("or more" in finding.fact) is not space.disk.is_certain or space.nbytes == 0


def test_sizes_have_the_unit_that_fits() -> None:
    assert str(left(250)) == "250 B free: 2 more saves like step 5 (100 B)"
    large = replace(left(81_200_000_000), taken=Amount(6_400_000_000, 10), passing=2_500_000)
    text = "81.2 GB free: 12 more saves like step 5 (6.4 GB, and 2.5 MB more until it is committed)"
    assert str(large) == text


# -- several hosts


def test_findings_of_several_hosts() -> None:
    same, other = fine("a", "works"), Finding("a", Severity.BAD, "fails")
    assert merged({0: [same], 4: [same]}) == [same]
    found = merged({0: [same, fine("b", "x")], 4: [other, fine("b", "x")], 8: [other, fine("b", "x")]})
    assert [(finding.fact, finding.ranks) for finding in found] == [("works", (0,)), ("fails", (4, 8)), ("x", ())]
    assert [Finding.of(finding.as_record()) for finding in found] == found


def test_of_speeds_the_slowest_is_shown() -> None:
    def speeds(write: float, sync: float) -> list[Finding]:
        return [
            fine(speed.WRITE, f"{write}", bytes_per_s=write),
            fine(speed.SYNC_TIME, f"{sync}", seconds=sync),
            fine("other", "x"),
        ]

    found = merged(speed.of_hosts({0: speeds(8, 0.5), 4: speeds(2, 0.1)}))
    assert [(finding.topic, finding.ranks) for finding in found] == [
        (speed.SYNC_TIME, (0,)),
        ("other", ()),
        (speed.WRITE, (4,)),
    ]
    assert "4.0 times" in found[2].fact
    assert "5.0 times" in found[0].fact
