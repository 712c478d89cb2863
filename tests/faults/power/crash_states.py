"""Makes the states that a disk may be in after power was lost, from a trace of what was done to it."""

import hashlib
import itertools
import os
import random
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.faults.power.trace_of_files import (
    PAGE,
    ROOT,
    Bytes,
    Change,
    Length,
    Mark,
    Names,
    Node,
    Sync,
    Trace,
    nodes_of,
)

NEVER = 1 << 60

# As many changes may be on the disk or not: all ways are tried. Of more, some.
EXHAUSTIVE = 8

Journal = Literal["ext4", "xfs"]


@dataclass(frozen=True)
class CrashState:
    """Power was lost when `at` events had happened, and these of their changes are on the disk.

    `garbage`: pages that were not written, of files that are long enough, hold other bytes than zeros.
    """

    at: int
    applied: frozenset[int]
    garbage: bool = False


@dataclass
class Crashes:
    """The states that a trace allows.

    Args:
        trace: what was done.
        left_out: the numbers of syncs that count as not done.
    """

    trace: Trace
    left_out: frozenset[int] = frozenset()
    changes: tuple[Change, ...] = field(init=False)
    durable_at: dict[int, int] = field(default_factory=dict, init=False)
    """For each change: the number of events after which it is durable."""
    needs: dict[int, tuple[int, ...]] = field(default_factory=dict, init=False)
    """For each change: earlier ones without which it is not on a disk."""
    needed_by: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list), init=False)
    _names: list[Names] = field(default_factory=list, init=False)
    _data: dict[Node, list[Bytes | Length]] = field(default_factory=lambda: defaultdict(list), init=False)
    _all_data: list[tuple[int, Node]] = field(default_factory=list, init=False)
    _numbers: list[int] = field(default_factory=list, init=False)
    _marks: list[Mark] = field(default_factory=list, init=False)
    _digests: dict[tuple[Node, int, tuple[int, ...], bool], bytes] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.changes = tuple(event for event in self.trace.events if not isinstance(event, Sync | Mark))
        self._numbers = [change.number for change in self.changes]
        waiting: dict[Node, list[int]] = defaultdict(list)
        last: dict[object, int] = {}
        for event in self.trace.events:
            if isinstance(event, Mark):
                self._marks.append(event)
                continue
            if isinstance(event, Sync):
                if event.number not in self.left_out:
                    for number in waiting.pop(event.node, ()):
                        self.durable_at[number] = min(self.durable_at[number], event.number + 1)
                continue
            self.durable_at[event.number] = NEVER
            for node in nodes_of(event):
                waiting[node].append(event.number)
            # A file system keeps the order of changes to one name or one page: it has only the last one in memory.
            keys = _keys(event)
            self.needs[event.number] = tuple({last[key] for key in keys if key in last})
            for number in self.needs[event.number]:
                self.needed_by[number].append(event.number)
            last |= dict.fromkeys(keys, event.number)
            if isinstance(event, Names):
                self._names.append(event)
            else:
                self._data[event.node].append(event)
                self._all_data.append((event.number, event.node))

    # -- which states ------------------------------------------------------------------------------------------

    def durable(self, at: int) -> frozenset[int]:
        """The changes that no crash can undo any more when `at` events have happened."""
        return frozenset(number for number in self._before(at) if self.durable_at[number] <= at)

    def pending(self, at: int) -> list[int]:
        """The changes before `at` that may be lost."""
        return [number for number in self._before(at) if self.durable_at[number] > at]

    def _before(self, at: int) -> list[int]:
        return self._numbers[: bisect_left(self._numbers, at)]

    def points(self) -> list[int]:
        """The moments at which most may be lost: before each sync and mark, and at the end."""
        found = [event.number for event in self.trace.events if isinstance(event, Sync | Mark)]
        return [*found, len(self.trace.events)]

    def states(self, seed: int, samples: int) -> Iterator[CrashState]:
        """Yields states of the weakest model: each prefix, each change alone or lost alone, and random ones.

        Args:
            seed: draws the random states.
            samples: how many random states there are at each point where not all can be tried.
        """
        chance = random.Random(seed)
        before = 0
        for point in self.points():
            durable, pending = self.durable(point), self.pending(point)
            recent = [number for number in pending if number >= before]
            older = frozenset(pending) - frozenset(recent)
            for at in range(before, point):
                yield CrashState(at, frozenset(self._before(at)))
            yield CrashState(point, durable)
            if len(recent) <= EXHAUSTIVE:
                for count in range(len(recent) + 1):
                    for chosen in itertools.combinations(recent, count):
                        for others in {older, frozenset[int]()}:
                            yield CrashState(point, self._with_needs({*durable, *others, *chosen}, point))
            else:
                for number in chance.sample(recent, min(len(recent), samples * EXHAUSTIVE)):
                    yield CrashState(point, self._with_needs({*durable, number}, point))
                    yield CrashState(point, self.without({number}, point))
                for _ in range(samples):
                    share, old = chance.choice((0.1, 0.5, 0.9)), chance.choice((0.0, 0.5, 1.0))
                    chosen_now = {n for n in recent if chance.random() < share}
                    chosen_before = {n for n in older if chance.random() < old}
                    applied = self._with_needs({*durable, *chosen_now, *chosen_before}, point)
                    yield CrashState(point, applied, garbage=chance.random() < 0.5)
            before = point

    def journal_states(self, model: Journal) -> Iterator[CrashState]:
        """Yields states of a file system with one journal, in which names become durable in the order of their changes.

        A sync makes durable all names before it (ext4) or those up to the last change of what is synced (XFS). A file's
        length is on the disk after its bytes only, and until its sync at any time (delayed allocation).
        """
        touched: dict[Node, int] = {}
        journal = 0  # the names before this number are in it
        end = Mark(len(self.trace.events), "")
        for event in (*self.trace.events, end):
            at = event.number
            if isinstance(event, Bytes | Length):
                touched[event.node] = at
                continue  # what follows has the states with and without it
            durable = self.durable(at)
            files: dict[Node, set[int]] = defaultdict(set)
            for number in self.pending(at):
                change = self.trace.events[number]
                if isinstance(change, Bytes | Length):
                    files[change.node].add(number)
            flushed = [set[int](), set[int]().union(*files.values())]
            if len(files) > 1 and isinstance(event, Sync | Mark):
                flushed += files.values()
            lost_from = [name.number for name in self._names if journal <= name.number < at]
            for first_lost in [*lost_from, at]:
                names = {name.number for name in self._names if name.number < first_lost}
                for data in flushed:
                    yield CrashState(at, frozenset(durable | names | data))
            if isinstance(event, Sync):
                if event.number not in self.left_out:
                    journal = max(journal, at if model == "ext4" else touched.get(event.node, 0) + 1)
            elif isinstance(event, Names):
                touched |= dict.fromkeys(_touched(event), at)

    def states_without(self, syncs: Collection[Sync]) -> Iterator[CrashState]:
        """Yields states that would be possible without some syncs: what they make durable is lost, wholly or in part.

        All else is on the disk, up to each change of names and each mark.
        """
        crashes = Crashes(self.trace, self.left_out | {sync.number for sync in syncs})
        lost = [n for n, at in self.durable_at.items() if at != crashes.durable_at[n]]
        later = [event.number + 1 for event in self.trace.events if isinstance(event, Names | Mark)]
        for at in sorted({*later, len(self.trace.events)}):
            pending = [n for n in lost if self.durable_at[n] <= at < crashes.durable_at[n]]
            if pending:
                yield CrashState(at, crashes.without(pending, at))
                yield CrashState(at, crashes.without(pending, at), garbage=True)
                if len(pending) > 1:
                    for number in pending:
                        yield CrashState(at, crashes.without([number], at))

    def _with_needs(self, chosen: Collection[int], at: int) -> frozenset[int]:
        found: set[int] = set()
        todo = [number for number in chosen if number < at]
        while todo:
            number = todo.pop()
            if number not in found:
                found.add(number)
                todo += self.needs[number]
        return frozenset(found)

    def without(self, lost: Collection[int], at: int) -> frozenset[int]:
        """All changes before `at` but these, as far as they may be lost, and those that need them."""
        gone: set[int] = set()
        todo = [number for number in lost if self.durable_at[number] > at]
        while todo:
            number = todo.pop()
            if number not in gone:
                gone.add(number)
                todo += self.needed_by.get(number, ())
        return frozenset(self._before(at)) - gone

    # -- what a state is ---------------------------------------------------------------------------------------

    def marks(self, state: CrashState) -> list[str]:
        """The texts that the program had written before power was lost."""
        return [mark.text for mark in self._marks[: bisect_left(self._marks, state.at, key=lambda mark: mark.number)]]

    def folders(self, state: CrashState) -> dict[Node, dict[str, Node]]:
        found = {node: dict(names) for node, names in self.trace.before.folders.items()}
        for change in self._names:
            if change.number in state.applied:
                for folder, name, node in change.changes:
                    names = found.setdefault(folder, {})
                    if node is None:
                        names.pop(name, None)
                    else:
                        names[name] = node
        return found

    def digest(self, state: CrashState) -> bytes:
        """The same for states that no program can tell apart."""
        total = hashlib.sha256()
        lost: dict[Node, list[int]] = defaultdict(list)
        for number, node in self._data_before(state.at):
            if number not in state.applied:
                lost[node].append(number)
        for path, node in self._walk(self.folders(state)):
            total.update(f"{path}\0".encode())
            if node in self.trace.folders:
                total.update(b"/")
            elif node in self.trace.links:
                total.update(self.trace.links[node].encode())
            else:
                total.update(self._content_digest(node, state, tuple(lost.get(node, ()))))
        return total.digest()

    def write(self, state: CrashState, folder: Path) -> None:
        """Makes the state's files in an empty folder."""
        for path, node in self._walk(self.folders(state)):
            target = folder / path
            if node in self.trace.folders:
                target.mkdir()
            elif node in self.trace.links:
                target.symlink_to(self.trace.links[node])
            else:
                target.write_bytes(self.content(node, state))

    def _walk(
        self, folders: Mapping[Node, Mapping[str, Node]], at: Node = ROOT, base: str = ""
    ) -> Iterator[tuple[str, Node]]:
        for name, node in sorted(folders.get(at, {}).items()):
            yield base + name, node
            if node in self.trace.folders:
                yield from self._walk(folders, node, f"{base}{name}/")

    def _data_before(self, at: int) -> list[tuple[int, Node]]:
        return self._all_data[: bisect_left(self._all_data, (at, 0))]

    def _content_digest(self, node: Node, state: CrashState, lost: tuple[int, ...]) -> bytes:
        """The digest of a file's bytes, of which the changes `lost` before the crash are missing."""
        count = bisect_left(self._data.get(node, ()), state.at, key=lambda change: change.number)
        key = (node, count, lost, state.garbage)
        if key not in self._digests:
            self._digests[key] = hashlib.sha256(self.content(node, state)).digest()
        return self._digests[key]

    def content(self, node: Node, state: CrashState) -> bytes:
        """The bytes of a file."""
        content = bytearray(self.trace.before.files.get(node, b""))
        longest = max([len(content), *(c.nbytes for c in self._data.get(node, ()) if isinstance(c, Length))])
        nbytes = len(content)
        content += (b"\xa5" if state.garbage else b"\0") * (longest - len(content))
        for change in self._data.get(node, ()):
            if change.number not in state.applied:
                continue
            if isinstance(change, Length):
                content[change.nbytes :] = (
                    bytes(longest - change.nbytes) if change.nbytes < nbytes else content[change.nbytes :]
                )
                nbytes = change.nbytes
            else:
                content[change.start : change.start + len(change.data)] = change.data
        return bytes(content[:nbytes])


def _keys(change: Change) -> list[object]:
    match change:
        case Names():
            return [("name", folder, name) for folder, name, _ in change.changes]
        case Bytes():
            return [("page", change.node, change.start // PAGE)]
        case Length():
            return [("length", change.node)]


def _touched(change: Names) -> set[Node]:
    """The nodes whose own record in a journal changes: folders, and what is named in them."""
    return {n for folder, _, node in change.changes for n in (folder, node) if n is not None}


def empty(folder: Path) -> None:
    """Removes all that is in a folder."""
    for base, folders, files in os.walk(folder, topdown=False):
        for name in files:
            os.unlink(Path(base, name))
        for name in folders:
            path = Path(base, name)
            path.unlink() if path.is_symlink() else path.rmdir()
