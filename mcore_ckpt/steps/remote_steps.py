"""Lists the steps in a remote store, and reads its tracker.

Each attempt of a save is uploaded into a folder of its own, its manifest last; nothing is written there again. See
docs/format.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.reading import read_remote_manifest
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.io import limits, tuning
from mcore_ckpt.io.store import Store
from mcore_ckpt.io.threads import for_each


@dataclass(frozen=True)
class RemoteRole:
    """The newest attempt of a role at a step that is there whole."""

    attempt: str
    roles: tuple[str, ...]
    created: str


@dataclass(frozen=True)
class RemoteStep:
    """One step of a remote root.

    Attributes:
        found: the newest whole attempt of each role.
        remains: of each role, the attempts that count no more or not yet: replaced ones, and those without a manifest.
        problems: manifests that are no good.
        pinned: somebody has said that it stays, where it was committed: that is kept here, too.
    """

    step: int
    found: dict[str, RemoteRole] = field(default_factory=dict)
    remains: dict[str, tuple[str, ...]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    pinned: bool = False

    @property
    def committed(self) -> frozenset[str]:
        return frozenset(self.found)

    @property
    def declared(self) -> frozenset[str]:
        return frozenset(role for found in self.found.values() for role in found.roles)

    @property
    def is_complete(self) -> bool:
        return bool(self.found) and self.declared <= self.committed

    @property
    def reason(self) -> str:
        """Why it does not count."""
        missing = ", ".join(sorted(self.declared - self.committed))
        text = f"not uploaded by {missing}" if missing else "no manifest in it"
        return "; ".join(self.problems) or f"{file_names.step_name(self.step)}: {text}"


class RemoteSteps:
    """The steps below a folder of a remote store. Any thread may call it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._manifests: dict[str, RemoteRole] = {}

    def steps(self) -> list[RemoteStep]:
        """All steps, the oldest first. Raises RemoteError."""
        numbers = {
            step
            for name in self.store.names("")
            if (step := file_names.parse_step(name)) is not None and _is_ours(name, step)
        }
        found: list[RemoteStep] = []
        for_each(sorted(numbers), lambda step: found.append(self.step(step)), min(tuning.REMOTE_THREADS, len(numbers)))
        return sorted(found, key=lambda step: step.step)

    def step(self, step: int) -> RemoteStep:
        """One step, whether it is there or not. Raises RemoteError."""
        found: dict[str, RemoteRole] = {}
        remains: dict[str, tuple[str, ...]] = {}
        problems: list[str] = []
        names = self.store.names(file_names.step_name(step))
        for role in filter(file_names.is_role, names):
            attempts = list(filter(file_names.is_attempt, self.store.names(f"{file_names.step_name(step)}/{role}")))
            whole = [there for attempt in attempts if (there := self._whole(step, role, attempt, problems))]
            newest = max(whole, key=lambda there: (there.created, there.attempt), default=None)
            if newest is not None:
                found[role] = newest
            remains[role] = tuple(attempt for attempt in attempts if newest is None or attempt != newest.attempt)
        return RemoteStep(step, found, remains, tuple(problems), file_names.PINNED_FILE in names)

    def _whole(self, step: int, role: str, attempt: str, problems: list[str]) -> RemoteRole | None:
        key = file_names.remote_dir(step, role, attempt)
        if file_names.MANIFEST_FILE not in self.store.names(key):
            return None
        if key not in self._manifests:
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
            # Nothing is ever written there again, and a large run's takes long to read.
            self._manifests[key] = RemoteRole(attempt, tuple({*manifest.roles, role}), manifest.created)
        return self._manifests[key]

    def read_tracker(self) -> int | None:
        """The step the tracker names; None if there is none or it is torn. Raises RemoteError."""
        try:
            data = self.store.read_all(file_names.TRACKER_FILE, limits.SMALL_BYTES)
        except (FileNotFoundError, CheckpointCorruptError):
            return None
        return file_names.parse_tracker(data.decode("ascii", "replace"))

    def delete(self, key: str) -> None:
        """Removes a step, or an attempt of a role, from the store. Raises RemoteError."""
        self.store.delete(key, first=file_names.MANIFEST_FILE)


def _is_ours(name: str, step: int) -> bool:
    return name == file_names.step_name(step)
