"""Lists the steps in a remote store, and reads its tracker.

Each attempt is uploaded into its own folder, the manifest last. Nothing is written to that folder afterwards. See
docs/format.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import ManifestSummary
from mcore_ckpt.checkpoint.reading import read_remote_manifest
from mcore_ckpt.errors import CheckpointCorruptError, RemoteError
from mcore_ckpt.io import limits, tuning
from mcore_ckpt.io.store import Store
from mcore_ckpt.io.threads import for_each
from mcore_ckpt.steps import runs
from mcore_ckpt.steps.runs import Ownership, RootRun, elsewhere, whose
from mcore_ckpt.steps.worth import Lack, Weighed, compare

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemoteRole(ManifestSummary):
    """The summary of an uploaded attempt's manifest, and the size of the attempt's files in bytes."""

    nbytes: int = 0


@dataclass(frozen=True)
class RemoteStep(Weighed):
    """One step in a remote store. The files are looked at when someone first asks whether the step is complete.

    Attributes:
        step: the step's number.
        found: for each role, the newest attempt that has its manifest and all files; if there is none, the newest
            attempt that has its manifest.
        others: the other attempts of each role: replaced attempts, and attempts without a manifest.
        pinned: true if the step is pinned in the store, so that retention keeps it there.
        look: lists the files that a role lacks. Raises RemoteError.
        is_shared: true if another run also has attempts in the step. Then the step is not deleted as a whole.
        replaced: the other attempts of this run that have a manifest.
        local_metrics: the metrics of the same step in the root, some of which may have been set after the upload.
    """

    step: int
    found: dict[str, RemoteRole] = field(default_factory=dict)
    others: dict[str, tuple[str, ...]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    pinned: bool = False
    look: Callable[[str], Lack | None] = field(default=lambda role: None, compare=False, repr=False)
    is_shared: bool = False
    replaced: tuple[RemoteRole, ...] = ()
    local_metrics: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics in the step's manifests. Metrics of the same step in the root override them."""
        return {**super().metrics, **self.local_metrics}

    @property
    def heads(self) -> list[RemoteRole]:
        """The summaries of the committed roles' manifests."""
        return list(self.found.values())

    @property
    def claims(self) -> list[RemoteRole]:
        """The summaries of all manifests, including the manifests of replaced attempts."""
        return [*self.found.values(), *self.replaced]

    @property
    def committed(self) -> frozenset[str]:
        """The roles that have an attempt with a manifest."""
        return frozenset(self.found)

    @property
    def declared(self) -> frozenset[str]:
        """The roles that the step consists of, according to the uploaded manifests."""
        return frozenset(role for found in self.found.values() for role in (*found.roles, found.role))

    @property
    def lacks(self) -> tuple[Lack, ...]:
        """The files that the uploaded manifests list and the store lacks."""
        return tuple(lack for role in sorted(self.found) if (lack := self.look(role)) is not None)

    def has(self, role: str) -> bool:
        """True if all files of a role are in the store."""
        return role in self.found and self.look(role) is None

    @property
    def reason(self) -> str:
        """Why the step is not complete."""
        if not self.is_claimed:
            text = self.why_missing("uploaded") or "no manifest in it"
            return "; ".join(self.problems) or f"{file_names.step_name(self.step)}: {text}"
        return "; ".join(map(str, self.lacks))


