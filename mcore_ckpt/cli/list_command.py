"""`mcore-ckpt list`: shows the steps below a folder, which steps are complete, and why other steps are not."""

from __future__ import annotations

import argparse
import datetime
import json
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from mcore_ckpt.amounts import age_text, size_text
from mcore_ckpt.cli.arguments import add_json, expanded_path, taken
from mcore_ckpt.cli.results import is_terminal, result_console
from mcore_ckpt.cli.tables import Cell, table_of
from mcore_ckpt.errors import CheckpointError

if TYPE_CHECKING:
    from mcore_ckpt.steps import NodeFiles, RunningSave
    from mcore_ckpt.tools.examine.step_list import ListedStep, StepList

HELP = "show which steps there are"
DESCRIPTION = """\
Lists the steps below a folder, the oldest first, and the step that the tracker names. It reads only the manifests, and
checks that the files in them exist in their full size; use `mcore-ckpt verify` to check the bytes. If ROOT itself has
no steps, a folder of steps right above or below it is taken. On a terminal it prints a table, elsewhere a line for each
step."""

EXAMPLES = (
    "list checkpoints",
    "list checkpoints --remote s3://bucket/run # also the steps in a remote store",
    "list checkpoints --json",
)

# The headings of the cells of `step_row`.
STEP_HEADINGS = ("step", "roles", "size>", "age>", "state", "place")

_STYLES = {"complete": "green", "partial": "green", "saving": "yellow", "damaged": "red", "incomplete": "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", type=expanded_path, metavar="ROOT", help="folder of steps")
    parser.add_argument(
        "--remote", metavar="URL", help="also list the steps in this remote store, such as s3://bucket/prefix"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Lists the steps. Returns 0, even if no step is complete."""
    from mcore_ckpt.tools.examine.step_list import step_list_of

    try:
        found = step_list_of(taken(args.root, "list"), args.remote)
    except OSError as error:
        raise CheckpointError(f"{args.root}: {error}") from error
    if args.json:
        print(json.dumps({"tracker": found.tracker, "steps": [step_as_json(step) for step in found.steps]}))
        return 0
    console = result_console()
    if is_terminal():
        _show_table(console, found)
    else:
        _show_lines(console, found)
    last = next((step for step in found.steps if step.newest), None)
    newest = "no step is complete" if last is None else f"newest complete step: {last.step}"
    if last is not None and last.state == "partial":
        newest += f", but this node's folder has only {last.reason}"
    tracked = "none" if found.tracker is None else found.tracker
    console.print(f"{newest}; the tracker names {tracked}")
    if last is not None and last.parent is not None:
        began = f"step {last.parent.step} of run {last.parent.run or 'unknown'}"
        console.print(f"run {last.run} began with {began}")
    return 0


def _show_lines(console: Console, found: StepList) -> None:
    for step in found.steps:
        if step.counts:
            roles = ", ".join(step.roles)
            marks = _marks(step)
            if "remote" in step.places:
                marks.append("also remote" if "local" in step.places else "only remote")
            if step.of_nodes is not None:
                marks.append(str(step.of_nodes))
            line = f"{step.name}  {size_text(step.nbytes):>10}  {step.created}  {'  '.join((roles, *marks))}"
            console.print(line)
        elif step.state == "saving":
            console.print(f"{step.name}  is being saved{_savers(step)}", style="yellow")
        else:
            what = "is damaged" if step.state == "damaged" else "is not complete"
            console.print(f"{step.name}  {what}: {step.reason}{_deaths(step)}", style="red")


def _show_table(console: Console, found: StepList) -> None:
    now = datetime.datetime.now(datetime.UTC)
    rows = [step_row(step, now) for step in found.steps]
    if rows:
        console.print(table_of(console, STEP_HEADINGS, rows))


def step_row(step: ListedStep, now: datetime.datetime) -> list[Cell]:
    """Returns a step's name, roles, size, age, state and place, for people."""
    return [
        step.name,
        ", ".join(step.roles),
        size_text(step.nbytes) if step.roles else "",
        age_text(step.age_s(now)),
        _state(step),
        ", ".join(step.places),
    ]


def _state(step: ListedStep) -> Text:
    text = Text(", ".join((step.state, *_marks(step))), style=_STYLES[step.state])
    if step.state == "saving":
        text.append(_savers(step))
    elif step.state == "partial":
        text.append(f": {step.reason}")
    elif step.state in ("damaged", "incomplete"):
        text.append(f": {step.reason.removeprefix(f'{step.path}: ')}{_deaths(step)}")
    return text


def _marks(step: ListedStep) -> list[str]:
    is_saved_again = step.counts and any(map(_may_be_alive, step.saves))
    marks = {
        "newest": step.newest,
        "abandoned": step.abandoned,
        "pinned": step.pinned,
        "being saved again": is_saved_again,
    }
    without = [f"without {word}" for word in step.dropped]
    metrics = [f"{name} {value:g}" for name, value in sorted(step.metrics.items())]
    return [mark for mark, holds in marks.items() if holds] + without + metrics


def _savers(step: ListedStep) -> str:
    names = dict.fromkeys(save.by for save in step.saves if _may_be_alive(save))
    return f" by {', '.join(names)}" if names else ""


def _deaths(step: ListedStep) -> str:
    names = ", ".join(dict.fromkeys(save.by for save in step.saves if not _may_be_alive(save)))
    return f"; {names} died while saving it" if names else ""


def _may_be_alive(save: RunningSave) -> bool:
    return save.life.value != "dead"


def step_as_json(step: ListedStep) -> dict[str, Any]:
    return {
        "step": step.step,
        "path": str(step.path),
        "complete": step.state == "complete",
        "reason": step.reason or None,
        "roles": list(step.roles),
        "declared": list(step.declared),
        "pinned": step.pinned,
        "bytes": step.nbytes,
        "created": step.created or None,
        "state": step.state,
        "newest": step.newest,
        "abandoned": step.abandoned,
        "commit": step.commit,
        "run": step.run,
        "parent": step.parent and vars(step.parent),
        "metrics": dict(step.metrics),
        "dropped": list(step.dropped),
        "places": list(step.places),
        "nodes": None if step.of_nodes is None else nodes_as_json(step.of_nodes),
        "saves": [save_as_json(save) for save in step.saves],
    }


def nodes_as_json(found: NodeFiles) -> dict[str, Any]:
    """Returns, as JSON values, how much of a checkpoint a node's folder has."""
    return {"here": found.whole_nodes, "of": found.nodes, "files_here": len(found.here)}


def node_files_as_json(found: NodeFiles) -> dict[str, Any]:
    """Returns what `nodes_as_json` returns, and which nodes have the other files."""
    elsewhere = [{"nodes": list(names), "files": [file.path for file in files]} for names, files in found.by_nodes()]
    return {**nodes_as_json(found), "elsewhere": elsewhere}


def save_as_json(save: RunningSave) -> dict[str, Any]:
    """Returns, as JSON values, a save that has not committed."""
    return {
        "step": save.step,
        "role": save.role,
        "host": None if save.owner is None else save.owner.host.partition(" ")[0],
        "pid": None if save.owner is None else save.owner.pid,
        "life": save.life.value,
    }
