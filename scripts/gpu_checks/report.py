"""Writes the block for docs/benchmarks.md."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from importlib import metadata

import torch

from gpu_checks import machine
from gpu_checks.outcome import Outcome

PACKAGES = ("megatron-core", "transformer-engine")


def block(outcomes: Mapping[str, Outcome]) -> str:
    """Returns a section in Markdown: the date, the machine, and a table of the checks by their titles.

    A text that a check returns after an empty line is a table of its own, and comes after that of the checks.
    """
    lines = [f"### Seen on a GPU, {datetime.date.today().isoformat()}", "", f"{setting()}.", ""]
    lines += ["| check | outcome | found |", "|---|---|---|"]
    tables = []
    for title, outcome in outcomes.items():
        found, _, table = str(outcome.found).partition("\n\n")
        lines.append(f"| {_cell(title)} | {outcome.status} | {_cell(found)} |")
        if table:
            tables += ["", table]
    return "\n".join(lines + tables)


def setting() -> str:
    """Returns what the checks ran on: machine, driver, torch and the packages that they use."""
    cuda = f"torch {torch.__version__} (CUDA {torch.version.cuda})"
    return ", ".join([machine.describe(), cuda, *(f"{name} {_version(name)}" for name in PACKAGES)])


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
