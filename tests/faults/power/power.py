"""Takes the power from a disk at every point of saves and of all else that writes, and opens what is left.

`power.py saves` or `power.py outputs`. It records the work (recorded_saves.py, recorded_outputs.py), makes the states
in which a crash may leave the disk (crash_states.py), and judges them (judge_saves.py, judge_outputs.py). With --syncs
it also leaves out each sync of the code, one at a time, and looks for a state that is bad without it.

A library before the C library (`recorder.c`) records every operation on files, with all bytes, in the order in which
they took place over all processes and threads. That nothing is missing is checked: the recording, played back, is the
disk at the end, byte for byte. Two ranks of a small GPT (Megatron's DDP and distributed optimizer) make a first save
into new folders, a second, save one again by exchange and by two renames, with files and a folder of another program
beside it, pin, unpin, let retention delete, and prune. A second recording has conversion from HuggingFace into both
formats, merge, reshard, a step for another trainer, uploads to a local store, and the roles and trackers of ROLL, AReaL
and verl.

`crash_states.py` has three models. POSIX, the weakest (that of ALICE, Pillai et al., OSDI 2014): a sync of a file makes
its bytes and its length durable, a sync of a folder the names in it, and of all else any part may be on the disk: each
page, each length, each name or rename alone. ext4 (`data=ordered`) and XFS keep names in the order of their journal. A
state is made for each prefix, for each change alone and lost alone, for all subsets where up to 8 changes are pending,
and by a seed beyond. Pages that were never written hold zeros or garbage.
"""

import argparse
import filecmp
import itertools
import json
import logging
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

HERE = Path(__file__).parent
from tests.faults.power.crash_states import Crashes, CrashState, empty  # noqa: E402
from tests.faults.power.trace_of_files import Recording, Sync, Trace  # noqa: E402
from tests.support.lives import say  # noqa: E402

REPORTED = 20


class Judge(Protocol):
    def problems(self, state: CrashState) -> list[str]: ...


@dataclass(frozen=True)
class Work:
    """A recording and its judge. `prepare` makes what is on the disk, durably, before it begins."""

    program: str
    prepare: Callable[[Path], None]
    judge: Callable[[Crashes, Path], "contextmanager[Judge]"]


def hf_model(folder: Path) -> None:
    from tests.support.tiny_models import make_hf_folder

    model = make_hf_folder(folder / "in", "llama", num_hidden_layers=1, vocab_size=64)
    templates = model / "additional_chat_templates"
    templates.mkdir()
    (templates / "tools.jinja").write_text("{{ tools }}")


@contextmanager
def judge_of_saves(crashes: Crashes, folder: Path) -> Iterator[Judge]:
    from tests.faults.power import judge_saves

    with judge_saves.alone() as training:
        yield judge_saves.Judge(crashes, folder, training)


@contextmanager
def judge_of_outputs(crashes: Crashes, folder: Path) -> Iterator[Judge]:
    from tests.faults.power import judge_outputs, reboot

    reboot.boot()
    yield judge_outputs.Judge(crashes, folder)


WORKS = {
    "saves": Work("recorded_saves.py", lambda folder: None, judge_of_saves),
    "outputs": Work("recorded_outputs.py", hf_model, judge_of_outputs),
}


def compile_recorder(folder: Path) -> Path:
    library = folder / "recorder.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-w", str(HERE / "recorder.c"), "-o", str(library), "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    return library


