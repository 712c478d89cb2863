"""Launches the ranks of a benchmark, measures interleaved pairs, checks bars and prints the results.

A benchmark calls `run` with its argument parser and a function that every rank executes. `run` starts the ranks under
torchrun, waits for the findings of rank 0, and prints them.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import importlib.util
import json
import os
import platform
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

Clock = Callable[[], float]


def _nothing() -> None: ...


@dataclass(frozen=True)
class Contender:
    """One side of a pair: `run` is timed, `before` and `after` are not."""

    name: str
    run: Callable[[], object]
    before: Callable[[], object] = _nothing
    after: Callable[[], object] = _nothing


@dataclass(frozen=True)
class Comparison:
    """The times of one comparison, one row of the table.

    The ratio of kind `speed` says how many times as fast ours is, that of kind `cost` how many times as long it takes.
    """

    what: str
    reference: str
    kind: Literal["speed", "cost"]
    nbytes: int
    ours_s: tuple[float, ...]
    reference_s: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        pairs = zip(self.ours_s, self.reference_s, strict=True)
        return [reference / ours if self.kind == "speed" else ours / reference for ours, reference in pairs]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    def as_json(self) -> dict[str, Any]:
        ours, reference = statistics.median(self.ours_s), statistics.median(self.reference_s)
        return {
            **asdict(self),
            "pairs": len(self.ours_s),
            "ratio": self.ratio,
            "ratio_min": min(self.ratios),
            "ratio_max": max(self.ratios),
            "ours_median_s": ours,
            "reference_median_s": reference,
            "ours_gb_per_s": self.nbytes / ours / 1e9,
            "reference_gb_per_s": self.nbytes / reference / 1e9,
        }


@dataclass(frozen=True)
class Bar:
    """A figure and the limit that it must reach (`at_least`) or stay within."""

    what: str
    value: float
    limit: float
    at_least: bool
    unit: str = ""

    @property
    def ok(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


@dataclass
class Findings:
    """The results of a benchmark. The launching process prints those of rank 0."""

    comparisons: list[Comparison] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """Other figures by name: sizes, numbers of threads, peaks of memory."""

    def at_least(self, what: str, value: float, limit: float, unit: str = "") -> None:
        self.bars.append(Bar(what, value, limit, True, unit))

    def at_most(self, what: str, value: float, limit: float, unit: str = "") -> None:
        self.bars.append(Bar(what, value, limit, False, unit))

    def as_json(self) -> dict[str, Any]:
        return {
            "comparisons": [comparison.as_json() for comparison in self.comparisons],
            "bars": [{**asdict(bar), "ok": bar.ok} for bar in self.bars],
            "facts": self.facts,
        }


# -- measuring, on every rank -----------------------------------------------------------------------------


def slowest(contender: Contender) -> float:
    """Returns the wall-clock seconds from a barrier until the slowest rank returns."""
    return max(each_rank(measured(contender, time.perf_counter)))


def processor_seconds(contender: Contender) -> float:
    """Returns the CPU seconds of all threads of all ranks, in user space and in the kernel."""
    return sum(each_rank(measured(contender, _process_seconds)))


def _process_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measured(contender: Contender, clock: Clock) -> float:
    """Returns how much the clock advances during this rank's `run`. All ranks begin and end together."""
    contender.before()
    # Otherwise the garbage of one side could be collected during the other side's time.
    gc.collect()
    dist.barrier()
    start = clock()
    contender.run()
    elapsed = clock() - start
    dist.barrier()
    contender.after()
    dist.barrier()
    return elapsed


def compare(
    ours: Contender,
    reference: Contender,
    pairs: int,
    nbytes: int,
    kind: Literal["speed", "cost"] = "speed",
    measure: Callable[[Contender], float] = slowest,
    warm_up: bool = True,
) -> Comparison:
    """Measures ours and the reference in turn, pair by pair, so that a slower machine slows both sides of a ratio."""
    if warm_up:
        measure(ours), measure(reference)
    times = [_pair(ours, reference, measure, reverse=number % 2 == 1) for number in range(pairs)]
    ours_s, reference_s = zip(*times, strict=True)
    found = Comparison(ours.name, reference.name, kind, nbytes, ours_s, reference_s)
    show(f"{ours.name} / {reference.name}: {pairs} pairs, {kind} {found.ratio:.2f}")
    return found


def _pair(
    ours: Contender, reference: Contender, measure: Callable[[Contender], float], reverse: bool
) -> tuple[float, float]:
    # The side that runs second may find the disk still busy with the first one's work, so the order alternates.
    if reverse:
        second = measure(reference)
        return measure(ours), second
    return measure(ours), measure(reference)


def each_rank(value: Any) -> list[Any]:
    """Returns the values of all ranks, in the order of ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def show(line: str) -> None:
    """Prints a line about progress to stderr, on rank 0."""
    if dist.get_rank() == 0:
        print(line, file=sys.stderr, flush=True)


def reset_peak_memory() -> int:
    """Resets the peak of this process's resident memory and returns the bytes that are resident now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def extra_memory_by_rank(work: Callable[[], object]) -> list[int]:
    """Returns for each rank how many bytes of memory `work` takes at its peak beyond what is resident before."""
    # Memory that earlier saves have freed and the allocator kept would hide what the work takes.
    ctypes.CDLL(None).malloc_trim(0)
    before = reset_peak_memory()
    work()
    return each_rank(peak_memory() - before)


def peak_memory() -> int:
    """Returns the peak of this process's resident memory in bytes, since `reset_peak_memory`."""
    return _memory("VmHWM")


def _memory(field_name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field_name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field_name}")


# -- launching, once --------------------------------------------------------------------------------------


