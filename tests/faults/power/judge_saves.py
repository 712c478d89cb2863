"""Opens states of a disk that lost power during recorded_saves.py, as a trainer that starts again would.

Of each state: `list_steps`, `verify` and `recover` must find the newest step that the trainer was told of, or the one
that was being saved, whole; and the next save must succeed and leave nothing behind.
"""

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mcore_ckpt import CheckpointConfig, CheckpointManager, SavedPart
from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.recover import recover
from mcore_ckpt.steps import tracker
from mcore_ckpt.steps.listing import StepStatus, complete_steps, list_steps
from mcore_ckpt.steps.runs import read_root_run
from mcore_ckpt.tools.examine.verify import verify
from tests.distributed.snapshot import poison, snapshot
from tests.distributed.training import Layout, Training, build, parallel
from tests.faults.power.crash_states import Crashes, CrashState, empty
from tests.faults.power.reboot import boot
from tests.faults.power.recorded_saves import HIDDEN, ROOT
from tests.faults.power.trace_of_files import Mark
from tests.support.checkpoints import remains
from tests.support.lives import digest
from tests.support.step_parts import PartsOfStep

ALONE = Layout(1, hidden_size=HIDDEN, precision="bf16")
ROLE = "actor"
# The step that has files of another program.
FOREIGN_STEP = 3


@dataclass(frozen=True)
class Expected:
    """What the marks before a moment allow.

    Attributes:
        keeps: the steps that must be there.
        attempts: the attempt that each step must have.
        acked: the step that was saved last.
        pinned, pinning: the steps that are pinned, and those that may be or not.
        foreign: files of another program, which must stay in FOREIGN_STEP.
        next_keeps, next_attempts: the same if the save that was under way has been committed; None without one.
    """

    keeps: frozenset[int]
    attempts: dict[int, str]
    acked: int | None = None
    pinned: frozenset[int] = frozenset()
    pinning: frozenset[int] = frozenset()
    foreign: tuple[str, ...] = ()
    saving: int | None = None
    next_keeps: frozenset[int] = frozenset()
    next_attempts: dict[int, str] = field(default_factory=dict)


def expected(marks: Collection[str], later: Collection[str]) -> Expected:
    """Reads marks: those before power was lost, and those after, which tell what a save under way would have become."""
    found = Expected(frozenset(), {})
    for line in marks:
        said = json.loads(line)
        if "acked" in said:
            attempts = found.attempts | {said["acked"]: said["attempt"]}
            found = replace(found, acked=said["acked"], attempts=attempts, saving=None)
        found = replace(
            found,
            keeps=frozenset(said.get("keeps", found.keeps)),
            saving=said.get("begun", found.saving),
            pinned=frozenset(said.get("pinned", found.pinned)),
            pinning=frozenset(said.get("pinning", ())),
            foreign=tuple(said.get("foreign", found.foreign)),
        )
    if found.saving is None:
        return found
    acked = next((said for said in map(json.loads, later) if "acked" in said), None)
    if acked is None:
        return found  # this save was never to succeed
    return replace(
        found,
        next_keeps=frozenset(acked["keeps"]),
        next_attempts=found.attempts | {found.saving: acked["attempt"]},
    )


