"""Logs one line about a root when a trainer starts.

Nothing is written and nothing is measured: a manager that only loads must not change the disk, and a start must not
wait. So the line states the abilities of other file systems of this type that were tried (docs/doctor.md), and calls an
untried type unknown. `mcore-ckpt doctor` tries the folder itself.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from mcore_ckpt.io.mounts import Mount, mount_of
from mcore_ckpt.tools.examine.doctor.findings import Finding, Severity
from mcore_ckpt.tools.examine.doctor.free_space import finding_of_space, free_space
from mcore_ckpt.tools.examine.doctor.known import abilities_of, known_of

logger = logging.getLogger(__name__)


def log_root(root: Path) -> None:
    """Logs the line about a root: as a warning if something should be changed. Raises nothing.

    A root that does not exist yet is on the file system of the nearest folder above it.
    """
    try:
        level, line = start_line(root)
    except Exception as error:  # a trainer must start even if this line cannot be made
        logger.debug("%s: the file system could not be examined: %s", root, error)
    else:
        logger.log(level, "%s", line)


def start_line(root: Path) -> tuple[int, str]:
    """Returns the level and the text of the line. Raises OSError, or CheckpointError for a damaged step."""
    folder = next(each for each in (root, *root.parents) if each.is_dir())
    mount = mount_of(folder)
    space = free_space(folder)
    findings = known_of(mount)
    if folder == root and not os.access(root, os.W_OK | os.X_OK):
        findings.append(Finding("folder", Severity.RISK, "this user cannot write here", "saves fail"))
    findings.append(finding_of_space(space))
    noted = [finding for finding in findings if finding.severity is not Severity.FINE]
    parts = [_told(findings[0]), _ability(mount), *(_told(finding) for finding in findings[1:] if finding in noted)]
    if findings[-1] not in noted:
        parts.append(str(space))
    text = f"checkpoints in {root}: {'; '.join(parts)}"
    return (logging.WARNING if noted else logging.INFO), f"{text}. `mcore-ckpt doctor {root}` tries all of it"


def _ability(mount: Mount | None) -> str:
    able = None if mount is None else abilities_of(mount)
    if able is None:
        return "O_DIRECT, exchange of folders and flock unknown"
    states = {"O_DIRECT": able.direct, "exchange of folders": able.exchange, "flock": able.locks}
    has, lacks = (", ".join(name for name, works in states.items() if works is wanted) for wanted in (True, False))
    return f"has {has}, no {lacks}" if lacks else f"has {has}"


def _told(finding: Finding) -> str:
    return ", ".join(filter(None, (finding.fact, finding.cost))) + (f" ({finding.advice})" if finding.advice else "")
