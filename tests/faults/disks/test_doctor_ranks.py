"""The doctor on several ranks: two mount namespaces or two mounts stand for hosts that see different things."""

import os
import signal
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

import pytest
import torch.distributed as dist

from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.ranks.meeting import rendezvous_at
from mcore_ckpt.tools.examine.doctor import between_hosts, examine, known, speed
from mcore_ckpt.tools.examine.doctor.findings import Finding, Severity
from tests.faults.disks.test_one_file_system import see_another_disk
from tests.support.mounting import shown_by

TIMEOUT_S = 30.0
SHORT_S = 2.0  # for the tests in which a rank is dead
NOBODY = 65534
SKIPPED = 77
UNHEARD = 3

Prepare = Callable[[], object]


def run_rank(rank: int, world: int, port: int, root: Path, prepare: Prepare, timeout_s: float) -> NoReturn:
    """What rank `rank` of a job does. It ends with UNHEARD if it has raised because another rank is missing."""
    status = 1
    try:
        try:
            prepare()
        except PermissionError:
            status = SKIPPED
            raise
        store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
        agreement = rendezvous_at(store, rank, world, "doctor", TIMEOUT_S, "test")
        agreement._timeout_s = timeout_s
        assert examine.examine(root, agreement, 0) is None
        status = 0
    except CheckpointError:
        status = UNHEARD
    finally:
        os._exit(status)


def examined(
    root: Path, others: Mapping[int, Prepare], roots: Mapping[int, Path] | None = None, timeout_s: float = TIMEOUT_S
) -> tuple[examine.Report, dict[int, int]]:
    """Runs the doctor with this process as rank 0. Returns its report, and how the other ranks have ended."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    pids, world = {}, len(others) + 1
    for rank, prepare in others.items():
        pids[rank] = os.fork()
        if pids[rank] == 0:
            run_rank(rank, world, store.port, (roots or {}).get(rank, root), prepare, timeout_s)
    try:
        agreement = rendezvous_at(store, 0, world, "doctor", TIMEOUT_S, "test")
        agreement._timeout_s = timeout_s
        report = examine.examine(root, agreement, 0)
    finally:
        ends = {rank: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for rank, pid in pids.items()}
    if SKIPPED in ends.values():
        pytest.skip("no mount namespaces here")
    assert report is not None
    return report, ends


def nothing() -> None:
    pass


def finding_of(report: examine.Report, topic: str) -> Finding:
    (finding,) = (finding for finding in report.findings if finding.topic == topic)
    return finding


def known_of(report: examine.Report, rank: int) -> str:
    findings = (finding for finding in report.findings if finding.topic == known.FILE_SYSTEM)
    return next(finding.fact for finding in findings if rank in finding.ranks)


@pytest.fixture(autouse=True)
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(between_hosts, "_LOOK_S", 1.0)


def test_ranks_of_one_host(tmp_path: Path) -> None:
    report, ends = examined(tmp_path, {1: nothing, 2: nothing})
    assert report.is_usable
    assert (report.ranks, len(report.hosts)) == (3, 3)
    assert finding_of(report, between_hosts.ONE).severity is Severity.FINE
    assert ends == {1: 0, 2: 0}
    assert list(tmp_path.iterdir()) == []


def test_a_rank_with_a_disk_of_its_own(tmp_path: Path) -> None:
    report, ends = examined(tmp_path, {1: nothing, 2: lambda: see_another_disk(tmp_path)})
    finding = finding_of(report, between_hosts.ONE)
    assert finding.severity is Severity.BAD
    assert finding.ranks == (2,)
    assert "do not see rank 0's file" in finding.fact
    assert not report.is_usable
    # Its own disk was examined, too.
    assert "in memory" in known_of(report, 2)
    assert known_of(report, 0) != known_of(report, 2)
    assert ends == {1: 0, 2: 0}
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_shows_only_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on NFS, which keeps names for some seconds."""
    path = tmp_path / "word-1"
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            path.write_bytes(b"word")

    monkeypatch.setattr(time, "sleep", pause)
    assert between_hosts._seconds_until(path, b"word", time.monotonic() + TIMEOUT_S) is not None
    assert len(pauses) == 2


