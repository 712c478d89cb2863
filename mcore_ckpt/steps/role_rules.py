"""Keeps each role's rules of retention in a file below the root.

A step is deleted as a whole, so the retention of one role also deletes the other roles of the step. If the roles have
different rules, such as in verl, where each worker has its own options, no role may delete what the rules of another
role keep. The roles can be separate programs, and one of them may start later than the other roles. So each role notes
its rules in a file. Only steps of several roles need such files. A role whose rules keep everything has no file, and
leaves the decision to the other roles.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import CheckpointCorruptError, InvalidArgumentError
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io import limits
from mcore_ckpt.io.files import read_small, replace_file, sync_dir
from mcore_ckpt.steps.retention import PreservationPolicy

logger = logging.getLogger(__name__)


def note_rules(root: Path, role: str, policy: PreservationPolicy) -> None:
    """Durably notes a role's rules for the other roles. Only the holder of the role's trainer lock calls this function.

    Raises OSError.
    """
    path = file_names.rules_file(root, role)
    if policy.max_to_keep is None and policy.optimizer_for_last is None:
        if path.exists():
            path.unlink()
            sync_dir(root)
    elif _read(path) != policy:
        replace_file(path, fields.encode(asdict(policy)))


def rules_of_others(root: Path, role: str) -> Mapping[str, PreservationPolicy]:
    """Returns the rules that roles other than `role` have noted. Raises OSError."""
    found = {}
    for path in root.iterdir() if root.is_dir() else ():
        other = file_names.role_of_rules_file(path.name)
        rules = None if other in (None, role) else _read(path)
        if other is not None and rules is not None:
            found[other] = rules
    return found


def _read(path: Path) -> PreservationPolicy | None:
    """Returns the rules in a file; None if the file is missing or damaged. Raises OSError."""
    try:
        return PreservationPolicy(**fields.decode(read_small(path, limits.SMALL_BYTES)))
    except FileNotFoundError:
        return None
    except CheckpointCorruptError as error:
        if isinstance(error.__cause__, OSError):  # the error may be temporary
            raise error.__cause__ from None
        reason: Exception = error
    except (fields.FieldError, InvalidArgumentError, TypeError) as error:
        reason = error
    logger.warning("%s: is damaged, so these rules do not count until the role's next save: %s", path, reason)
    return None
