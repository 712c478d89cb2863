"""Examines a root: one process alone, or all ranks of a job together.

All ranks look at each other's files. One rank of each host and mount tries the file system, because the abilities of a
file system depend on how the host has mounted it. Rank 0 collects all findings.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from mcore_ckpt.errors import CheckpointError, InvalidArgumentError
from mcore_ckpt.io.mounts import Mount, mount_of
from mcore_ckpt.ranks.hosts import this_host
from mcore_ckpt.ranks.rounds import Agreement, Record, decide
from mcore_ckpt.steps.commit import remove_folder
from mcore_ckpt.tools.examine.doctor import between_hosts, speed
from mcore_ckpt.tools.examine.doctor.findings import Finding, Severity, fine, merged, worst
from mcore_ckpt.tools.examine.doctor.free_space import FREE_SPACE, finding_of_space, free_bytes, free_space
from mcore_ckpt.tools.examine.doctor.known import known_of
from mcore_ckpt.tools.examine.doctor.probes import has_direct, try_all
from mcore_ckpt.tools.examine.doctor.stored_replicas import stored_replicas
from mcore_ckpt.tools.examine.doctor.trial import owner_of, trial_folder, unusable
from mcore_ckpt.tools.examine.progress import Progress, no_progress

RANKS = "ranks"
# How many seconds longer a rank waits for the other ranks if they measure speeds.
_MEASURING_S = 180.0
_TOPIC = "examining the file system"


@dataclass(frozen=True)
class Report:
    """The findings of the doctor about a root, in the order of the examination.

    `mount` is the file system of rank 0; None if it is unknown. `hosts` has the host of each rank, or only rank 0's
    host if not all ranks joined.
    """

    root: Path
    mount: Mount | None
    ranks: int
    hosts: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def is_usable(self) -> bool:
        """True if checkpoints can be saved here."""
        return worst(self.findings) is not Severity.BAD


def examine(
    root: Path,
    agreement: Agreement,
    megabytes: int,
    missing: CheckpointError | None = None,
    progress: Progress = no_progress,
) -> Report | None:
    """Examines an existing root on all ranks. Every rank must call this function with the same arguments.

    Args:
        megabytes: the size of the files with which the speed is measured; 0 to measure only small files. The files are
            smaller if little space is free.
        missing: the error that keeps the other ranks of the job from taking part; None if all ranks take part.
        progress: called while this rank measures the speed, with the number of bytes done and the number of all bytes.

    Returns the report on rank 0, None on the other ranks. The report names a rank that is missing or fails.

    Raises:
        InvalidArgumentError: no rank sees the root.
        CheckpointError: a rank is missing or has failed. Rank 0 reports the error instead of raising it.
    """
    examination = _Examination(root, agreement, megabytes, progress)
    try:
        examination.run()
    except InvalidArgumentError:
        raise
    except CheckpointError as error:
        if not agreement.is_coordinator:
            raise
        examination.give_up(error)
    if missing is not None:
        examination.give_up(missing)
    return examination.report() if agreement.is_coordinator else None


class _Examination:
    """One rank's part in the examination. Rank 0's part also collects the findings of the other ranks."""

    def __init__(self, root: Path, agreement: Agreement, megabytes: int, progress: Progress) -> None:
        self._root = root
        self._progress = progress
        self._agreement = agreement
        self._megabytes = megabytes
        self._mount: Mount | None = None
        with suppress(OSError):
            self._mount = mount_of(root)
        self._seats: Sequence[Record] = ()
        self._trial: Path | None = None
        self._error: OSError | None = None
        self._own: list[Finding] | None = None
        self._together: list[Finding] = []
        self._by_leader: dict[int, list[Finding]] = {}

    def run(self) -> None:
        """Takes part in all rounds. Raises CheckpointError if the ranks cannot finish together."""
        with ExitStack() as stack:
            if self._agreement.is_coordinator:
                self._open_trial(stack)
            told = self._meet()
            shared = None if told["trial"] is None else self._root / told["trial"]
            apart = frozenset[int]()
            if shared is not None and self._agreement.world_size > 1:
                # If rank 0 dies, the other ranks remove rank 0's trial folder.
                stack.push(lambda kind, *_: remove_folder(shared) if kind is not None else None)
                view = between_hosts.look(self._agreement, shared)
                self._together += view.findings
                apart = view.apart
            self._try(stack, told["leaders"], None if self._agreement.rank in apart else shared)
            if shared is not None:
                leaders = [rank for rank in told["leaders"] if rank not in apart]
                self._together += between_hosts.contend(self._agreement, shared, leaders)
            self._together += between_hosts.compare_clocks(self._agreement, told["leaders"])

    def give_up(self, error: CheckpointError) -> None:
        """Examines the root alone, unless this rank has examined it already.

        Adds the finding that the ranks did not finish.
        """
        if self._own is None:
            with ExitStack() as stack:
                self._open_trial(stack)
                self._own = self._examine_here()
        self._by_leader = self._by_leader or {0: self._own}
        advice = (
            "look at the log of the rank that the message names; if this rank was only slow, use a larger --timeout"
        )
        self._together.append(
            Finding(RANKS, Severity.BAD, str(error), "a save would fail in the same way, on all ranks", advice)
        )

    def report(self) -> Report:
        hosts = tuple(seat["host"] for seat in self._seats) or (socket.gethostname(),)
        findings = merged(speed.of_hosts(self._by_leader))
        findings = [*self._ranks(), *self._together, *findings, *self._space(), *stored_replicas(self._root)]
        return Report(self._root, self._mount, self._agreement.world_size, hosts, tuple(findings))

    def _ranks(self) -> list[Finding]:
        if len(self._seats) < 2:
            return []
        views = len({repr(seat["view"]) for seat in self._seats})
        if views == 1:
            text = "which all see the root through one mount; one rank has tried it"
        else:
            text = f"which see the root through {views} mounts or hosts; one rank has tried each"
        return [fine(RANKS, f"{len(self._seats)} ranks, {text}")]

    def _meet(self) -> Record:
        """Tells all ranks the name of rank 0's trial folder, and which ranks try the file system for their hosts."""

        def work() -> Record:
            return {
                "host": socket.gethostname(),
                "view": [this_host(), None if self._mount is None else asdict(self._mount)],
                "exists": self._root.is_dir(),
            }

        def combine(seats: Sequence[Record]) -> Record:
            if not any(seat["exists"] for seat in seats):
                raise InvalidArgumentError(
                    f"{self._root}: there is no such folder: make it first, or name another folder"
                )
            self._seats = seats
            leaders: dict[str, int] = {}
            for rank, seat in enumerate(seats):
                leaders.setdefault(repr(seat["view"]), rank)
            missing = [rank for rank, seat in enumerate(seats) if not seat["exists"]]
            if missing:
                fact, cost = f"{self._root} does not exist on these ranks", "the first save fails on all ranks"
                advice = "mount the same shared file system at the same path on all hosts"
                found = Finding(between_hosts.ONE, Severity.BAD, fact, cost, advice, ranks=tuple(missing))
                self._together.append(found)
            return {"trial": None if self._trial is None else self._trial.name, "leaders": sorted(leaders.values())}

        return decide(self._agreement, _TOPIC, work, combine)

    def _open_trial(self, stack: ExitStack) -> None:
        self._trial, self._error = None, None
        try:
            self._trial = stack.enter_context(trial_folder(self._root))
        except OSError as error:
            self._error = error

    def _examine_here(self) -> list[Finding]:
        """Examines the root from this rank alone."""
        findings = known_of(self._mount)
        try:
            if self._error is not None:
                raise self._error
            assert self._trial is not None, "a rank without a trial folder has an error"
            self._try_in(self._trial, findings)
        except OSError as error:
            findings.append(unusable(self._root, error))
        return findings

    def _try_in(self, trial: Path, findings: list[Finding]) -> None:
        """Adds this rank's findings in a trial folder to `findings`. Raises OSError if the folder cannot be used."""
        findings.append(owner_of(self._root, trial))
        own = trial / f"rank-{self._agreement.rank}"
        own.mkdir()
        findings += try_all(own, self._mount)
        if worst(findings) is Severity.BAD:
            return
        try:
            findings += speed.measure(own, self._measured_bytes(), has_direct(findings), self._progress)
        except (OSError, CheckpointError) as failure:
            advice = "look at the system's log, or use another file system"
            findings.append(Finding(speed.WRITE, Severity.BAD, f"failed: {failure}", "saves fail", advice))

    def _space(self) -> list[Finding]:
        try:
            return [finding_of_space(free_space(self._root))]
        except OSError as error:
            advice = "check that `ls` and `df` work on this folder"
            return [Finding(FREE_SPACE, Severity.BAD, f"cannot be read: {error}", "", advice)]

    def _measured_bytes(self) -> int:
        """Returns the size of each file for measuring the speed.

        Two such files take at most an eighth of the free space.
        """
        free = free_bytes(self._root)
        most = self._megabytes * 10**6 if free is None else min(self._megabytes * 10**6, free // 16)
        return most >> 20 << 20

    def _try(self, stack: ExitStack, leaders: Sequence[int], shared: Path | None) -> None:
        """Lets every leader try the file system, if possible in rank 0's folder. Rank 0 receives all findings."""

        def work() -> Record:
            if self._agreement.rank not in leaders:
                return {"findings": []}
            if not self._agreement.is_coordinator:
                self._trial = shared
                if shared is None:
                    self._open_trial(stack)
            self._own = self._examine_here()
            return {"findings": [finding.as_record() for finding in self._own]}

        def combine(records: Sequence[Record]) -> Record:
            self._by_leader = {rank: [Finding.of(found) for found in records[rank]["findings"]] for rank in leaders}
            return {}

        timeout_s = self._agreement.timeout_s + _MEASURING_S
        decide(self._agreement, "trying the file system", work, combine, timeout_s=timeout_s)
