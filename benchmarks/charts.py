"""Draws the plots of the documentation from the kept results of benchmarks.

    PYTHONPATH=.venv/docs python benchmarks/charts.py [--results benchmarks/results] [--to docs/plots]

A result is what a benchmark prints with `--json`, as `<benchmark>.json` or `<benchmark>-<size>.json`. To publish a new
run, replace the file and run `scripts/docs.sh`, which also installs matplotlib. Plots are the same bytes each time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import EngFormatter, FuncFormatter, NullFormatter

REPOSITORY = Path(__file__).parent.parent

# Colours and fonts of the drawn pictures, such as docs/save.svg.
INK, SOFT, GRID = "#1f2933", "#52606d", "#e4e7eb"
COLOURS = ("#2563eb", "#16a34a", "#d97706", "#dc2626", "#7c3aed")
STYLE = {
    "axes.edgecolor": SOFT,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    # matplotlib measures texts with the first, which comes with it. Browsers take the first that they have.
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "grid.color": GRID,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "mcore_ckpt",
    "text.color": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
}

Result = Mapping[str, Any]

# What a weight in bf16 takes of the bytes of a parameter.
WEIGHT_BYTES = 2

# The panels of the first plot, by benchmark: what is compared, the title, and the references to show.
OTHERS = (
    "torch.save per rank",
    "torch.distributed.checkpoint",
    "megatron dp_reshardable",
    "megatron fully_reshardable",
)
ASYNC = ("parallel memcpy", "torch.save per rank", "torch.distributed.checkpoint async_save, stall")
PANELS = {
    "save": ("durable save", "A durable save: times as fast as", ("raw O_DIRECT write", *OTHERS)),
    "load": ("load", "A load: times as fast as", ("raw O_DIRECT read", *OTHERS)),
    "stall": ("async save, stall", "The stall of an async save: times as short as", ASYNC),
}
# What the plot calls a reference, if not as the benchmark does.
NAMES = {
    "parallel memcpy": "one parallel memcpy",
    "torch.save per rank": "torch.save",
    "torch.distributed.checkpoint async_save, stall": "torch.distributed.checkpoint, async",
    "megatron dp_reshardable": "Megatron, dp_reshardable",
    "megatron fully_reshardable": "Megatron, fully_reshardable",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=REPOSITORY / "benchmarks" / "results")
    parser.add_argument("--to", type=Path, default=REPOSITORY / "docs" / "plots", help="the folder of the plots")
    arguments = parser.parse_args()
    results = {path.stem: json.loads(path.read_text()) for path in sorted(arguments.results.glob("*.json"))}
    arguments.to.mkdir(parents=True, exist_ok=True)
    plots: dict[str, Callable[[Mapping[str, Result]], Figure]] = {
        "ratios": ratios,
        "predictions": predictions,
        "bytes-per-parameter": bytes_per_parameter,
        "scale-seconds": scale_seconds,
        "scale-bytes": scale_bytes,
    }
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE}):
        for name, plot in plots.items():
            # A date in the file would make it differ each time.
            plot(results).savefig(arguments.to / f"{name}.svg", metadata={"Date": None, "Creator": None})


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.15))


def _foot(figure: Figure, text: str) -> None:
    figure.supxlabel(text, fontsize=8.5, color=SOFT)


def load_of(result: Result) -> str:
    return f"{result['machine']['load_average']:.0f}"


# -- ours against references ------------------------------------------------------------------------------


def ratios(results: Mapping[str, Result]) -> Figure:
    """Draws how many times as fast a save, a load and a stall are as each reference, pair by pair."""
    rows = {name: _shown(results[name], what, references) for name, (what, _, references) in PANELS.items()}
    figure = _figure(9.6, 6.2)
    panels = figure.subplots(len(rows), sharex=True, height_ratios=[len(each) for each in rows.values()])
    for axes, (name, comparisons) in zip(panels, rows.items(), strict=True):
        _draw_pairs(axes, PANELS[name][1], comparisons)
    panels[-1].set_xlabel("dots: single pairs; line: their median", color=SOFT)
    _foot(figure, "; ".join(told_run(results[name], name) for name in PANELS))
    return figure


def _shown(result: Result, what: str, references: Sequence[str]) -> list[Result]:
    found = {row["reference"]: row for row in result["comparisons"] if row["what"].startswith(what)}
    return [found[reference] for reference in references]


def _draw_pairs(axes: Axes, title: str, comparisons: Sequence[Result]) -> None:
    axes.set_title(title)
    axes.set_xscale("log")
    axes.axvline(1, color=SOFT, linewidth=1, linestyle="--")
    for place, row in enumerate(comparisons):
        found = [theirs / ours for ours, theirs in zip(row["ours_s"], row["reference_s"], strict=True)]
        colour = COLOURS[0] if median(found) >= 1 else COLOURS[2]
        axes.plot(found, [place] * len(found), "o", color=colour, alpha=0.45, markersize=5, markeredgewidth=0)
        axes.plot([median(found)], [place], "|", color=colour, markersize=16, markeredgewidth=2.5)
        axes.annotate(f"{median(found):.2g}", (max(found), place), (8, 0), textcoords="offset points", va="center")
    axes.set_yticks(
        range(len(comparisons)), [NAMES.get(row["reference"], row["reference"]) for row in comparisons], color=INK
    )
    axes.set_ylim(len(comparisons) - 0.4, -0.6)
    axes.set_xticks([0.25, 0.5, 1, 2, 4, 8, 16])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(which="both", length=0)
    axes.grid(axis="y", visible=False)


def told_run(result: Result, name: str) -> str:
    """Says of which run a result is: size, ranks, date, load of the machine."""
    machine, arguments = result["machine"], result["arguments"]
    ranks = f"{arguments['ranks']} rank{'s' if arguments['ranks'] > 1 else ''}"
    return f"{name}: {ranks}, {arguments['gigabytes']:g} GB, {machine['date'][:10]}, load {load_of(result)}"


# -- predictions ------------------------------------------------------------------------------------------


def predictions(results: Mapping[str, Result]) -> Figure:
    """Draws predicted against measured times of all pairs, with the bar of 20 %."""
    found = {name: result for name, result in results.items() if name.startswith("predictions-")}
    pairs = [pair for result in found.values() for pair in result["facts"]["pairs"]]
    names = {
        "stall": "stall of an async save",
        "async_save": "async save until durable",
        "sync_save": "synchronous save",
        "load": "load, same layout",
    }
    figure = _figure(7.2, 5.4)
    axes = figure.subplots()
    times = [pair[side][name] for pair in pairs for side in ("measured", "predicted") for name in names]
    ends = [min(times) * 0.7, max(times) * 1.4]
    axes.fill_between(ends, [0.8 * end for end in ends], [1.2 * end for end in ends], color=GRID, label="20 %")
    axes.plot(ends, ends, color=SOFT, linewidth=1, linestyle="--")
    for colour, (name, told) in zip(COLOURS, names.items(), strict=False):
        points = [(pair["measured"][name], pair["predicted"][name]) for pair in pairs]
        axes.plot(*zip(*points, strict=True), "o", color=colour, markersize=5, alpha=0.7, markeredgewidth=0, label=told)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(EngFormatter("s"))
        axis.set_minor_formatter(NullFormatter())
    axes.set_title("What mcore-ckpt bench predicts, and what was measured")
    axes.set_xlabel("measured")
    axes.set_ylabel("predicted")
    axes.legend(loc="lower right")
    sizes = ", ".join(f"{result['arguments']['gigabytes']:g} GB at load {load_of(result)}" for result in found.values())
    _foot(figure, f"1 rank, {next(iter(found.values()))['machine']['date'][:10]}: {sizes}")
    return figure


# -- settings of the optimizer ----------------------------------------------------------------------------


def bytes_per_parameter(results: Mapping[str, Result]) -> Figure:
    """Draws how many bytes the files of model and optimizer take for each parameter, by setting of the optimizer."""
    prefix = "bytes per parameter: "
    facts = results["optimizers"]["facts"].items()
    found = sorted((value, name.removeprefix(prefix)) for name, value in facts if name.startswith(prefix))
    figure = _figure(8.4, 3.4)
    axes = figure.subplots()
    bars = axes.barh([name for _, name in found], [value for value, _ in found], color=COLOURS[0], height=0.6)
    axes.barh([name for _, name in found], [WEIGHT_BYTES] * len(found), color=COLOURS[1], height=0.6)
    axes.bar_label(bars, fmt="%.1f", padding=4)
    axes.set_title("Bytes per parameter")
    axes.set_xlim(0, 1.1 * found[-1][0])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.grid(axis="y", visible=False)
    axes.set_axisbelow(True)
    axes.legend(handles=[bars, axes.containers[1]], labels=["optimizer", "weights, bf16"], loc="lower right")
    _foot(figure, told_run(results["optimizers"], "files of model and optimizer"))
    return figure


# -- how costs grow with ranks ----------------------------------------------------------------------------


def scale_seconds(results: Mapping[str, Result]) -> Figure:
    """Draws CPU seconds of a commit and of two plans, by ranks."""
    lines = {
        "commit, rank 0": lambda row: row["saves"][-1]["cpu_s"],
        "plan, same layout": lambda row: row["load"]["the same layout"]["cpu_s"],
        "plan, another layout": lambda row: row["load"]["another layout"]["cpu_s"],
    }
    return _by_ranks(results["scale"], "CPU seconds", "s", lines)


def scale_bytes(results: Mapping[str, Result]) -> Figure:
    """Draws the bytes of the manifest, of messages, of indexes and of memory, by ranks."""
    lines = {
        "manifest": lambda row: row["saves"][-1]["manifest_bytes"],
        "rank 0's memory, first commit": lambda row: row["saves"][0]["peak_bytes"],
        "rank 0 receives in a commit": lambda row: row["saves"][-1]["commit_traffic"]["received"],
        "indexes read, another layout": lambda row: row["load"]["another layout"]["index_bytes"],
        "another rank sends in a commit": lambda row: row["saves"][-1]["other"]["sent"],
    }
    return _by_ranks(results["scale"], "Bytes", "B", lines)


def _by_ranks(result: Result, title: str, unit: str, lines: Mapping[str, Callable[[Result], float]]) -> Figure:
    rows = sorted(result["worlds"], key=lambda row: row["world"])
    figure = _figure(8.4, 4.6)
    axes = figure.subplots()
    for colour, (name, value) in zip(COLOURS, lines.items(), strict=False):
        points = [(row["world"], value(row)) for row in rows if value(row) > 0]
        axes.plot(*zip(*points, strict=True), "o-", color=colour, markersize=4, label=name)
    axes.set(xscale="log", yscale="log", xlabel="ranks")
    axes.set_title(f"{title}, {rows[0]['tensors']:,} tensors")
    axes.set_xticks([row["world"] for row in rows], [f"{row['world']:,}" for row in rows])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(which="minor", length=0)
    axes.yaxis.set_major_formatter(EngFormatter(unit))
    axes.yaxis.set_minor_formatter(NullFormatter())
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper")
    _foot(figure, f"{result['machine']['date'][:10]}, load {load_of(result)} at the start")
    return figure


if __name__ == "__main__":
    main()
