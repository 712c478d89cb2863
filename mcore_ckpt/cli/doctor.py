"""`mcore-ckpt doctor`: tries what the file system of a folder can do, on one host or on all hosts of a job."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_ckpt.cli.arguments import add_json, at_least, command_agreement, expanded_path, taken
from mcore_ckpt.cli.progress import progress_in, progress_of_bytes
from mcore_ckpt.cli.results import result_console, show_result
from mcore_ckpt.cli.signals import cleaning_up_at_sigterm
from mcore_ckpt.errors import AgreementError, InvalidArgumentError

if TYPE_CHECKING:
    from mcore_ckpt.tools.examine.doctor.examine import Report
    from mcore_ckpt.tools.examine.doctor.findings import Finding

HELP = "try what a folder's file system can do"
DESCRIPTION = """\
Tries what saving and loading rely on, in a hidden folder below ROOT, which it removes, and measures speed and free
space. Shows what works, what is emulated and at what cost, and what to change. Under torchrun all ranks take part, and
it also shows whether they see one file system, each other's locks and the same time. The exit status is 0 if
checkpoints can be saved in ROOT, 1 if not, and 2 if there is no such folder."""

EXAMPLES = (
    "doctor checkpoints # on this host",
    "doctor checkpoints --megabytes 0 # without measuring the speed",
    "doctor checkpoints --json",
)

_STYLES = {"fine": "", "emulated": "yellow", "slow": "yellow", "risk": "yellow", "bad": "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", type=expanded_path, metavar="ROOT", help="folder of steps")
    text = (
        "size of the two files that measure the speed; less if little space is free; 0: not measured (256 if not given)"
    )
    parser.add_argument("--megabytes", type=at_least(0), default=256, metavar="N", help=text)
    text = "how long ranks wait for each other (60 if not given)"
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help=text)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Examines a folder. Returns 0 if checkpoints can be saved in the folder, otherwise 1."""
    if not 0 < args.timeout < math.inf:
        raise InvalidArgumentError(f"--timeout {args.timeout:g}: use more than 0 seconds")
    is_first = os.environ.get("RANK", "0") == "0"
    with cleaning_up_at_sigterm(), progress_of_bytes(args.json or not is_first) as bar:
        report = _examine(args.root.absolute(), args, progress_in(bar, "measure"))
    if report is None:
        return 0  # only rank 0 reports
    show_result(report, _as_json, _show, args.json)
    return 0 if report.is_usable else 1


def _examine(root: Path, args: argparse.Namespace, progress: Callable[[int, int], None]) -> Report | None:
    """Returns the report on rank 0, None on the other ranks."""
    from mcore_ckpt.ranks import single_process_agreement
    from mcore_ckpt.tools.examine.doctor.examine import examine

    try:
        with command_agreement("doctor", args.timeout, args.timeout) as agreement:
            if agreement.world_size == 1:
                taken(root, "doctor")
            return examine(root, agreement, args.megabytes, progress=progress)
    except AgreementError as error:
        if os.environ.get("RANK") != "0":
            raise
        # Not all ranks have joined. Rank 0 examines the folder alone, and reports which ranks are missing.
        taken(root, "doctor")
        return examine(root, single_process_agreement("doctor", args.timeout), args.megabytes, error, progress)


def _show(report: Report) -> None:
    console = result_console()
    width = max(len(finding.topic) for finding in report.findings)
    console.print(str(report.root))
    for finding in report.findings:
        line = f"{finding.severity:8}  {finding.topic:{width}}  {_where(report, finding)}{finding.fact}"
        console.print(line, style=_STYLES[finding.severity])
        for word, text in (("cost", finding.cost), ("change", finding.advice)):
            if text:
                console.print(f"{'':8}  {'':{width}}  {word}: {text}")
    counts = [
        f"{sum(finding.severity == name for finding in report.findings)} {name}"
        for name in _STYLES
        if any(finding.severity == name for finding in report.findings)
    ]
    verdict = "checkpoints can be saved here" if report.is_usable else "checkpoints CANNOT be saved here"
    console.print(f"{verdict}: {', '.join(counts)}")


def _where(report: Report, finding: Finding) -> str:
    """Names the ranks of a finding, with their hosts. Returns an empty text if the finding is about all ranks."""
    if not finding.ranks:
        return ""
    names = [f"{rank} ({report.hosts[rank]})" if rank < len(report.hosts) else str(rank) for rank in finding.ranks[:8]]
    more = f" and {len(finding.ranks) - 8} more" if len(finding.ranks) > 8 else ""
    return f"rank {', '.join(names)}{more}: "


def _as_json(report: Report) -> dict[str, Any]:
    return {
        "root": str(report.root),
        "usable": report.is_usable,
        "ranks": report.ranks,
        "hosts": list(report.hosts),
        "mount": None if report.mount is None else asdict(report.mount),
        "findings": [finding.as_record() for finding in report.findings],
    }