def test_a_rank_without_the_folder(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    report, _ = examined(tmp_path / "root", {1: nothing}, {1: tmp_path / "missing"})
    assert not report.is_usable
    facts = [finding.fact for finding in report.findings if finding.ranks == (1,)]
    assert any("does not exist on these ranks" in fact for fact in facts)
    assert list((tmp_path / "root").iterdir()) == []


def test_a_rank_that_cannot_write(tmp_path: Path) -> None:
    """Another user, as where the server maps users differently on two hosts."""
    for folder in (tmp_path, *tmp_path.parents[:3]):
        if not folder.stat().st_mode & stat.S_IXOTH:  # pytest's own folders; /tmp must stay as it is
            folder.chmod(0o755)
    report, _ = examined(tmp_path, {1: lambda: os.setuid(NOBODY)})
    finding = finding_of(report, between_hosts.ONE)
    assert finding.ranks == (1,)
    assert "Permission denied" in finding.fact
    assert not report.is_usable


@pytest.mark.full
def test_locks_that_reach_only_one_mount(tmp_path: Path) -> None:
    """Two FUSE mounts of one folder keep their locks apart, as hosts do with NFS and local_lock=all."""
    (tmp_path / "folder").mkdir()
    with (
        shown_by("bindfs", tmp_path / "first", tmp_path / "folder") as first,
        shown_by("bindfs", tmp_path / "second", tmp_path / "folder") as second,
    ):
        report, _ = examined(first, {1: nothing}, {1: second})
        assert list(first.iterdir()) == []
    assert finding_of(report, between_hosts.ONE).severity is Severity.FINE
    locks = finding_of(report, between_hosts.FLOCK_BETWEEN)
    assert (locks.severity, locks.ranks) == (Severity.EMULATED, (1,))
    assert "not seen" in locks.fact
    assert finding_of(report, between_hosts.EXCLUSIVE_BETWEEN).severity is Severity.FINE
    assert report.is_usable


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0, 0.0])
def test_clocks(ahead_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def turn_the_clock() -> None:
        now = time.time
        monkeypatch.setattr(between_hosts.time, "time", lambda: now() + ahead_s)
        monkeypatch.setattr(examine, "this_host", lambda: "another host")

    report, _ = examined(tmp_path, {1: turn_the_clock})
    clocks = finding_of(report, between_hosts.CLOCKS)
    assert finding_of(report, between_hosts.FLOCK_BETWEEN).severity is Severity.FINE
    assert report.is_usable
    if ahead_s:
        side = "ahead of" if ahead_s > 0 else "behind"
        assert clocks.severity is Severity.RISK
        assert f"s {side} rank 0's" in clocks.fact
        assert clocks.values["most_s"] == pytest.approx(3600, abs=clocks.values["error_s"] + 0.01)
    else:
        assert clocks.severity is Severity.FINE


def test_a_file_of_the_same_name_is_not_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "word").write_bytes(b"another word")
    assert between_hosts._seconds_until(tmp_path / "word", b"word", time.monotonic()) is None
    (tmp_path / "word").write_bytes(b"word")
    assert between_hosts._seconds_until(tmp_path / "word", b"word", time.monotonic()) is not None


def test_files_that_are_seen_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a host caches that there is no such file."""
    monkeypatch.setattr(between_hosts, "_LATE_S", -1.0)
    report, _ = examined(tmp_path, {1: nothing})
    assert finding_of(report, between_hosts.DELAY).severity is Severity.SLOW
    assert report.is_usable


def test_a_dead_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies while all measure. The others report it by the deadline, and rank 0 what it has found itself."""
    monkeypatch.setattr(examine, "_MEASURING_S", 0.0)

    def die() -> None:
        monkeypatch.setattr(between_hosts, "look", lambda *args: os.kill(os.getpid(), signal.SIGKILL))

    report, ends = examined(tmp_path, {1: nothing, 2: die}, timeout_s=SHORT_S)
    assert not report.is_usable
    (missing,) = (finding for finding in report.findings if finding.severity is Severity.BAD)
    assert missing.topic == examine.RANKS
    assert "no word from rank 2" in missing.fact
    assert speed.SMALL_FILES in {finding.topic for finding in report.findings}
    assert ends == {1: UNHEARD, 2: -signal.SIGKILL}
    assert list(tmp_path.iterdir()) == []


def test_rank_0_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others remove its folder."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]

    def die() -> None:
        monkeypatch.setattr(between_hosts, "look", lambda *args: os.kill(os.getpid(), signal.SIGKILL))

    pid = os.fork()
    if pid == 0:
        run_rank(0, 2, store.port, tmp_path, die, SHORT_S)
    agreement = rendezvous_at(store, 1, 2, "doctor", TIMEOUT_S, "test")
    agreement._timeout_s = SHORT_S
    with pytest.raises(CheckpointError, match="rank 0"):
        examine.examine(tmp_path, agreement, 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
