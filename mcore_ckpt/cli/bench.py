"""`mcore-ckpt bench`: measures this machine and a file system, and predicts how long saves and a load take."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mcore_ckpt.amounts import size_text
from mcore_ckpt.cli.arguments import SIZES, add_json, expanded_path, taken
from mcore_ckpt.cli.progress import progress_of_bytes
from mcore_ckpt.cli.results import is_terminal, result_console, show_result
from mcore_ckpt.cli.signals import cleaning_up_at_sigterm
from mcore_ckpt.cli.tables import table_of
from mcore_ckpt.errors import InvalidArgumentError

if TYPE_CHECKING:
    from mcore_ckpt.tools.maintain.bench.bench import Comparison, Report
    from mcore_ckpt.tools.maintain.bench.predict import Estimate, Prediction
    from mcore_ckpt.tools.maintain.bench.size import SaveSize, Training
    from mcore_ckpt.tools.maintain.bench.speeds import Speeds

HELP = "measure this machine and predict how long saves take"
DESCRIPTION = """\
Measures how fast this machine copies memory and writes to and reads from the file system of PATH, by real saves of
random bytes in a hidden folder below PATH, which it removes. With --model it predicts how long saves and a load of that
model take, and names their bottlenecks. With --real it makes saves of other sizes and shows predicted and measured
times. Run it while the machine is as busy as in training. The exit status is 0 after a measurement, 1 if checkpoints
cannot be saved below PATH or do not fit, and 2 for unusable arguments."""

EXAMPLES = (
    "bench checkpoints",
    "bench checkpoints --model 8B --tp 2 --pp 2 --dp 8",
    "bench checkpoints --model Qwen3-30B-A3B/ --tp 2 --ep 8 --dp 32 --ranks-per-node 8 --json",
    "bench checkpoints --real 1000 --real 4000",
)

_PARAMETER_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}

# A limit for the difference between the times of the slowest and the fastest trial save, divided by the median time.
# Above this limit, predictions may be off by more than a fifth.
_UNSTEADY = 0.4

_SIZES = {**SIZES, "etp": f"{SIZES['etp']} (the value of --tp if not given)"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "folder to measure, such as the folder of the steps (the current folder if not given)"
    parser.add_argument("path", type=expanded_path, nargs="?", default=Path(), metavar="PATH", help=text)
    parser.add_argument(
        "--model", metavar="MODEL", help="folder with a config.json, or a number of parameters, such as 8B or 8e9"
    )
    for name, what in _SIZES.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{what}; with --model")
    text = (
        "number of ranks that share this machine (if not given: with --model 8, or all ranks if there are fewer; "
        "otherwise 1)"
    )
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help=text)
    parser.add_argument("--dtype", default="bf16", help="dtype of the model: bf16, fp16 or fp32 (bf16 if not given)")
    parser.add_argument(
        "--optimizer", default="adam", help="adam, sgd, lion or muon, all distributed (adam if not given)"
    )
    text = "contents of the saves: model, optimizer, or both with a comma between them (both if not given)"
    parser.add_argument("--contents", default="model,optimizer", metavar="WORDS", help=text)
    text = (
        "size of a measured save, all ranks together (if not given: 256, or 64 for each rank if that is more); larger "
        "saves predict large models better"
    )
    parser.add_argument("--megabytes", type=float, metavar="N", help=text)
    text = "also make real saves of this size, and compare them with their prediction; may be repeated"
    parser.add_argument("--real", type=float, action="append", default=[], metavar="MEGABYTES", help=text)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measures and predicts. Returns 0."""
    from mcore_ckpt.tools.maintain.bench.bench import bench, saved_bytes

    root = args.path.absolute()
    taken(root, "bench")
    size = _size(args)
    ranks = args.ranks_per_node or 1 if size is None else size.ranks_on_a_node
    megabytes = max(256, 64 * ranks) if args.megabytes is None else args.megabytes
    nbytes, real = _bytes(megabytes, "--megabytes"), [_bytes(each, "--real") for each in args.real]
    with cleaning_up_at_sigterm(), progress_of_bytes(args.json) as bar:
        task = bar.add_task("measuring", total=saved_bytes(nbytes, real))
        report = bench(
            root, nbytes, ranks, size, real, lambda what, done: bar.update(task, description=what, advance=done)
        )
    show_result(report, as_json, _show, args.json)
    return 0


