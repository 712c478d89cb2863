"""Measures what rank 0 does to commit a save of very many ranks, phase by phase.

    python benchmarks/commit.py [--ranks 16384] [--tensors 100000] [--experts 384] [--saves 4] [--folder DIR]
                                [--before DIR] [--repeat 3] [--profile] [--json]

One process makes the reports and the files of all ranks, and puts the reports into a key-value store in another process
before rank 0 asks for them. Then rank 0 commits with the package's own code: it collects, checks, describes, encodes,
reads back, writes, and renames. The files are sparse, or empty in a file system in memory: they are only looked at.
Nothing else runs meanwhile, so the CPU seconds of the process are those of the commit, with all of its threads.

The first save also brings the names of all tensors. Each save has other sizes and checksums, as a real one has.

`--before DIR` runs this script of another checkout of this repository, too, in turn with this one, and compares the
manifests byte for byte.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import hashlib
import json
import multiprocessing
import os
import pstats
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from measuring import machine_facts, peak_memory, reset_peak_memory
from simulated import Model, SavedFiles
from simulated_ranks import GROUPS, HOST, KEYS, ROLE, TIMEOUT_S, WORLDS, Case, Phases, Reporter, client, trainer_of

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint import manifest as manifests
from mcore_ckpt.checkpoint.manifest import Manifest
from mcore_ckpt.ranks.key_value_store import pack
from mcore_ckpt.ranks.one_round import Round
from mcore_ckpt.ranks.rounds import Agreement, Record
from mcore_ckpt.save import new_manifest
from mcore_ckpt.save.rank_reports import RankReport, TensorNames
from mcore_ckpt.save.replica_check import compare_replicas
from mcore_ckpt.save.root import PlaceInRoot
from mcore_ckpt.save.save_times import timeline_of
from mcore_ckpt.steps import commit
from mcore_ckpt.steps.transaction import Attempt, commit_together

HIDDEN = 4096
# How many objects Python's garbage collector finds in a training of one rank (torch 2.13, megatron-core 0.19.2). Those
# of the simulation itself are hidden from it.
_HEAP = 350_000
# How many reports go into the store at a time.
_AT_ONCE = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=16384, choices=WORLDS)
    parser.add_argument("--tensors", type=int, default=100_000, help="tensors of the model")
    parser.add_argument("--experts", type=int, default=384, help="experts in each layer; 0 for a model without experts")
    parser.add_argument("--saves", type=int, default=4, help="saves of one process; the first one tells the names")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where a temporary folder is made")
    parser.add_argument("--before", type=Path, help="a checkout of this repository to compare with")
    parser.add_argument("--repeat", type=int, default=1, help="how often each package is measured, in turn")
    parser.add_argument("--profile", action="store_true", help="print where the last save spends its time")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        arguments.one.write_text(json.dumps(measure(arguments)))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    own = Path(tempfile.mkdtemp(prefix="mcore_ckpt-benchmark-", dir=arguments.folder.absolute()))
    here = Path(__file__).absolute().parents[1]
    packages = {"before": arguments.before.absolute()} if arguments.before else {}
    packages["now"] = here
    found: dict[str, Any] = {"machine": machine_facts(own), "runs": {name: [] for name in packages}}
    try:
        for _ in range(arguments.repeat):
            for name, package in packages.items():
                found["runs"][name].append(_in_process(package, own))
    finally:
        shutil.rmtree(own, ignore_errors=True)
    print(json.dumps(found) if arguments.json else told(found, arguments))


def _in_process(checkout: Path, folder: Path) -> list[dict[str, Any]]:
    """Runs this script as it is in a checkout, with the package of the checkout."""
    paths = [str(checkout), *filter(None, os.environ.get("PYTHONPATH", "").split(":"))]
    result = folder / "result.json"
    command = [sys.executable, str(checkout / "benchmarks" / Path(__file__).name), *sys.argv[1:]]
    command += ["--folder", str(folder), "--one", str(result)]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": ":".join(paths)}, stdout=sys.stderr)
    found: list[dict[str, Any]] = json.loads(result.read_text())
    return found


class Clock(Phases):
    """Adds up the seconds of each phase: of all processors, and by the clock. A phase is without those inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.cpu: dict[str, float] = {}
        self._open: list[tuple[float, float, float, float]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._begin()
        try:
            yield
        finally:
            self._end(name)

    def _begin(self) -> None:
        self._open.append((time.process_time(), time.perf_counter(), 0.0, 0.0))

    def _end(self, name: str) -> None:
        cpu_start, wall_start, cpu_inside, wall_inside = self._open.pop()
        cpu, wall = time.process_time() - cpu_start, time.perf_counter() - wall_start
        self.cpu[name] = self.cpu.get(name, 0.0) + cpu - cpu_inside
        self.seconds[name] = self.seconds.get(name, 0.0) + wall - wall_inside
        if self._open:
            outer = self._open[-1]
            self._open[-1] = (*outer[:2], outer[2] + cpu, outer[3] + wall)

    def _collecting(self, moment: str, _: dict[str, int]) -> None:
        self._begin() if moment == "start" else self._end("garbage")

    @contextmanager
    def garbage(self) -> Iterator[None]:
        """Counts Python's garbage collections as a phase of their own, wherever they happen."""
        gc.callbacks.append(self._collecting)
        try:
            yield
        finally:
            gc.callbacks.remove(self._collecting)

    @contextmanager
    def watch(self, places: Sequence[tuple[Any, str, str]]) -> Iterator[None]:
        """Times the functions that this package has: another version may lack some."""
        with super().watch([(place, name, phase) for place, name, phase in places if hasattr(place, name)]):
            yield


_PHASES = (
    (Round, "collect", "collect reports"),
    (commit, "check_files", "check files"),
    (commit, "check_structures", "check structures"),
    (TensorNames, "receive", "names"),
    (TensorNames, "groups", "names"),
    (TensorNames, "in_order", "names"),
    (new_manifest, "build_manifest", "describe"),
    (manifests, "_encode", "encode"),
    (manifests, "_entries_of", "encode"),
    (commit, "encode_readable", "read back"),
    (commit, "write_file", "write"),
    (commit, "publish", "publish"),
)


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Saves a few times with the package that Python finds, and returns the figures of each save."""
    context = multiprocessing.get_context("spawn")
    ready = context.Queue()
    host = context.Process(target=_host, args=(ready,), daemon=True)
    host.start()
    try:
        return _Saves(arguments, ready.get(timeout=60)).run()
    finally:
        host.terminate()


def _host(ready: Any) -> None:
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    ready.put(store.port)
    signal.pause()


class _Saves:
    def __init__(self, arguments: argparse.Namespace, port: int) -> None:
        self._arguments = arguments
        self._case = Case.of(Model.of_tensors(arguments.tensors, HIDDEN, arguments.experts), arguments.ranks)
        files = SavedFiles(self._case.model, self._case.layout)
        self._store = client(port)
        self._reporters = [Reporter(self._case, rank, files) for rank in range(arguments.ranks)]
        self._sent = [TensorNames() for _ in self._reporters]
        self._agreement = Agreement(self._store, 0, arguments.ranks, "commits", TIMEOUT_S)
        self._root = Path(tempfile.mkdtemp(dir=arguments.folder))
        self._trainer = trainer_of(self._root, self._case, self._agreement)
        self._names = TensorNames()

    def run(self) -> list[dict[str, Any]]:
        return [self._save(number) for number in range(1, self._arguments.saves + 1)]

    def _save(self, number: int) -> dict[str, Any]:
        role_dir = self._root / f"global_steps_{number}" / ROLE
        attempt_number = f"{number:032x}"
        staging = commit.open_staging(role_dir, attempt_number)
        attempt = Attempt(attempt_number, staging, role_dir)
        reports = self._reports(staging, number)
        own = reports[0]
        values = [pack({"record": report}) for report in reports]
        for start in range(0, len(values), _AT_ONCE):
            keys = [
                f"commits/{attempt_number}/rank/{rank}" for rank in range(start, min(start + _AT_ONCE, len(values)))
            ]
            self._store.multi_set(keys, values[start : start + _AT_ONCE])
        nbytes = sum(map(len, values))
        del reports, values
        clock = Clock()
        is_profiled = self._arguments.profile and number == self._arguments.saves
        profile = cProfile.Profile() if is_profiled else nullcontext()
        base = reset_peak_memory()
        gc.freeze()
        heap: list[list[int]] = [[] for _ in range(_HEAP)]
        gc.collect()
        cpu, wall = time.process_time(), time.perf_counter()
        with profile, clock.garbage(), clock.watch(() if is_profiled else _PHASES):
            commit_together(
                self._agreement,
                f"saving step {number}",
                attempt,
                lambda _: own,
                lambda records: self._describe(clock, attempt, records, number),
                lambda: None,
            )
        clock.cpu["all"], clock.seconds["all"] = time.process_time() - cpu, time.perf_counter() - wall
        assert len(heap) == _HEAP
        gc.unfreeze()
        if isinstance(profile, cProfile.Profile):
            pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(45)
        data = (role_dir / file_names.MANIFEST_FILE).read_bytes()
        found = {
            "cpu": clock.cpu,
            "wall": clock.seconds,
            "peak_bytes": peak_memory() - base,
            "received": nbytes,
            "files": data.count(b'"path":'),
            "manifest_bytes": len(data),
            "manifest_sha256": hashlib.sha256(data).hexdigest(),
        }
        shutil.rmtree(role_dir.parent)
        return found

    def _describe(self, clock: Clock, attempt: Attempt, records: Sequence[Record], number: int) -> Manifest:
        adam = {"kind": "Adam", "param_groups": [dict(group) for group in GROUPS], "grad_scaler": None}
        common = {"optimizers": [adam], "lr_scheduler": None}
        with clock.phase("decode reports"):
            reports = list(map(RankReport.of, records))
        unused: Any = None  # the context and the request of a save, which the checks do not ask
        place = PlaceInRoot(unused, unused, attempt)
        save = (number, (ROLE,), self._trainer.config.save_contents, reports)
        manifest = new_manifest.build_manifest(self._trainer, self._names, place, common, KEYS, *save)
        with clock.phase("compare replicas"):
            assert not compare_replicas([report.replicas for report in reports])
        with clock.phase("timeline"):
            timeline = timeline_of([report.times for report in reports], (12_345_678, 13_456_789))
        return replace(manifest, save_timeline=timeline, created="2026-01-01T00:00:00+00:00")

    def _reports(self, staging: Path, number: int) -> list[Record]:
        """Makes the files of all ranks, and their reports."""
        found = []
        for reporter, names in zip(self._reporters, self._sent, strict=True):
            found.append(reporter.write(staging, False, number)(names))
            reporter.committed(names)
        return found


def told(found: dict[str, Any], arguments: argparse.Namespace) -> str:
    """Says what each phase has cost, the median of all runs and later saves."""
    lines = [", ".join(f"{name} {value}" for name, value in found["machine"].items())]
    lines.append(f"{arguments.ranks} ranks, {arguments.tensors} tensors, {arguments.experts} experts in each layer")
    for which in ("first", "later"):
        by_package = {
            name: [save for run in runs for save in (run[:1] if which == "first" else run[1:])]
            for name, runs in found["runs"].items()
        }
        if not all(by_package.values()):
            continue
        sample = by_package["now"][-1]
        lines.append(
            f"\n{which} save: {sample['files']} files, manifest {sample['manifest_bytes'] / 1e6:.1f} MB, received "
            f"{sample['received'] / 1e6:.1f} MB. CPU seconds of the process (by the clock):"
        )
        lines.append(f"{'phase':20}" + "".join(f"{name:>20}" for name in by_package))
        phases = dict.fromkeys(name for saves in by_package.values() for save in saves for name in save["cpu"])
        for phase in phases:
            row = f"{phase:20}"
            for saves in by_package.values():
                cpu, wall = (statistics.median(s[clock].get(phase, 0.0) for s in saves) for clock in ("cpu", "wall"))
                row += f"{cpu:12.3f} ({wall:5.3f})"
            lines.append(row)
        row = f"{'memory, MB':20}"
        for saves in by_package.values():
            row += f"{max(s['peak_bytes'] for s in saves) / 1e6:20.0f}"
        lines.append(row)
    if len(found["runs"]) > 1:
        sums = [[[save["manifest_sha256"] for save in run] for run in runs] for runs in found["runs"].values()]
        same = all(run == sums[0][0] for runs in sums for run in runs)
        lines.append("\nthe manifests are " + ("the same, byte for byte" if same else "DIFFERENT"))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
