"""`mcore-ckpt watch`: shows live what is being saved below a root, by whom, how fast, and how long it still takes."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from mcore_ckpt.amounts import duration_text, size_text
from mcore_ckpt.cli.arguments import add_json, expanded_path, step_number, taken
from mcore_ckpt.cli.list_command import STEP_HEADINGS, save_as_json, step_as_json, step_row
from mcore_ckpt.cli.results import is_terminal, result_console
from mcore_ckpt.cli.tables import table_of
from mcore_ckpt.errors import CheckpointError, InvalidArgumentError

if TYPE_CHECKING:
    from mcore_ckpt.tools.examine.watch import Change, Look, SaveProgress

HELP = "show live what is being saved"
DESCRIPTION = """\
Shows live what trainers on any host save below a folder: which step and role, by which process, how much is written,
how fast, and about how long it still takes; and the newest steps. It only reads. On a terminal it redraws a table,
elsewhere it prints a line for each change. It ends at Ctrl-C (status 130), with --once after the first look, and with
--until at that step (status 0). The size of the role's previous checkpoint counts as the total, so the first save of a
role has no total.
"""

EXAMPLES = (
    "watch checkpoints",
    "watch checkpoints --once --json # for a script",
    "watch checkpoints --until 100 # until step 100 is complete",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", type=expanded_path, metavar="ROOT", help="folder of steps")
    parser.add_argument("--last", type=int, default=5, metavar="N", help="show the N newest steps (5)")
    parser.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="how often to look (2)")
    parser.add_argument("--once", action="store_true", help="look once, and end")
    parser.add_argument(
        "--until", type=step_number, metavar="STEP", help="end once this step, or a newer one, is complete"
    )
    add_json(parser, "print a JSON object in one line for each change, and nothing else")


def run(args: argparse.Namespace) -> int:
    """Watches the root. Returns 0 when --once or --until end it."""
    if args.last < 1 or not 0 < args.interval < threading.TIMEOUT_MAX:
        raise InvalidArgumentError(f"--last {args.last} --interval {args.interval:g}: use finite numbers above 0")
    if args.once and args.until is not None:
        raise InvalidArgumentError("--once ends after the first look, so leave out --until")
    from mcore_ckpt.tools.examine.watch import Watch

    watch = Watch(taken(args.root, "watch"), args.last)
    try:
        if args.json or not is_terminal():
            _follow(watch.look, _Lines(args.json).show, args)
            return 0
        console = result_console()
        if args.once:
            console.print(_tables(console, watch.look()))
            return 0
        with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
            _follow(watch.look, lambda found: live.update(_tables(console, found), refresh=True), args)
    except OSError as error:
        raise CheckpointError(f"{args.root}: {error}") from error
    return 0


def _follow(look: Callable[[], Look], show: Callable[[Look], None], args: argparse.Namespace) -> None:
    """Looks and shows the result, again and again, until `--once` or `--until` end the command."""
    while True:
        found = look()
        show(found)
        is_reached = args.until is not None and found.newest is not None and found.newest >= args.until
        if args.once or is_reached:
            return
        time.sleep(args.interval)


def _tables(console: Console, found: Look) -> RenderableType:
    now = datetime.datetime.now(datetime.UTC)
    parts: list[RenderableType] = []
    if found.saves:
        headings = ("saving", "role", "by", "written>", "of>", "speed>", "running>", "left>")
        parts += [table_of(console, headings, [_save_row(save) for save in found.saves]), ""]
    if found.steps:
        parts += [table_of(console, STEP_HEADINGS, [step_row(step, now) for step in found.steps]), ""]
    parts.append(Text(_trainers(found), overflow="fold"))
    return Group(*parts)


def _save_row(progress: SaveProgress) -> list[str]:
    save = progress.save
    dead = " (died)" if save.life.value == "dead" else ""
    return [
        str(save.step),
        save.role or "",
        f"{save.by}{dead}",
        size_text(progress.written),
        "" if progress.total is None else size_text(progress.total),
        _speed(progress),
        duration_text(progress.seconds),
        _left(progress),
    ]


def _speed(progress: SaveProgress) -> str:
    return "" if progress.rate is None or progress.save.life.value == "dead" else f"{size_text(progress.rate)}/s"


def _left(progress: SaveProgress) -> str:
    return "" if progress.left_s is None or progress.save.life.value == "dead" else duration_text(progress.left_s)


def _trainers(found: Look) -> str:
    if not found.trainers:
        return "no trainer holds a role here"
    states = {"alive": "alive", "unknown": "maybe alive", "dead": "dead"}
    return "; ".join(
        f"{role}: {owner} ({states[life.value]})" for role, (owner, life) in sorted(found.trainers.items())
    )


class _Lines:
    """Prints a line for each change."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._before: Look | None = None

    def show(self, found: Look) -> None:
        from mcore_ckpt.tools.examine.watch import changes

        new = changes(self._before, found)
        if self._as_json and (new or self._before is None):
            print(json.dumps(_as_json(found, new)))
        elif not self._as_json:
            for change in new:
                print(_line(change))
        if self._before is None and not self._as_json:
            print(_trainers(found))
        self._before = found
        sys.stdout.flush()


def _line(change: Change) -> str:
    from mcore_ckpt.tools.examine.step_list import ListedStep

    step = change.step
    name = step.name if isinstance(step, ListedStep) else f"step {step}"
    whose = f"{name}  {change.role}  " if change.role else f"{name}  "
    if isinstance(step, ListedStep):
        if change.what == "committed":
            return f"{whose}committed"
        now = datetime.datetime.now(datetime.UTC)
        *_, size, age, state, _ = step_row(step, now)
        return f"{whose}{state}  {size}  {age}".rstrip()
    progress = change.progress
    if progress is None:
        return f"{whose}{change.what}"
    if change.what == "written":
        of = f"{size_text(progress.written)} of {size_text(progress.total or 0)}"
        left = _left(progress)
        return f"{whose}{progress.percent} % written: {of}, {_speed(progress)}{f', {left} left' if left else ''}"
    words = {"saving": "is being saved by", "died": "is not saved: died:", "ended": "was not committed by"}
    return f"{whose}{words[change.what]} {progress.save.by}"


def _as_json(found: Look, new: list[Change]) -> dict[str, Any]:
    return {
        "newest": found.newest,
        "steps": [step_as_json(step) for step in found.steps],
        "saves": [
            {
                **save_as_json(progress.save),
                "written": progress.written,
                "total": progress.total,
                "seconds": progress.seconds,
                "rate": progress.rate,
                "left_s": progress.left_s,
            }
            for progress in found.saves
        ],
        "trainers": [
            {"role": role, "host": owner.host.partition(" ")[0], "pid": owner.pid, "life": life.value}
            for role, (owner, life) in sorted(found.trainers.items())
        ],
        "changes": [{"what": change.what, "step": change.number, "role": change.role} for change in new],
    }