def common_arguments(doc: str | None, parts: Sequence[str] = ()) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="data-parallel ranks on this machine")
    parser.add_argument(
        "--gigabytes", type=float, help="size of all files together; default 1.7 on several ranks, 4 on one"
    )
    parser.add_argument("--pairs", type=int, default=9, help="interleaved pairs of ours and the reference")
    parser.add_argument("--slow-pairs", type=int, default=3, help="number of pairs with references that take very long")
    parser.add_argument(
        "--folder", type=Path, default=Path("."), help="the folder in which a temporary folder is created"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    if parts:
        parser.add_argument("--only", type=_words, default=list(parts), help=f"the parts to run, of {','.join(parts)}")
    return parser


def _words(text: str) -> list[str]:
    return text.split(",")


def run(
    parser: argparse.ArgumentParser, script: str, measure: Callable[[argparse.Namespace, Findings], object]
) -> None:
    """Runs a benchmark: a process started by hand launches the ranks and prints, a rank measures."""
    arguments = parser.parse_args()
    if arguments.gigabytes is None:
        arguments.gigabytes = 1.7 if arguments.ranks > 1 else 4.0
    if arguments.result is not None:
        _run_rank(arguments, measure)
        return
    if arguments.ranks < 1 or min(arguments.pairs, arguments.slow_pairs) < 1:
        parser.error("--ranks, --pairs and --slow-pairs are at least 1")
    if "megatron" in getattr(arguments, "only", ()) and importlib.util.find_spec("psutil") is None:
        # Without psutil megatron's writer processes die on import, and their parent waits for ever.
        parser.error("megatron's dist_checkpointing needs psutil: install it, or leave 'megatron' out of --only")
    found = _launch(arguments, script)
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        print_found(found)


def _run_rank(arguments: argparse.Namespace, measure: Callable[[argparse.Namespace, Findings], object]) -> None:
    # With torch's default timeout the other ranks would wait half an hour for a lost rank.
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=5))
    findings = Findings()
    measure(arguments, findings)
    if dist.get_rank() == 0:
        arguments.result.write_text(json.dumps(findings.as_json()))
    dist.barrier()
    dist.destroy_process_group()


def _launch(arguments: argparse.Namespace, script: str) -> dict[str, Any]:
    folders = [arguments.folder, *([arguments.tmpfs] if getattr(arguments, "tmpfs", None) else [])]
    # SIGTERM must not skip `finally`, which deletes gigabytes of files, some of them in memory.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    own = [Path(tempfile.mkdtemp(prefix="mcore_ckpt-benchmark-", dir=folder.absolute())) for folder in folders]
    result = own[0] / "result.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(arguments.ranks), script, *sys.argv[1:]]
    command += ["--folder", str(own[0]), "--result", str(result)]
    command += ["--tmpfs", str(own[1])] if len(own) > 1 else []
    # Each rank has one thread, like a training on CPU. Warnings about missing libraries would appear on every import.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    try:
        # stdout is reserved for the JSON of this process.
        subprocess.run(command, check=True, env=environment, stdout=sys.stderr)
        found = json.loads(result.read_text())
        return {"machine": machine_facts(own[0]), "arguments": _plain(arguments), **found}
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"the ranks failed with status {error.returncode}") from None
    finally:
        for folder in own:
            shutil.rmtree(folder, ignore_errors=True)


def _plain(arguments: argparse.Namespace) -> dict[str, Any]:
    values = {name: value for name, value in vars(arguments).items() if name not in ("result", "folder", "json")}
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def machine_facts(folder: Path) -> dict[str, Any]:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "filesystem": file_system(folder),
        "torch": torch.__version__,
        "megatron_core": metadata.version("megatron-core"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "load_average": round(os.getloadavg()[1], 2),
    }


def file_system(folder: Path) -> str:
    """Returns the type of the file system that a folder is on."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    fitting = [(len(at), kind) for at, kind in mounts if folder.absolute().is_relative_to(at)]
    return max(fitting)[1]


# -- printing ---------------------------------------------------------------------------------------------


def print_found(found: dict[str, Any]) -> None:
    console = Console()
    # A narrow table would fold the text in its cells. A narrow terminal folds whole lines, which stay readable.
    console.width = max(console.width, 150)
    console.print(", ".join(f"{name} {value}" for name, value in found["machine"].items()), highlight=False)
    for name, value in found["facts"].items():
        console.print(f"{name}: {_rounded(value)}", highlight=False)
    if found["comparisons"]:
        console.print(_comparison_table(found["comparisons"]))
    if found["bars"]:
        console.print(_bar_table(found["bars"]))


def _comparison_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("ours", "reference", "ours s", "ref s", "ours GB/s", "ref GB/s", "ratio", "min .. max", "pairs")
    for row in rows:
        table.add_row(
            row["what"],
            row["reference"],
            f"{row['ours_median_s']:.3f}",
            f"{row['reference_median_s']:.3f}",
            f"{row['ours_gb_per_s']:.2f}",
            f"{row['reference_gb_per_s']:.2f}",
            f"{row['ratio']:.2f} {'x speed' if row['kind'] == 'speed' else 'x cost'}",
            f"{row['ratio_min']:.2f} .. {row['ratio_max']:.2f}",
            str(row["pairs"]),
        )
    return table


def _bar_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("bar", "value", "must be", "")
    for row in rows:
        limit = f"{'>=' if row['at_least'] else '<='} {row['limit']:g} {row['unit']}"
        verdict = "[green]ok[/]" if row["ok"] else "[red]missed[/]"
        table.add_row(row["what"], f"{row['value']:.2f} {row['unit']}", limit, verdict)
    return table


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value
