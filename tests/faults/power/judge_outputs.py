"""Opens states of a disk that lost power during recorded_outputs.py.

Of what a work makes, each part must be whole or absent; and whole if the caller was told so. What it replaces may be as
it was. Then the work is done again, which must succeed.
"""

import contextlib
import hashlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.steps import tracker
from mcore_ckpt.steps.listing import complete_steps
from tests.faults.power.crash_states import Crashes, CrashState, empty
from tests.faults.power.recorded_outputs import CONVERTED, WORKS
from tests.faults.power.trace_of_files import Mark

# Every how many states the work that was interrupted is done again: it takes much longer than to look at its files.
EVERY = 25

# Where the tracker must name a complete step at all times. ROLL finds its steps without it.
TRACKED = ("areal", CONVERTED, "out/resharded")


class Judge:
    """Judges states of one recording.

    Args:
        crashes: the recording's states.
        folder: an empty folder, in which states are made.
    """

    def __init__(self, crashes: Crashes, folder: Path) -> None:
        self._crashes = crashes
        self._folder = folder
        self._done_again = 0
        self._whole: list[dict[str, str]] = []
        """After each mark: the digest of each path that was there."""
        self._marks = [event for event in crashes.trace.events if isinstance(event, Mark)]
        everything = sorted({path for work in WORKS.values() for path in work.paths})
        for event in self._marks:
            self._make(
                CrashState(event.number, frozenset(c.number for c in crashes.changes if c.number < event.number))
            )
            self._whole.append({path: found for path in everything if (found := self._digest(path))})

    def problems(self, state: CrashState) -> list[str]:
        """Makes a state and opens it. Returns what is wrong with it."""
        self._make(state)
        try:
            return list(self._problems(len(self._crashes.marks(state))))
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]

    def _problems(self, count: int) -> Iterator[str]:
        said = [json.loads(event.text) for event in self._marks]
        before = self._whole[count - 1] if count else {}
        begun = said[count - 1].get("begun") if count else None
        after = self._whole[count] if begun else before
        for path in sorted({*before, *after}):
            found = self._digest(path)
            allowed = {before.get(path), after.get(path)}
            if begun and path in WORKS[begun].paths:
                allowed.add(None)  # as while a role is taken out of a step
            if found not in allowed:
                yield f"{path} is {'another' if found else 'lost'}, after {said[count - 1]}"
        for root in TRACKED:
            tracked = tracker.read_tracker(self._folder / root)
            if tracked is not None and tracked not in {step.step for step in complete_steps(self._folder / root)}:
                yield f"the tracker of {root} names step {tracked}, which is not complete"
        if begun:
            self._done_again += 1
            if self._done_again % EVERY == 0:
                yield from self._do_again(begun, after)

    def _do_again(self, name: str, after: dict[str, str]) -> Iterator[str]:
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                WORKS[name].run(self._folder)
        except (AssertionError, CheckpointError) as error:
            if not self._digest(WORKS[name].paths[0]):
                yield f"{name} cannot be done again: {error}"
            return  # it is in place, so the command refuses to write there
        for path in WORKS[name].paths:
            if path in after and not self._digest(path):
                yield f"{path} is still missing when {name} was done again"

    def _make(self, state: CrashState) -> None:
        empty(self._folder)
        self._crashes.write(state, self._folder)

    def _digest(self, path: str) -> str | None:
        """The digest of a file or folder. None if it is not there, or is a checkpoint without a manifest."""
        place = self._folder / path
        if place.is_file():
            return hashlib.sha256(place.read_bytes()).hexdigest()
        if not place.is_dir():
            return None
        total, manifests = hashlib.sha256(), 0
        for base, folders, files in os.walk(place):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            is_whole = not _has_manifest(path, Path(base)) or file_names.MANIFEST_FILE in files
            for name in sorted(files) if is_whole else ():
                if name != file_names.OWNER_FILE:
                    total.update(os.path.relpath(os.path.join(base, name), place).encode() + b"\0")
                    total.update(Path(base, name).read_bytes())
                    manifests += 1
            if not is_whole:
                folders.clear()
        return total.hexdigest() if manifests else None


def _has_manifest(path: str, folder: Path) -> bool:
    """True if a folder is one that holds a manifest once it is a checkpoint."""
    if path.startswith("uploads/remote"):
        return file_names.is_attempt(folder.name)
    return (
        path.startswith(("roll", "areal", "out/native", "out/resharded"))
        and file_names.parse_step(folder.parent.name) is not None
    )
