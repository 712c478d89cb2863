"""Shows the contents of a checkpoint as tables, for `mcore-ckpt inspect` on a terminal."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mcore_ckpt.amounts import age_text, size_text
from mcore_ckpt.cli.tables import table_of

if TYPE_CHECKING:
    from mcore_ckpt.checkpoint import Manifest


def show_tables(
    console: Console,
    role_dir: Path,
    manifest: Manifest,
    kinds: Mapping[str, tuple[int, int]],
    tensors: Sequence[Mapping[str, Any]],
) -> None:
    """Shows one role and the given `tensors`. `kinds` has the number of files of each kind and their size in bytes."""
    console.print(f"{role_dir}: step {manifest.step} of {manifest.role}", style="bold")
    facts = [
        ("saved", f"{manifest.created} {_age(manifest.created)}"),
        ("with", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())),
        ("by", str(manifest.topology)),
        ("holds", contents_text(manifest)),
        ("roles of the step", ", ".join(manifest.roles)),
        ("tensors", str(len(manifest.tensors))),
        *metric_facts(role_dir, manifest),
        *model_facts(manifest),
        *origin_facts(manifest),
        *node_facts(role_dir, manifest),
    ]
    console.print(table_of(console, ("what", ""), facts))
    rows = [[kind, str(count), size_text(nbytes)] for kind, (count, nbytes) in kinds.items()]
    rows.append(["all", str(len(manifest.files)), size_text(manifest.nbytes)])
    console.print()
    console.print(table_of(console, ("kind", "files>", "size>"), rows))
    if parts := part_rows(manifest):
        console.print()
        shown = [[name, str(count), size_text(nbytes), ranks] for name, count, nbytes, ranks in parts]
        console.print(table_of(console, ("part", "files>", "size>", "of"), shown))
    if tensors:
        console.print()
        console.print(table_of(console, ("tensor", "dtype", "shape", "optimizer"), list(map(_row, tensors))))


def contents_text(manifest: Manifest) -> str:
    """Names the contents of a checkpoint, and the contents that retention has removed."""
    removed = f" (retention has removed: {', '.join(manifest.dropped)})" if manifest.dropped else ""
    return (", ".join(manifest.contents) or "files of the program that saved it") + removed


def part_rows(manifest: Manifest) -> list[tuple[str, int, int, str]]:
    """Returns, for each part of the step, its name, the number and size of its files, and the ranks that saved it."""
    rows = []
    for name, (count, nbytes) in manifest.part_sizes().items():
        runs = [str(first) if first == last else f"{first} to {last}" for first, last in manifest.parts[name]]
        rows.append((name, count, nbytes, f"rank {', '.join(runs)}" if runs else "no rank"))
    return rows


def origin_facts(manifest: Manifest) -> list[tuple[str, str]]:
    """Returns the run of a checkpoint and its place among the commits, as far as its manifest has them."""
    facts = []
    if manifest.run is not None:
        parent = manifest.run.parent
        began = "" if parent is None else f", which began with step {parent.step} of run {parent.run or 'unknown'}"
        facts.append(("run", f"{manifest.run.id}, from {manifest.run.root} on {manifest.run.host}{began}"))
    if manifest.commit is not None:
        before = f"after save {manifest.commit.parent}" if manifest.commit.parent else "after a fresh start"
        facts.append(("commit", f"{manifest.commit.number}, {before}"))
    return facts


def metric_facts(role_dir: Path, manifest: Manifest) -> list[tuple[str, str]]:
    """Returns one pair with all metrics, including metrics that were set after the save; no pair without metrics."""
    from mcore_ckpt.steps import metrics_of

    found = [f"{name} {value:g}" for name, value in sorted(metrics_of(role_dir, manifest).items())]
    return [("metrics", ", ".join(found))] if found else []


def model_facts(manifest: Manifest) -> list[tuple[str, str]]:
    """Returns one pair (a topic, and a text with the facts of the model), or no pair if there are no facts.

    The text leaves out every fact whose value is False, None or a list (such as one number for each layer). `--json`
    has all facts.
    """
    facts = (manifest.model or {}).items()
    told = [f"{name} {value}" for name, value in facts if value not in (None, False) and not isinstance(value, list)]
    return [("model", ", ".join(told))] if told else []


def node_facts(role_dir: Path, manifest: Manifest) -> list[tuple[str, str]]:
    """Returns which nodes have the files of a fast tier's checkpoint, as pairs of a topic and a fact."""
    from mcore_ckpt.steps import files_of_node

    held = files_of_node(role_dir, manifest)
    if held is None:
        return []
    elsewhere = [(f"on {', '.join(names)}", f"{len(files)} files") for names, files in held.by_nodes()]
    return [("here", str(held)), *elsewhere]


def _age(created: str) -> str:
    try:
        seconds = (datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(created)).total_seconds()
    except (TypeError, ValueError):
        return ""
    return f"({age_text(max(0.0, seconds))})"


def _row(tensor: Mapping[str, Any]) -> list[str]:
    shape = "" if tensor["shape"] is None else "x".join(map(str, tensor["shape"])) or "one element"
    return [tensor["name"], tensor["dtype"] or "", shape, ", ".join(tensor["optimizer"])]
