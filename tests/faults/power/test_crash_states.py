"""The states that a disk may be in, of a few operations whose states one can list by hand."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.faults.power.crash_states import Crashes, CrashState
from tests.faults.power.trace_of_files import ROOT, Bytes, Change, Disk, Event, Length, Names, Sync, Trace

OLD, NEW = 1, 2
DATA = b"new"

# As `replace_file` does it: a temporary file is written, synced, and renamed to the name that the old file has.
MADE = Names(0, ((ROOT, ".tmp", NEW),))
WRITTEN = Bytes(1, NEW, 0, DATA)
LENGTH = Length(2, NEW, len(DATA))
RENAMED = ((ROOT, ".tmp", None), (ROOT, "file", NEW))


def trace_of(events: Sequence[Event]) -> Trace:
    before = Disk({ROOT: {"file": OLD}}, {OLD: b"old"})
    return Trace(before, tuple(events), frozenset({ROOT}), {}, len(events))


def contents(crashes: Crashes, states: Sequence[CrashState]) -> set[tuple[str, bytes]]:
    """Each name and what it stands for, in any of the states."""
    found = set()
    for state in states:
        for name, node in crashes.folders(state)[ROOT].items():
            found.add((name, crashes.content(node, state)))
    return found


def replaced(*syncs: str) -> Crashes:
    events: list[Event] = [MADE, WRITTEN, LENGTH]
    if "file" in syncs:
        events.append(Sync(len(events), NEW, "", ""))
    events.append(Names(len(events), RENAMED))
    if "folder" in syncs:
        events.append(Sync(len(events), ROOT, "", ""))
    return Crashes(trace_of(events))


def test_without_a_sync_the_new_name_may_stand_for_anything() -> None:
    crashes = replaced()
    assert {data for name, data in contents(crashes, list(crashes.states(1, 8))) if name == "file"} == {
        b"old",
        b"",
        bytes(len(DATA)),
        DATA,
    }


@pytest.mark.parametrize("syncs", [("file",), ("file", "folder")])
def test_a_file_that_is_synced_first_is_old_or_new(syncs: tuple[str, ...]) -> None:
    crashes = replaced(*syncs)
    for states in (crashes.states(1, 8), crashes.journal_states("ext4"), crashes.journal_states("xfs")):
        assert {data for name, data in contents(crashes, list(states)) if name == "file"} <= {b"old", DATA}


def test_a_synced_folder_has_the_new_name() -> None:
    crashes = replaced("file", "folder")
    last = [state for state in crashes.states(1, 8) if state.at == len(crashes.trace.events)]
    assert contents(crashes, last) == {("file", DATA)}


def test_a_journal_keeps_the_order_of_names_and_posix_does_not() -> None:
    events = [Names(0, ((ROOT, "a", OLD),)), Names(1, ((ROOT, "b", OLD),))]
    crashes = Crashes(trace_of(events))
    posix = {frozenset(crashes.folders(state)[ROOT]) for state in crashes.states(1, 8)}
    ext4 = {frozenset(crashes.folders(state)[ROOT]) for state in crashes.journal_states("ext4")}
    assert posix - ext4 == {frozenset({"file", "b"})}


def test_what_a_sync_has_made_durable_is_lost_without_it() -> None:
    crashes = replaced("file", "folder")
    (of_file, of_folder) = (event for event in crashes.trace.events if isinstance(event, Sync))
    assert ("file", b"") in contents(crashes, list(crashes.states_without([of_file])))
    assert ("file", b"old") in contents(crashes, list(crashes.states_without([of_folder])))


@given(
    st.lists(st.sampled_from(["make", "write", "sync file", "rename", "sync folder"]), max_size=12), st.integers(0, 9)
)
def test_every_state_has_what_is_durable_and_nothing_of_the_future(words: list[str], seed: int) -> None:
    events: list[Event] = []
    for word in words:
        number = len(events)
        match word:
            case "make":
                events.append(Names(number, ((ROOT, f"n{number}", NEW),)))
            case "write":
                events.append(Bytes(number, NEW, 4096 * (number % 3), b"x"))
            case "rename":
                events.append(Names(number, RENAMED[1:]))
            case "sync file":
                events.append(Sync(number, NEW, "", ""))
            case "sync folder":
                events.append(Sync(number, ROOT, "", ""))
    crashes = Crashes(trace_of(events))
    changes = {event.number for event in events if isinstance(event, Change)}
    for state in (*crashes.states(seed, 2), *crashes.journal_states("ext4"), *crashes.journal_states("xfs")):
        assert crashes.durable(state.at) <= state.applied <= {number for number in changes if number < state.at}
