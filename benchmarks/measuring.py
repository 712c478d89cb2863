"""What the benchmarks share: ranks launched from one command, interleaved pairs, bars, the table.

A benchmark hands `run` its arguments' parser and a function that every rank executes; `run` starts the ranks under
torchrun, waits for what rank 0 found, and prints it.
"""

from __future__ import annotations

import argparse
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
    """One side of a pair. Only `run` is timed."""

    name: str
    run: Callable[[], object]
    before: Callable[[], object] = _nothing
    after: Callable[[], object] = _nothing


@dataclass(frozen=True)
class Comparison:
    """One row of the table. `speed` is how many times as fast ours is, `cost` how many times as long it takes."""

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
    """What a figure has to be at least, or at most."""

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
    """What a benchmark found; rank 0's goes to whoever launched it."""

    comparisons: list[Comparison] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """Figures that are neither: sizes, thread counts, peaks."""

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
    """Wall-clock seconds from a barrier to the slowest rank's return."""
    return max(each_rank(measured(contender, time.perf_counter)))


def processor_seconds(contender: Contender) -> float:
    """CPU seconds of all threads of all ranks, the kernel's work for them included."""
    return sum(each_rank(measured(contender, _process_seconds)))


def _process_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measured(contender: Contender, clock: Clock) -> float:
    """What the clock says of this rank's `run`. All ranks begin, and end, together."""
    contender.before()
    # A collection of garbage that one side has left must not fall into the other side's time.
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
    """Ours and the reference in turn, pair by pair, so that a machine that slows down slows both sides of a ratio."""
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
    # Whoever comes second may find the disk busy with what the first has left behind.
    if reverse:
        second = measure(reference)
        return measure(ours), second
    return measure(ours), measure(reference)


def each_rank(value: Any) -> list[Any]:
    """Every rank's value, in the order of ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def show(line: str) -> None:
    """Tells a waiting person how far it is."""
    if dist.get_rank() == 0:
        print(line, file=sys.stderr, flush=True)


def reset_peak_memory() -> int:
    """Forgets the peak of this process's resident memory; returns what is resident now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def peak_memory() -> int:
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
    parser.add_argument("--gigabytes", type=float, help="of all ranks' files; default 1.7 on several ranks, 4 on one")
    parser.add_argument("--pairs", type=int, default=9, help="interleaved pairs of ours and the reference")
    parser.add_argument("--slow-pairs", type=int, default=3, help="the same, for references that take very long")
    parser.add_argument("--folder", type=Path, default=Path("."), help="where the temporary folder of files goes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    if parts:
        parser.add_argument("--only", type=_words, default=list(parts), help=f"some of {','.join(parts)}")
    return parser


def _words(text: str) -> list[str]:
    return text.split(",")


def run(
    parser: argparse.ArgumentParser, script: str, measure: Callable[[argparse.Namespace, Findings], object]
) -> None:
    """Started by hand: launches the ranks and prints. Started as a rank: measures."""
    arguments = parser.parse_args()
    if arguments.gigabytes is None:
        arguments.gigabytes = 1.7 if arguments.ranks > 1 else 4.0
    if arguments.result is not None:
        _run_rank(arguments, measure)
        return
    if arguments.ranks < 1 or min(arguments.pairs, arguments.slow_pairs) < 1:
        parser.error("--ranks, --pairs and --slow-pairs are at least 1")
    if "megatron" in getattr(arguments, "only", ()) and importlib.util.find_spec("psutil") is None:
        # Its writer processes import it, die, and leave their parent waiting for ever.
        parser.error("megatron's dist_checkpointing needs psutil: install it, or leave 'megatron' out of --only")
    found = _launch(arguments, script)
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        print_found(found)


def _run_rank(arguments: argparse.Namespace, measure: Callable[[argparse.Namespace, Findings], object]) -> None:
    # A rank that is lost must not keep the others, and whoever waits for them, for half an hour.
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=5))
    findings = Findings()
    measure(arguments, findings)
    if dist.get_rank() == 0:
        arguments.result.write_text(json.dumps(findings.as_json()))
    dist.barrier()
    dist.destroy_process_group()


def _launch(arguments: argparse.Namespace, script: str) -> dict[str, Any]:
    folders = [arguments.folder, *([arguments.tmpfs] if getattr(arguments, "tmpfs", None) else [])]
    # Ended from outside, it still deletes gigabytes, of which some are in memory.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    own = [Path(tempfile.mkdtemp(prefix="mcore_ckpt-benchmark-", dir=folder.absolute())) for folder in folders]
    result = own[0] / "result.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(arguments.ranks), script, *sys.argv[1:]]
    command += ["--folder", str(own[0]), "--result", str(result)]
    command += ["--tmpfs", str(own[1])] if len(own) > 1 else []
    # One thread per rank, as trainings on CPU run; libraries that are not there say so on every import.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    try:
        # Our own output is for a reader of JSON.
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
    """The type of the file system a folder is on."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    fitting = [(len(at), kind) for at, kind in mounts if folder.absolute().is_relative_to(at)]
    return max(fitting)[1]


# -- printing ---------------------------------------------------------------------------------------------


def print_found(found: dict[str, Any]) -> None:
    console = Console()
    # Nobody reads a table whose cells are folded; a terminal folds lines itself.
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