def record(work: Work, base: Path) -> Trace:
    """Runs the program, and checks that the recording has all that it did to the disk."""
    folder = base / "disk"
    folder.mkdir()
    work.prepare(folder)
    recording = Recording.of(folder, base / "log")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / work.program), str(folder)],
        env=os.environ | recording.env(compile_recorder(base)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        raise SystemExit(f"{work.program} ended with status {done.returncode}:\n{done.stdout}")
    trace = recording.end()
    crashes, copy = Crashes(trace), base / "copy"
    copy.mkdir()
    crashes.write(CrashState(len(trace.events), frozenset(c.number for c in crashes.changes)), copy)
    if differences := _differences(filecmp.dircmp(folder, copy)):
        raise SystemExit(f"the recording is not complete: {differences}")
    empty(copy)
    shutil.rmtree(folder)  # while it is there, each state's root would be a copy of it, and another run
    return trace


def _differences(found: "filecmp.dircmp[str]") -> list[str]:
    _, wrong, errors = filecmp.cmpfiles(found.left, found.right, found.common_files, shallow=False)
    below = [name for each in found.subdirs.values() for name in _differences(each)]
    return [*found.left_only, *found.right_only, *wrong, *errors, *below]


def distinct(crashes: Crashes, states: Iterator[CrashState]) -> dict[tuple[bytes, int], CrashState]:
    """The states that can be told apart, by what is on the disk or by what the program had been told."""
    found: dict[tuple[bytes, int], CrashState] = {}
    for state in states:
        found.setdefault((crashes.digest(state), len(crashes.marks(state))), state)
    return found


def group_of(sync: Sync) -> tuple[str, str]:
    """The code that asks for a sync, and what it syncs."""
    path = re.sub(r"[0-9a-f]{32}", "*", sync.path)
    path = re.sub(r"(step|checkpoint|iter|rank|steps)_?-?\d+", r"\1_N", path)
    return sync.site, re.sub(r"(pp|tp|cp|dp|etp|ep)\d+", r"\1N", path)


@dataclass(frozen=True)
class Verdict:
    """What the judge finds without the syncs of one place of the code. `problem` is None if nothing is bad."""

    site: str
    path: str
    count: int
    tried: int
    problem: str | None


def without_each_sync(crashes: Crashes, judge: Judge, wanted: str) -> Iterator[Verdict]:
    groups: dict[tuple[str, str], list[Sync]] = defaultdict(list)
    for event in crashes.trace.events:
        if isinstance(event, Sync) and re.search(wanted, event.site):
            groups[group_of(event)].append(event)
    known: dict[tuple[bytes, int], list[str]] = {}
    for (site, path), syncs in groups.items():
        tried, problem = 0, None
        for state in crashes.states_without(syncs):
            key = (crashes.digest(state), len(crashes.marks(state)))
            if key not in known:
                known[key] = judge.problems(state)
                tried += 1
            if known[key]:
                problem = known[key][0]
                break
        yield Verdict(site, path, len(syncs), tried, problem)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("--states", type=int, default=0, help="how many states to open, drawn by the seed; 0: all")
    parser.add_argument("--samples", type=int, default=8, help="random states for each point with too many for all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--syncs", metavar="REGEX", help="leave out the syncs of these places of the code")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="power-") as name:
        base = Path(name).resolve()
        trace = record(WORKS[options.work], base)
        report = run(trace, options, WORKS[options.work], base / "copy")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    return 1 if report["bad"] else 0


def run(trace: Trace, options: argparse.Namespace, work: Work, folder: Path) -> dict[str, object]:
    crashes = Crashes(trace)
    models = {"posix": crashes.states(options.seed, options.samples)}
    if not options.states:  # a sample is of the weakest model alone
        models |= {"ext4": crashes.journal_states("ext4"), "xfs": crashes.journal_states("xfs")}
    by_model = {model: distinct(crashes, states) for model, states in models.items()}
    states = dict(itertools.chain.from_iterable(each.items() for each in by_model.values()))
    chosen = list(states.values())
    if options.states:
        chosen = random.Random(options.seed).sample(chosen, min(options.states, len(chosen)))
    syncs = sum(isinstance(event, Sync) for event in trace.events)
    counts = ", ".join(f"{model} {len(found)}" for model, found in by_model.items())
    say(
        f"{trace.calls} operations, {syncs} of them syncs; {len(states)} states ({counts}), {len(chosen)} of them tried"
    )
    bad: list[dict[str, object]] = []
    with work.judge(crashes, folder) as judge:
        for state in chosen:
            if problems := judge.problems(state):
                bad.append({"at": state.at, "problems": problems})
                if len(bad) <= REPORTED:
                    say(f"bad after {state.at} of {len(trace.events)} events: {problems}")
        say(f"{len(bad)} bad")
        verdicts: list[Verdict] = []
        for verdict in without_each_sync(crashes, judge, options.syncs) if options.syncs else ():
            verdicts.append(verdict)
            # At once, because all of them take hours.
            say(f"without {verdict.count} of {verdict.site} on {verdict.path}: {verdict.problem or 'nothing is bad'}")
    shutil.rmtree(folder)
    return {
        "operations": trace.calls,
        "syncs": syncs,
        "states": {model: len(found) for model, found in by_model.items()},
        "distinct": len(states),
        "tried": len(chosen),
        "bad": bad,
        "without": [vars(verdict) for verdict in verdicts],
    }


if __name__ == "__main__":
    sys.exit(main())