def _bytes(megabytes: float, flag: str) -> int:
    if not math.isfinite(megabytes) or megabytes < 2:
        raise InvalidArgumentError(f"{flag} {megabytes:g}: use 2 or more")
    return int(megabytes * 10**6)


def _size(args: argparse.Namespace) -> SaveSize | None:
    training = _training(args)
    if args.model is None:
        given = [f"--{name}" for name in _SIZES if getattr(args, name) is not None]
        if given:
            raise InvalidArgumentError(
                f"{given[0]} is given without --model, so there is nothing to predict: give both"
            )
        return None
    from mcore_ckpt.tools.maintain.bench.size import size_of_model, size_of_parameters

    folder = Path(args.model).expanduser()
    if folder.exists():
        return size_of_model(taken(folder, "bench --model", "--model"), training)
    return size_of_parameters(_parameters(args.model), training)


def _parameters(text: str) -> int:
    """Parses a number of parameters. It can end with a unit, as in the names of models.

    >>> _parameters("8B"), _parameters("1.5e9")
    (8000000000, 1500000000)
    """
    unit = _PARAMETER_UNITS.get(text[-1:].upper())
    try:
        return round(float(text) if unit is None else float(text[:-1]) * unit)
    except (ValueError, OverflowError):
        raise InvalidArgumentError(
            f"--model {text}: is neither a folder nor a number of parameters, such as 8B or 8e9"
        ) from None


def _training(args: argparse.Namespace) -> Training:
    from mcore_ckpt.tools.convert.reshard.target import WantedLayout
    from mcore_ckpt.tools.maintain.bench.size import Training

    return Training(
        WantedLayout(**{name: getattr(args, name) for name in _SIZES}),
        args.dtype,
        args.optimizer,
        tuple(args.contents.split(",")),
        args.ranks_per_node,
    )


def as_json(report: Report) -> dict[str, Any]:
    return {
        "root": str(report.root),
        "mount": None if report.mount is None else asdict(report.mount),
        "speeds": asdict(report.speeds),
        "size": None if report.size is None else asdict(report.size),
        "prediction": None if report.prediction is None else _prediction_as_json(report.prediction, report.speeds),
        "fitting_saves": report.fitting_saves,
        "real": [
            {"bytes": real.nbytes} | {name: _comparison_as_json(getattr(real, name)) for name in _COMPARED}
            for real in report.real
        ],
    }


def _prediction_as_json(prediction: Prediction, speeds: Speeds) -> dict[str, Any]:
    from mcore_ckpt.tools.maintain.bench.predict import bottleneck

    estimates = {
        name: {"seconds": each.seconds, "parts": dict(each.parts), "bottleneck": bottleneck(each, speeds)}
        for name, each in ((name, getattr(prediction, name)) for name in _PREDICTED)
    }
    return estimates | {
        "prepared_after_s": prediction.prepared_after_s,
        "file_system_bytes_per_s": prediction.file_system_bytes_per_s,
    }


def _comparison_as_json(comparison: Comparison) -> dict[str, float]:
    return asdict(comparison) | {"ratio": comparison.ratio}


_PREDICTED = {
    "stall": "async save: stall",
    "first_stall": "first async save at once: stall",
    "async_save": "async save: until durable",
    "sync_save": "synchronous save",
    "load": "load, same layout",
}
_COMPARED = ("stall", "async_save", "sync_save")