class Judge:
    """Judges states of one recording.

    Args:
        crashes: the recording's states.
        folder: an empty folder, in which states are made.
        training: what is loaded into, of one rank.
    """

    def __init__(self, crashes: Crashes, folder: Path, training: Training) -> None:
        self._crashes = crashes
        self._folder = folder
        self._training = training
        self._marks = [event for event in crashes.trace.events if isinstance(event, Mark)]
        self._digests: dict[str, str] = {}
        self._parts: list[tuple[str, bytes]] = []
        for event in self._marks:
            said = json.loads(event.text)
            if "acked" in said and said["attempt"] not in self._digests:
                self._sound = (CrashState(event.number, self._all_before(event.number)), said)
                self._learn(*self._sound)

    @property
    def root(self) -> Path:
        return self._folder / ROOT

    def problems(self, state: CrashState) -> list[str]:
        """Makes a state and opens it. Returns what is wrong with it."""
        after = [event.text for event in self._marks if event.number >= state.at]
        self._make(state)
        try:
            found = list(self._problems(expected(self._crashes.marks(state), after)))
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        if found:
            self._learn(*self._sound)  # the state that was loaded may be anything
        return found

    def _problems(self, allowed: Expected) -> Iterator[str]:
        before = self._complete()
        if strangers := self._strangers(before):
            yield f"the root does not say that steps {strangers} are of its own run"
        for role in verify(self.root).roles if before else ():
            for damage in role.damages:
                yield f"{role.path.relative_to(self._folder)}: {damage}"
        tracked = tracker.read_tracker(self.root)
        if tracked not in {allowed.acked, allowed.saving, None} or tracked not in {*before, allowed.acked}:
            yield f"the tracker names {tracked}"
        with self._manager() as manager:
            found = self._complete()
            if found != before:
                yield f"the start has made {found} of {before}"
            yield from _differences(found, allowed)
            pinned = {status.step for status in list_steps(self.root) if status.pinned and status.step in found}
            if (pinned ^ allowed.pinned) - allowed.pinning:
                yield f"steps {pinned} are pinned"
            for status in list_steps(self.root, FOREIGN_STEP):
                for name in allowed.foreign:
                    # What can be linked, files, are in the role's folder at all times.
                    places = [status.role_dir(ROLE)] if "/" not in name else _places(status)
                    if not any((folder / name).is_file() for folder in places):
                        yield f"{name} is lost"
            newest = max(found, default=None)
            if found:
                poison(self._training)
            recovery = recover(manager)
            if recovery.step != newest or recovery.skipped:
                yield f"step {recovery.step} was loaded, not {newest}; skipped: {recovery.skipped}"
            elif newest is not None and self._digest() != self._digests[found[newest]]:
                yield f"step {newest} was loaded with other contents"
            following = max((status.step for status in list_steps(self.root)), default=0) + 1
            manager.save(following).wait()
            manager.wait()
        after = sorted(self._complete())
        if after != [*sorted(found), following]:
            yield f"after the next save there are the steps {after}"
        if tracker.read_tracker(self.root) != following:
            yield f"after the next save the tracker names {tracker.read_tracker(self.root)}"
        if left := remains(self.root):
            yield f"after the next save there are leftovers: {left}"

    def _complete(self) -> dict[int, str]:
        """The attempt of each complete step."""
        statuses = complete_steps(self.root)
        return {status.step: read_manifest(status.role_dir(ROLE)).attempt for status in statuses}

    def _strangers(self, steps: Collection[int]) -> list[int]:
        """The steps whose run the root has forgotten. It would take the steps of other runs for its own, too.

        The next save finds the run in the manifests, but a load and a deletion may come before.
        """
        known = read_root_run(self.root)
        runs = {step: read_manifest(file_names.step_dir(self.root, step) / ROLE).run for step in steps}
        return [step for step, run in runs.items() if known is None or run is None or run.id != known.run.id]

    def _make(self, state: CrashState) -> None:
        empty(self._folder)
        self._crashes.write(state, self._folder)

    def _learn(self, state: CrashState, said: dict[str, Any]) -> None:
        self._make(state)
        poison(self._training)
        with self._manager() as manager:
            manager.load(step=said["acked"])
        self._digests[said["attempt"]] = self._digest()

    def _all_before(self, at: int) -> frozenset[int]:
        return frozenset(change.number for change in self._crashes.changes if change.number < at)

    def _digest(self) -> str:
        return f"{digest(snapshot(self._training))} {sorted(self._parts)}"

    def _keep(self, part: SavedPart) -> None:
        for rank in part.ranks:
            files = (path for path in part.folder(rank).rglob("*") if path.is_file())
            self._parts += [(f"{part.name} {rank} {path.name}", path.read_bytes()) for path in files]

    @contextlib.contextmanager
    def _manager(self) -> Iterator[CheckpointManager]:
        training = self._training
        manager = CheckpointManager(
            self.root, training.model, training.optimizer, training.scheduler, config=CheckpointConfig(timeout_s=60.0)
        )
        self._parts = []
        for name in PartsOfStep.NAMES:
            manager.attach(name, load=self._keep, optional=True)
        try:
            yield manager
        finally:
            manager.close()


def _differences(found: Mapping[int, str], allowed: Expected) -> Iterator[str]:
    """Says which steps are there that must not be, or the other way round. `found` has their attempts."""
    keeps, attempts = allowed.keeps, allowed.attempts
    if allowed.saving is not None and found.get(allowed.saving) == allowed.next_attempts[allowed.saving]:
        keeps, attempts = allowed.next_keeps, allowed.next_attempts
    if missing := keeps - found.keys():
        yield f"steps {sorted(missing)} are lost; there are {sorted(found)}"
    for step, attempt in found.items():
        if attempts.get(step) != attempt:
            yield f"step {step} is of another save"


def _places(status: StepStatus) -> Iterator[Path]:
    """Where a folder of another program may be: with the role, or where it was, from which the next save moves it."""
    yield status.role_dir(ROLE)
    for entry in status.path.iterdir():
        if file_names.parse_work_dir(entry.name) is not None:
            yield entry


@contextlib.contextmanager
def alone() -> Iterator[Training]:
    """A training of this process, which `Judge` needs."""
    boot()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    with parallel(ALONE):
        yield build(ALONE, seed=2)
    dist.destroy_process_group()
