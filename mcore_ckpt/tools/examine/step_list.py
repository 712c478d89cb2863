"""Lists the steps below a root with their size, age, state and place (below the root, in a remote store, or both)."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import ManifestSummary
from mcore_ckpt.checkpoint.provenance import RunParent
from mcore_ckpt.steps import choice
from mcore_ckpt.steps.branches import StepCommit
from mcore_ckpt.steps.choice import abandoned, last_commit, order_of
from mcore_ckpt.steps.listing import StepStatus, list_steps, newest_steps, read_tracker
from mcore_ckpt.steps.node_files import NodeFiles, as_in_folder
from mcore_ckpt.steps.owner import Life
from mcore_ckpt.steps.staged_saves import RunningSave, running_saves
from mcore_ckpt.steps.step_sizes import size_of
from mcore_ckpt.steps.trainer_watch import TrainerWatch
from mcore_ckpt.steps.worth import Worth, look_at_all
from mcore_ckpt.tools.examine.step_problems import life_of_saver

if TYPE_CHECKING:
    from mcore_ckpt.steps.remote_steps import RemoteStep, RemoteSteps

State = Literal["complete", "partial", "saving", "damaged", "incomplete"]
Place = Literal["local", "remote"]


@dataclass(frozen=True)
class ListedStep:
    """One step.

    Attributes:
        path: the step's folder; its URL if the step is only in the remote store.
        state: "complete", "partial" (of the fast tier: other nodes have the other files), "saving" (a process that may
            be alive still writes it), "damaged" (all roles have their manifests, but files are missing or cut) or
            "incomplete".
        reason: why the step is not complete; empty if it is complete. For a partial step, how many files are here.
        roles, declared: the committed roles, and all roles of the step, sorted.
        pinned: True if a pin keeps the step from retention.
        newest: True for the newest complete step of all. A partial step counts as complete, because the nodes together
            have all files.
        created: when the step was saved (ISO 8601, UTC); empty if no role is committed.
        places: where the step is complete: "local", "remote" or both. An incomplete step below the root has "local".
        of_nodes: for a partial step, which files are here. If several roles are partial, these are the files of the
            role with the smallest share of whole nodes (`NodeFiles.whole_nodes`).
        saves: the saves of this step that have not committed. Saves of a complete step are looked for only if the step
            is the newest, or if the list has only the last few steps.
        abandoned: True if the step is not in the branch of the last commit, because the training has gone back to an
            earlier step, or has started anew.
        commit, run: the step's commit number, and the id of its run; None if the manifests do not have them.
        parent: the step of another run with which this step's run began; None if the run is not a fork.
        metrics: the step's metrics, by name.
        dropped: the contents that retention has removed from one of its roles, such as "optimizer".
    """

    step: int
    path: Path | str
    state: State
    reason: str
    roles: tuple[str, ...]
    declared: tuple[str, ...]
    pinned: bool
    newest: bool
    nbytes: int
    created: str
    places: tuple[Place, ...]
    saves: tuple[RunningSave, ...] = ()
    of_nodes: NodeFiles | None = None
    abandoned: bool = False
    commit: int | None = None
    run: str | None = None
    parent: RunParent | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.path.name if isinstance(self.path, Path) else self.path.rpartition("/")[2]

    @property
    def counts(self) -> bool:
        """True for a complete or partial step: all roles are committed, and all files are here or on other nodes."""
        return self.state in ("complete", "partial")

    def age_s(self, now: datetime.datetime) -> float | None:
        """Returns the seconds since the step was saved; None if that is not known."""
        try:
            return max(0.0, (now - datetime.datetime.fromisoformat(self.created)).total_seconds())
        except (TypeError, ValueError):
            return None


@dataclass(frozen=True)
class StepList:
    """The steps of a root, sorted by number, the step that the tracker names, and the last commit of all."""

    root: Path
    steps: tuple[ListedStep, ...]
    tracker: int | None
    last: StepCommit | None = None

    def order_of(self, step: ListedStep) -> tuple[bool, int, int]:
        """Returns a key that sorts steps by their commits, abandoned steps first. `step` may be a deleted step."""
        number = step.step if step.commit is None else step.commit
        given_up = self.last is not None and bool(step.roles) and self.last.has_given_up(number)
        return not given_up, number, step.step


def step_list_of(root: Path, remote: str | None = None, last: int | None = None) -> StepList:
    """Returns the steps below a root. Reads only manifests, and the names and sizes of the other files.

    Args:
        root: the folder of the steps.
        remote: the URL of the remote store that the trainer uploads to; None to look only at the root.
        last: how many of the newest local steps to look at; None for all.

    Raises:
        OSError: the root cannot be read.
        RemoteError: the store does not answer.

    Example:
        >>> [step.state for step in step_list_of(Path("checkpoints")).steps]
        []
    """
    found_steps = as_in_folder(root, list_steps(root) if last is None else newest_steps(root, last))
    look_at_all(found_steps)
    statuses = {status.step: status for status in found_steps}
    saves: dict[int, list[RunningSave]] = {}
    for save in running_saves(root, _to_look_into(found_steps, last)):
        saves.setdefault(save.step, []).append(save)
    store = None if remote is None else _remote_steps(remote, root)
    there = {} if store is None else {step.step: step for step in store.steps()}
    look_at_all(there.values())
    everywhere: list[StepStatus | RemoteStep] = [*statuses.values(), *there.values()]
    newest, given_up = _newest(everywhere), abandoned(everywhere)
    everywhere_by = {each.step: each for each in everywhere if each.is_complete}
    found = []
    for number in sorted({*statuses, *saves, *there}):
        status = statuses.get(number)
        if status is None and number not in saves:
            assert store is not None
            listed = _remote_only(store, there[number], number == newest)
            found.append(_with_commit(listed, there[number].found.values(), number in given_up))
            continue
        # A step that is saved for the first time has no folder yet, but only a staging folder next to its place. Give
        # the step an empty status.
        status = status or StepStatus(number, file_names.step_dir(root, number), frozenset(), frozenset(), ())
        is_newer = newest is None or number > newest or order_of(status) > order_of(everywhere_by[newest])
        is_saving = _is_saving(status, saves.get(number, ()), root if is_newer else None)
        is_remote = number in there and there[number].is_complete
        listed = _local(status, tuple(saves.get(number, ())), is_saving, number == newest, is_remote)
        found.append(_with_commit(listed, status.says.values(), number in given_up))
    return StepList(root, tuple(found), read_tracker(root), last_commit(everywhere))


def _with_commit(step: ListedStep, heads: Iterable[ManifestSummary], abandoned: bool) -> ListedStep:
    numbers = [head.commit.number for head in heads if head.commit is not None]
    run = next((head.run for head in heads if head.run is not None), None)
    id, parent = (None, None) if run is None else (run.id, run.parent)
    return replace(step, abandoned=abandoned, commit=max(numbers, default=None), run=id, parent=parent)


def _to_look_into(statuses: Sequence[StepStatus], last: int | None) -> list[Path]:
    """Returns the steps in which a save may be under way.

    These are the incomplete steps, and the newest complete step, which a trainer may save again. Looking into thousands
    of other steps would double the calls to the file system, which may be slow.
    """
    newest = _newest(statuses)
    return [status.path for status in statuses if last is not None or not status.is_complete or status.step == newest]


def _newest(steps: Iterable[StepStatus | RemoteStep]) -> int | None:
    last = choice.newest(list(steps))
    return None if last is None else last.step


def _is_saving(status: StepStatus, saves: Sequence[RunningSave], root: Path | None) -> bool:
    """True if a process that may be alive is about to complete a step.

    `root` is None for a step that is older than the newest complete step, because trainers no longer save the missing
    roles of such a step.
    """
    if status.is_claimed or status.problems:
        return False
    if any(save.life is not Life.DEAD for save in saves):
        return True
    return root is not None and life_of_saver(status, TrainerWatch(root).lives()) is not Life.DEAD


def _local(
    status: StepStatus, saves: tuple[RunningSave, ...], is_saving: bool, is_newest: bool, is_remote: bool
) -> ListedStep:
    size = size_of(status)
    state: State = "saving" if is_saving else _state(status)
    partial = [held for held in size.of_nodes.values() if not held.is_whole] if status.is_complete else []
    least = min(partial, key=lambda held: held.whole_nodes / held.nodes, default=None)
    if least is not None:
        state = "partial"
    return ListedStep(
        step=status.step,
        path=status.path,
        state=state,
        reason=str(least or "") if status.is_complete else status.reason,
        roles=tuple(sorted(status.committed)),
        declared=tuple(sorted(status.declared)),
        pinned=status.pinned,
        newest=is_newest,
        nbytes=size.nbytes,
        created=size.created,
        places=("local", "remote") if is_remote else ("local",),
        saves=saves,
        of_nodes=least,
        metrics=status.metrics,
        dropped=tuple(sorted(status.dropped)),
    )


def _state(step: StepStatus | RemoteStep) -> State:
    states: dict[Worth, State] = {Worth.WHOLE: "complete", Worth.CLAIMED: "damaged", Worth.PARTIAL: "incomplete"}
    return states[step.worth]


def _remote_steps(url: str, root: Path) -> RemoteSteps:
    # fsspec is imported only here, because its import takes as long as a whole list without a remote store.
    from mcore_ckpt.io.store import Store
    from mcore_ckpt.steps.remote_steps import RemoteSteps

    return RemoteSteps(Store(url), root)


def _remote_only(store: RemoteSteps, step: RemoteStep, is_newest: bool) -> ListedStep:
    return ListedStep(
        step=step.step,
        path=store.store.url_of(file_names.step_name(step.step)),
        state=_state(step),
        reason="" if step.is_complete else step.reason,
        roles=tuple(sorted(step.committed)),
        declared=tuple(sorted(step.declared)),
        pinned=step.pinned,
        newest=is_newest,
        nbytes=sum(role.nbytes for role in step.found.values()),
        created=max((role.created for role in step.found.values()), default=""),
        places=("remote",),
        metrics=step.metrics,
        dropped=tuple(sorted(step.dropped)),
    )
