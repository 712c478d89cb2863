"""Reads AReaL's own recovery files (1.0.4), so that a run can move to this package.

The files stay, so the run can also move back.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import PickleError, Unpickler
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.integrations.areal.recover_info import (
    JSON_BYTES,
    JSON_FILES,
    Place,
    Progress,
    check_step,
    refuse_position,
)
from mcore_ckpt.io import make_folder, parse_json, read_small, sync_dir

DATALOADER_FILE = "dataloader_info.pkl"
# The subfolder of recover_info into which AReaL's own files are moved once a step of ours is complete.
_MOVED_TO = "of_areal"


def found(folder: Path) -> list[str]:
    """Returns the names of AReaL's own files in a recover_info folder. The file STEP_FILE may also be ours."""
    return [name for name in (*JSON_FILES.values(), DATALOADER_FILE) if os.path.lexists(folder / name)]


def read_stock(folder: Path, place: Place, begins_anew: bool = False) -> Progress:
    """Reads the recover_info that AReaL wrote. Never executes code from AReaL's pickle.

    If the pickle has a list of data loader states, one for each rank, the result has the state of this rank.

    Raises:
        CheckpointCorruptError: a file is missing, damaged, or holds more than plain values.
        CheckpointMismatchError: another number of ranks wrote the files, and `begins_anew` is not set. (AReaL refuses
            such a load, too.)
    """
    values: dict[str, Any] = {
        field: parse_json(_read(folder / name), folder / name) for field, name in JSON_FILES.items()
    }
    check_step(values["step"], folder / JSON_FILES["step"])
    dataloader = _unpickled(folder / DATALOADER_FILE)
    states = dataloader if isinstance(dataloader, list) else [dataloader]
    if len(states) == place.world:
        dataloader = states[place.rank]
    elif len(states) == place.size == 1:
        dataloader = states[0]
    else:
        refuse_position(str(folder / DATALOADER_FILE), place, begins_anew)
        dataloader = None
    for timer in ("checkpoint", "evaluator"):
        values[timer] = _schedule(values[timer])
    # AReaL has one counter for all roles, but our Saver one for each role, so all counters begin anew.
    values["saver"] = {}
    return Progress(**values, dataloader=dataloader)


def move_aside(folder: Path) -> None:
    """Moves AReaL's files aside, so that AReaL never pairs our step_info.json with its old pickle. Raises OSError."""
    target = folder / _MOVED_TO
    make_folder(target)
    for name in found(folder):
        os.rename(folder / name, target / name)
    sync_dir(target)
    sync_dir(folder)


def _schedule(state: Mapping[str, Any]) -> dict[str, Any]:
    """Translates `EpochStepTimeFreqCtl.state_dict` for a Schedule. AReaL stores no seconds, so `secs` starts at 0."""
    return {"epochs": _counted(state.get("epoch")), "steps": _counted(state.get("step")), "secs": 0.0}


def _counted(control: Any) -> int:
    """Returns how far a `FrequencyControl` had counted since it last fired, from its `state_dict`."""
    counts = [control.get(name) for name in ("steps", "last_steps")] if isinstance(control, dict) else [None]
    known = [count for count in counts if isinstance(count, int)]
    return max(0, known[0] - known[1]) if len(known) == 2 else 0


def _read(path: Path) -> bytes:
    try:
        return read_small(path, JSON_BYTES)
    except OSError as error:
        raise CheckpointCorruptError(f"{path}: cannot be read: {error}") from error


def _unpickled(path: Path) -> Any:
    try:
        return Unpickler(_read(path)).load()
    except PickleError as error:
        raise CheckpointCorruptError(
            f"{path}: is damaged, or contains more than plain values: {error}. No code in the file was executed. If "
            "you trust the file, pickle its contents again as plain dicts, lists and numbers"
        ) from None
