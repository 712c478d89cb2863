"""Shows the demo: bars while the demo trains, then the checkpoint, the losses and the result."""

from __future__ import annotations

import re
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from mcore_ckpt.amounts import size_text
from mcore_ckpt.cli.demo.runner import RANKS, SAVE_EVERY, Outcome, Plan, Report, Training, folder_bytes

TITLES = {"uninterrupted": "uninterrupted", "killed": "to be killed", "resumed": "resumed"}


class LiveReport(Report):
    """A Report that shows one bar for each training, with the newest loss and the time left.

    In a pipe or a log, it shows no bars, and prints a line when a training has ended.
    """

    def __init__(self, console: Console, plan: Plan) -> None:
        self.plan = plan
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.tasks = {
            name: self.progress.add_task(title, total=plan.steps, start=False, loss="")
            for name, title in TITLES.items()
        }

    def __enter__(self) -> LiveReport:
        self.progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.progress.stop()

    def update(self, training: Training) -> None:
        task = self.tasks[training.name]
        self.progress.start_task(task)
        done = max(training.losses, default=training.resumed_from or 0)
        loss = f"loss {training.losses[done]:.4f}" if training.losses else "starting"
        self.progress.update(task, completed=done, loss=loss)

    def ended(self, training: Training) -> None:
        task = self.tasks[training.name]
        self.progress.stop_task(task)
        title = TITLES[training.name]
        if training.name == "killed":
            title = f"[red]killed after step {max(training.losses)}[/]"
        elif training.resumed_from is not None:
            title = f"[green]resumed from step {training.resumed_from}[/]"
        self.progress.update(task, description=title)
        if self.progress.disable:
            self.progress.console.print(f"{title}, loss {training.losses[max(training.losses)]:.4f}")

    def exporting(self) -> None:
        self.progress.console.print("transformers loads the exported model ...")


def show_plan(console: Console, plan: Plan) -> None:
    """Says what the demo will do."""
    console.print(
        "[bold]mcore-ckpt demo[/]: a decoder of 6 million parameters learns to predict the source code of Python's "
        f"library on {RANKS} ranks (tensor parallel 2 x pipeline parallel 2). A first run trains {plan.steps} steps "
        f"without interruption. A second run saves every {SAVE_EVERY} steps, until all ranks get SIGKILL after step "
        f"{plan.kill_after}. A third run resumes it. Finally, transformers loads the exported HuggingFace model."
    )
    console.print()


def show_outcome(console: Console, outcome: Outcome) -> None:
    """Shows the checkpoint on disk, the losses side by side, and the result."""
    parts = (checkpoint_tree(outcome), loss_table(outcome), verdict(outcome), exported(outcome), sample(outcome))
    for part in parts:
        console.print()
        console.print(part)


def checkpoint_tree(outcome: Outcome) -> Tree:
    """Returns a tree that shows the newest checkpoint in full and each older checkpoint in a single line."""
    root = outcome.plan.checkpoints
    tree = Tree(f"[bold]{escape(str(root))}/[/]")
    for path in sorted(root.iterdir(), key=by_number):
        if path.is_file():
            tree.add(file_line(path))
        elif path == outcome.checkpoint:
            add_folder(tree, path)
        elif not path.name.startswith("."):
            tree.add(folder_line(path))
    return tree


def by_number(path: Path) -> list[tuple[str, int]]:
    """Returns a sort key for paths that puts step 8 before step 12."""
    return [(word, int(digits or 0)) for word, digits in re.findall(r"(\D+)(\d*)", path.name)]


def add_folder(tree: Tree, folder: Path) -> None:
    """Adds a folder and everything below it to the tree, with sizes."""
    branch = tree.add(folder_line(folder))
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            add_folder(branch, path)
        else:
            branch.add(file_line(path))


def folder_line(folder: Path) -> Text:
    """Returns a folder's name and the size of everything in it."""
    return Text.assemble((f"{folder.name}/", "bold"), (f"  {size_text(folder_bytes(folder))}", "dim"))


def file_line(path: Path) -> Text:
    """Returns a file's name and size."""
    return Text.assemble(path.name, (f"  {size_text(path.stat().st_size)}", "dim"))


def loss_table(outcome: Outcome) -> Table:
    """Returns a table of the losses in the order of training: up to the kill, then from the checkpoint to the end."""
    table = Table("step", "uninterrupted", "killed and resumed", "same?")
    killed, resumed, steps = outcome.killed.losses, outcome.resumed.losses, outcome.plan.steps
    start = outcome.resumed.resumed_from or 0
    for step in sorted(killed)[max(0, start - 2) :]:
        add_loss(table, outcome, step, killed[step])
    table.add_section()
    table.add_row("", "", f"[red]killed[/], back to step {start}", "")
    table.add_section()
    shown = [step for step in sorted(resumed) if step <= max(killed) + 1 or step > steps - 2]
    for before, step in zip([start, *shown], shown, strict=False):
        if step != before + 1:
            table.add_row("...", "...", "...", "")
        add_loss(table, outcome, step, resumed[step])
    return table


def add_loss(table: Table, outcome: Outcome, step: int, loss: float) -> None:
    """Adds one row: a loss of an interrupted run and the expected loss, with all digits."""
    expected = outcome.uninterrupted.losses[step]
    same = "[green]yes[/]" if loss.hex() == expected.hex() else "[red]NO[/]"
    table.add_row(str(step), repr(expected), repr(loss), same)


def verdict(outcome: Outcome) -> str:
    """Returns a text that says whether the training resumed with the same losses."""
    lost = max(outcome.killed.losses) - (outcome.resumed.resumed_from or 0)
    steps = "step" if lost == 1 else "steps"
    if outcome.identical:
        return (
            f"[bold green]Identical to the last bit[/]: killed with {lost} unsaved {steps}, resumed from step "
            f"{outcome.resumed.resumed_from}, and all {outcome.plan.steps} losses are as in the uninterrupted run."
        )
    return (
        "[bold red]Not identical[/]: the losses differ from the uninterrupted run's losses, so some state was not "
        f"restored. Logs and checkpoints are in {escape(str(outcome.plan.directory))}."
    )


def exported(outcome: Outcome) -> str:
    """Returns one sentence that says whether the HuggingFace model is the model that was trained."""
    megatron, transformers = outcome.resumed.held_out_loss, outcome.generated.loss
    if megatron is None:
        return "[bold red]The last stage has not reported its loss on held-out text.[/]"
    losses = f"loss on held-out text: {transformers:.6f} in transformers, {megatron:.6f} in Megatron"
    if outcome.is_exported:
        return f"[bold green]The exported model is the trained one[/]; {losses}."
    return f"[bold red]The exported model is not the trained one[/]; {losses}."


def sample(outcome: Outcome) -> Text:
    """Returns the text that transformers generated with the exported model."""
    return Text.assemble(
        ("Text that transformers generated with the exported model: ", "dim"), repr(outcome.generated.text)
    )