def _show(report: Report) -> None:
    console = result_console()
    where = "" if report.mount is None else f" ({report.mount.kind} on {report.mount.point})"
    console.print(f"{report.root}{where}")
    speeds = report.speeds
    ranks = "1 rank" if speeds.ranks == 1 else f"{speeds.ranks} ranks at once"
    console.print(f"{ranks}, {size_text(speeds.trial_bytes)}")
    _show_table(console, ("measured", "speed>"), _speed_rows(speeds))
    least, most = report.speeds.spread
    if most - least > _UNSTEADY:
        text = f"busy: trial saves took {least:.2f} to {most:.2f} times their median; expect real saves to vary as much"
        console.print(text, style="yellow")
    if report.prediction is not None and report.size is not None:
        console.print(_size_line(report.size, report.fitting_saves))
        _show_table(console, ("predicted", "time>", "bottleneck"), _predicted_rows(report.prediction, report.speeds))
        for line in _notes(report.prediction, report.size):
            console.print(line)
    if report.real:
        _show_table(console, ("real saves", "size>", "predicted>", "measured>", "ratio>"), _real_rows(report))


def _show_table(console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Shows a table on a terminal, and elsewhere a line for each row."""
    if is_terminal():
        console.print()
        console.print(table_of(console, headings, rows))
        console.print()
        return
    for row in rows:
        first, *others = (heading.removesuffix(">") for heading in headings)
        named = "  ".join(f"{name} {cell}" for name, cell in zip(others, row[1:], strict=True))
        console.print(f"{first}  {row[0]}  {named}")


def _speed_rows(speeds: Speeds) -> list[tuple[str, str]]:
    rates = [
        *((f"copying {size_text(nbytes)} in host memory", rate) for nbytes, rate in speeds.copies),
        ("new host memory, one thread", speeds.fetch_bytes_per_s),
        ("writing from images", speeds.write_bytes_per_s),
        ("writing in place", speeds.write_in_place_bytes_per_s),
        ("plain writing, 1 rank", speeds.raw_write_bytes_per_s),
        ("reading, 1 rank", speeds.read_bytes_per_s),
    ]
    if speeds.gpu is not None:
        rates += [
            (f"copying from {speeds.gpu.name}", speeds.gpu.copy_bytes_per_s),
            ("pinning new memory", speeds.gpu.pin_bytes_per_s),
        ]
    times = (
        ("opening a save", speeds.open_s),
        ("writing files without bytes", speeds.small_write_s),
        ("commit", speeds.commit_s),
        ("sync of a small file", speeds.sync_s),
    )
    limit = speeds.write_limit
    return [
        *((name, f"{size_text(rate)}/s") for name, rate in rates),
        *((name, _time(seconds)) for name, seconds in times),
        ("limit of writing", f"the {limit}" if limit else "neither file system nor processors"),
    ]


def _size_line(size: SaveSize, fitting: int | None) -> str:
    text = (
        f"{size.parameters / 1e9:.3g} billion parameters on {size.topology}: {size_text(size.total_bytes)} a save, "
        f"{size_text(size.node_bytes)} a node, {size_text(size.rank_bytes)} a rank"
    )
    return text if fitting is None else f"{text}; {fitting} such saves fit"


def _predicted_rows(prediction: Prediction, speeds: Speeds) -> list[tuple[str, str, str]]:
    from mcore_ckpt.tools.maintain.bench.predict import bottleneck

    estimates: list[tuple[str, Estimate]] = [(words, getattr(prediction, name)) for name, words in _PREDICTED.items()]
    return [(words, _time(estimate.seconds), bottleneck(estimate, speeds)) for words, estimate in estimates]


def _notes(prediction: Prediction, size: SaveSize) -> list[str]:
    lines = []
    if prediction.prepared_after_s:
        lines.append(
            f"{_time(prediction.prepared_after_s)} after the manager's construction, host memory is ready; from then "
            "on the first save is as fast as later saves"
        )
    if size.nodes > 1:
        rate = size_text(prediction.file_system_bytes_per_s)
        lines.append(
            f"the prediction holds if each of {size.nodes} nodes writes as fast as this one, all at once: {rate}/s "
            "into one file system"
        )
    return lines


def _real_rows(report: Report) -> list[tuple[str, str, str, str, str]]:
    rows = []
    for real in report.real:
        for name in _COMPARED:
            found: Comparison = getattr(real, name)
            times = _time(found.predicted_s), _time(found.measured_s)
            rows.append((_PREDICTED[name], size_text(real.nbytes), *times, f"{found.ratio:.2f}"))
    return rows


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