class RemoteSteps:
    """The steps of a root's run, or of all runs, below a folder of a remote store. Any thread may call its methods."""

    def __init__(self, store: Store, root: Path | None = None) -> None:
        self.store, self._root = store, root
        self._claimed: RootRun | None = None
        self._manifests: dict[str, RemoteRole] = {}

    def steps(self) -> list[RemoteStep]:
        """Returns all steps, sorted by number. Raises RemoteError."""
        numbers = {
            step
            for name in self.store.names("")
            if (step := file_names.parse_step(name)) is not None and name == file_names.step_name(step)
        }
        found, own = list[RemoteStep](), self.ownership()
        for_each(
            sorted(numbers), lambda step: found.append(self._step(step, own)), min(tuning.REMOTE_THREADS, len(numbers))
        )
        self._forget_all_but(found)
        return sorted(found, key=lambda step: step.step)

    def _forget_all_but(self, steps: Iterable[RemoteStep]) -> None:
        """Forgets the manifests of attempts that are gone, because a long run uploads thousands of attempts."""
        there = {
            file_names.remote_dir(step.step, role, attempt)
            for step in steps
            for role, others in step.others.items()
            for attempt in (*others, *([step.found[role].attempt] if role in step.found else []))
        }
        self._manifests = {key: known for key, known in dict(self._manifests).items() if key in there}

    def step(self, step: int, of_any_run: bool = False) -> RemoteStep:
        """Returns one step; a step without roles if the store does not have it. Raises RemoteError.

        With `of_any_run`, also returns a step that has only checkpoints of other runs.
        """
        found = self._step(step, self.ownership())
        if not of_any_run or found.found or not found.is_shared:
            return found
        for problem in found.problems:
            logger.warning("step %d is loaded because it was asked for by its number: %s", step, problem)
        return self._step(step, Ownership())

    def _step(self, step: int, own: Ownership) -> RemoteStep:
        found: dict[str, RemoteRole] = {}
        others: dict[str, tuple[str, ...]] = {}
        replaced: list[RemoteRole] = []
        problems: list[str] = []
        is_shared = False
        names = self.store.names(file_names.step_name(step))
        for role in filter(file_names.is_role, names):
            attempts = list(filter(file_names.is_attempt, self.store.names(f"{file_names.step_name(step)}/{role}")))
            heads = [head for attempt in attempts if (head := self._read_role(step, role, attempt, problems))]
            foreign = {head.attempt: head.run or own.unsigned for head in heads if not own.owns(head)}
            is_shared = is_shared or bool(foreign)
            for attempt, run in foreign.items():
                key = file_names.remote_dir(step, role, attempt)
                problems.append(f"{self.store.url_of(key)}: {whose(run)}")
            heads = [head for head in heads if head.attempt not in foreign]
            newest = self._newest(heads)
            replaced += [head for head in heads if head != newest]
            if newest is not None:
                found[role] = newest
            used = {*foreign, newest and newest.attempt}
            others[role] = tuple(attempt for attempt in attempts if attempt not in used)
        look, is_pinned = cache(lambda role: self._lack(_key(found[role]))), file_names.PINNED_FILE in names
        return RemoteStep(step, found, others, tuple(problems), is_pinned, look, is_shared, tuple(replaced))

    def _newest(self, heads: Sequence[RemoteRole]) -> RemoteRole | None:
        """Returns the newest attempt that has all its files.

        If no attempt has all its files, or there is only one attempt, returns the newest attempt.
        """
        ordered = sorted(heads, key=_order, reverse=True)
        looked_at = ordered if len(ordered) > 1 else ()
        return next((head for head in looked_at if self._lack(_key(head)) is None), next(iter(ordered), None))

    def _lack(self, key: str) -> Lack | None:
        """Compares an attempt's manifest with a listing of its files. Raises RemoteError."""
        try:
            files = read_remote_manifest(self.store, key).files
        except (FileNotFoundError, CheckpointCorruptError) as error:
            return Lack(self.store.url_of(key), f"its manifest cannot be read any more: {error}")
        return compare(self.store.url_of(key), {file.path: file.size for file in files}, self.store.sizes(key))

    def _read_role(self, step: int, role: str, attempt: str, problems: list[str]) -> RemoteRole | None:
        key = file_names.remote_dir(step, role, attempt)
        if file_names.MANIFEST_FILE not in self.store.names(key):
            return None
        known = self._manifests.get(key)
        if known is None:
            try:
                manifest = read_remote_manifest(self.store, key)
            except FileNotFoundError:
                return None
            except CheckpointCorruptError as error:
                problems.append(str(error))
                return None
            if (manifest.step, manifest.role, manifest.attempt) != (step, role, attempt):
                problems.append(f"{self.store.url_of(key)}: its manifest is of {manifest.role} at step {manifest.step}")
                return None
            # The result can be cached, because an attempt never changes once it has a manifest. The manifest of a large
            # run takes long to read.
            known = RemoteRole(**vars(manifest.head), nbytes=manifest.nbytes)
            self._manifests[key] = known
        return known

    def read_tracker(self) -> int | None:
        """Returns the step that the tracker names; None if there is no tracker or it is damaged. Raises RemoteError."""
        try:
            data = self.store.read_all(file_names.TRACKER_FILE, limits.SMALL_BYTES)
        except (FileNotFoundError, CheckpointCorruptError):
            return None
        return file_names.parse_tracker(data.decode("ascii", "replace"))

    def ownership(self) -> Ownership:
        """Tells which steps of the store belong to the root. Raises RemoteError and OSError."""
        return Ownership() if self._root is None else elsewhere(self._root, claimed=self.claimed())

    def claimed(self) -> RootRun | None:
        """Returns the run that the store belongs to; None if no run has claimed the store. Raises RemoteError."""
        if self._claimed is None:
            with suppress(FileNotFoundError, CheckpointCorruptError):
                self._claimed = runs.decode(self.store.read_all(file_names.RUN_FILE, limits.SMALL_BYTES))
        return self._claimed

    def claim(self, own: RootRun) -> None:
        """Claims the store for a root's run.

        Raises OtherRunError if the store belongs to another run, and RemoteError.
        """
        if self.claimed() is None:
            # If the store's `.run.json` is lost, the checkpoints in the store show which run the store belongs to. The
            # file is read again below, because two runs may write the file at once.
            there = [head for step in RemoteSteps(self.store).steps() for head in step.found.values() if head.run]
            text = runs.encode(_claimant(own, there))
            self.store.persist("claiming", lambda: self.store.replace(file_names.RUN_FILE, text))
            self._claimed = None
        claimed = self.claimed()
        if claimed is not None and claimed.run.id != own.run.id:
            raise OtherRunError(
                f"{self.store.url} belongs to another run ({claimed.run}), so this one, {own.run}, neither uploads to "
                "it nor deletes from it: use another remote for each run"
            )

    def delete(self, key: str) -> None:
        """Removes a step, or an attempt of a role, from the store. Raises RemoteError."""
        self.store.delete(key, first=file_names.MANIFEST_FILE)


class OtherRunError(RemoteError):
    """The store belongs to another run."""


def _claimant(own: RootRun, there: Sequence[RemoteRole]) -> RootRun:
    """Returns the run that an unclaimed store with these checkpoints belongs to.

    Steps that a run has inherited can be in the stores of two runs. So these steps count only if the store also has a
    step of the run itself.
    """
    is_own = any(head.run and head.run.id == own.run.id for head in there)
    ours = Ownership(own if is_own else RootRun(own.run))
    return next((RootRun(head.run) for head in there if head.run and not ours.owns(head)), own)


def _order(role: RemoteRole) -> tuple[int, str, str]:
    # A clock decides only between checkpoints that have no commit numbers.
    return role.number, role.created, role.attempt


def _key(role: RemoteRole) -> str:
    return file_names.remote_dir(role.step, role.role, role.attempt)
