"""Saves and reads `recover_info`, the state of AReaL's trainer that is not in the engines, as one role of each step.

The files have the names that AReaL (1.0.4, `RecoverInfo.dump`) gives them. Only the data position is different: a `.pt`
file of plain values replaces AReaL's pickle.
"""

from __future__ import annotations

import json
import logging
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError, UnsupportedError
from mcore_ckpt.io import parse_json
from mcore_ckpt.ranks import Agreement
from mcore_ckpt.state import from_stored, to_stored
from mcore_ckpt.steps import RoleReader, RoleWriter, commit_role

logger = logging.getLogger(__name__)

INFO_ROLE = "recover_info"
STEP_FILE = "step_info.json"
# The largest size, in bytes, of a JSON file or an AReaL pickle that is read into memory.
JSON_BYTES = 256 << 20
JSON_FILES = {
    "step": STEP_FILE,
    "saver": "saver_info.json",
    "evaluator": "evaluator_info.json",
    "stats_logger": "stats_logger_info.json",
    "checkpoint": "checkpoint_info.json",
}
# The first letters of the names of all files that have data loader states.
_DATALOADER = "dataloader_info"
STEP_FIELDS = ("epoch", "epoch_step", "global_step", "steps_per_epoch")


@dataclass(frozen=True)
class Place:
    """Where a rank that runs the trainer stands. AReaL's single controller, if used, is the only such rank.

    Attributes:
        rank, world: the rank's number among the ranks that run the trainer, and how many such ranks there are.
        dp, size: the rank's data-parallel rank, and how many data-parallel ranks there are. Each data-parallel rank
            reads other samples.
    """

    rank: int
    world: int
    dp: int
    size: int


@dataclass(frozen=True)
class Progress:
    """The progress of a training, as one rank stores it.

    Attributes:
        step: the fields of AReaL's StepInfo.
        saver, evaluator, stats_logger: the states of AReaL's objects with these names, as JSON values.
        checkpoint: the state of the schedule that says when to save next, as JSON values.
        dataloader: the state of this rank's data loader: plain values and tensors. After a load, None if the loader
            begins an epoch.
        dp, size: the rank's place, as in `Place`.
    """

    step: Mapping[str, int]
    saver: Mapping[str, Any]
    evaluator: Mapping[str, Any]
    stats_logger: Mapping[str, Any]
    checkpoint: Mapping[str, Any]
    dataloader: Any
    dp: int = 0
    size: int = 1


def dataloader_file(rank: int, world: int, dp: int, size: int) -> str:
    """Returns the name of the file that has one rank's data loader state.

    Each rank has a file, because the positions can differ. The name has the data-parallel place. So a load under
    another layout can choose the file of a place by the names in the manifest, and opens no other file.
    """
    return f"{_DATALOADER}.pt" if world == 1 else f"{_DATALOADER}_{rank:05d}_dp{dp}_of{size}.pt"


def encode(progress: Progress, rank: int) -> dict[str, bytes]:
    """Returns the contents of the JSON files, by file name. Raises UnsupportedError if JSON cannot store a value."""
    encoded = {}
    for field, name in JSON_FILES.items():
        try:
            encoded[name] = json.dumps(getattr(progress, field), indent=4).encode()
        except (TypeError, ValueError) as error:
            raise UnsupportedError(
                f"rank {rank}: the {field} state cannot be stored in {name}: {error}. Use numbers, strings, lists and "
                "dicts"
            ) from error
    return encoded


def write(
    agreement: Agreement,
    role_dir: Path,
    step: int,
    roles: Sequence[str],
    read_progress: Callable[[], Progress],
    before: Callable[[], object],
    may_commit: Callable[[], object] = lambda: None,
) -> None:
    """Commits `recover_info` of a step. The step is complete once its engines are committed, too.

    Every rank calls this function.

    Args:
        agreement: connects this rank with the other ranks that write `recover_info`.
        role_dir, step: the folder `recover_info` in the step's folder, and the step's number.
        roles: the engines that the step consists of.
        read_progress: returns this rank's progress. Only rank 0's JSON states are stored. If the function raises on one
            rank, all ranks raise.
        before: a function that rank 0 calls before anything is written. If the function raises, nothing is committed.
        may_commit: a function that rank 0 calls right before the commit. If the function raises, nothing is
            committed.

    Raises:
        UnsupportedError: a state holds more than plain values.
        CheckpointError: the commit failed. All ranks raise the same type.
    """

    with agreement.call(f"saving {role_dir.name} of step {step}"):
        # Read the progress now: the agreement may do its work on another thread, which must not use the trainer's
        # objects.
        read_now = _called(read_progress)

        def write_files(files: RoleWriter) -> None:
            progress = read_now()
            state = to_stored(progress.dataloader, "dataloader.state_dict()")
            values = {"dataloader": state, "dp": progress.dp, "size": progress.size}
            name = dataloader_file(files.rank, files.world_size, progress.dp, progress.size)
            files.write_values(name, values)
            if files.rank == 0:
                for path, data in encode(progress, files.rank).items():
                    files.write(path, data)

        commit_role(agreement, role_dir, step, roles, write_files, kind=INFO_ROLE, before=before, may_commit=may_commit)


def _called(read_progress: Callable[[], Progress]) -> Callable[[], Progress]:
    """Calls a function now. Returns a function that returns this call's result, or raises this call's error."""
    failures: list[Exception] = []
    try:
        progress = read_progress()
    except Exception as error:
        failures.append(error)

    def returned() -> Progress:
        if failures:
            raise failures.pop()  # removed, because the error's traceback keeps the callers' objects alive
        return progress

    return returned


def read(folder: Path, place: Place, begins_anew: bool = False) -> Progress:
    """Reads what `write` committed, and checks the size and CRC of every file that it reads.

    The data loader's state is taken from the saved rank with the same data-parallel place. If the data-parallel size
    has changed, no saved state fits. The state is then None, provided that all saved loaders had finished an epoch, or
    that `begins_anew` is set.

    Raises:
        CheckpointNotFoundError: nothing is committed in the folder.
        CheckpointCorruptError: a file is missing or damaged, or its contents do not fit its name.
        CheckpointMismatchError: the data-parallel size has changed within an epoch, and `begins_anew` is not set. Only
            rank 0 raises this error, because otherwise each rank would open the files of all ranks. The caller tells
            the other ranks.
    """
    role = RoleReader(folder)
    values = {field: parse_json(role.read(name, JSON_BYTES), folder / name) for field, name in JSON_FILES.items()}
    check_step(values["step"], folder / STEP_FILE)
    if values["step"]["global_step"] != role.manifest.step:
        raise CheckpointCorruptError(
            f"{folder / STEP_FILE}: belongs to another step than the manifest, which is of step {role.manifest.step}"
        )
    return Progress(**values, dataloader=_dataloader(role, place, begins_anew), dp=place.dp, size=place.size)


def _dataloader(role: RoleReader, place: Place, begins_anew: bool) -> Any:
    world = role.world_size
    files = [record.path for record in role.manifest.files if record.path.startswith(_DATALOADER)]
    own_first = sorted(range(world), key=lambda saved: saved != place.rank)
    wanted = [dataloader_file(rank, world, place.dp, place.size) for rank in own_first]
    # Also look for the names of older files, which do not have the place.
    wanted += [f"{_DATALOADER}_{rank:05d}.pt" for rank in own_first]
    for name in filter(set(files).__contains__, wanted):
        values, path = _values(role, name), role.role_dir / name
        # The oldest files do not contain the place. The place counts as unchanged if the number of ranks is unchanged.
        known = (values["dp"], values["size"]) if "size" in values else None
        if known == (place.dp, place.size) or (known is None and world == place.world):
            return _opened(values["dataloader"], path)
        if known is None or known[1] != place.size:
            break  # all ranks were saved with this size, so no other file fits
    # Only rank 0 opens the files of all ranks.
    if place.rank == 0:
        states = (_opened(_values(role, name)["dataloader"], role.role_dir / name) for name in files)
        if not all(isinstance(state, Mapping) and state.get("_iterator_finished") is True for state in states):
            refuse_position(f"{role.role_dir}", place, begins_anew)
    return None


def _values(role: RoleReader, name: str) -> dict[str, Any]:
    values = role.read_values(name)
    if "dataloader" not in values:
        raise CheckpointCorruptError(f"{role.role_dir / name}: has no state of a data loader")
    return values


def _opened(stored: Any, path: Path) -> Any:
    try:
        return from_stored(stored)
    except ValueError as error:
        raise CheckpointCorruptError(f"{path}: {error}") from None


def refuse_position(what: str, place: Place, begins_anew: bool) -> None:
    """Raises CheckpointMismatchError, because a position has no meaning for another data-parallel size.

    With `begins_anew`, logs a warning instead.
    """
    message = (
        f"{what}: the data loader's position was saved by other data-parallel ranks, and this training has "
        f"{place.size}, which would skip some samples and repeat others"
    )
    if not begins_anew:
        raise CheckpointMismatchError(
            f"{message}: start with the saved number of data-parallel ranks, or set data_begins_anew = True in the "
            "trainer's class to begin the epoch anew"
        )
    if place.rank == 0:
        logger.warning("%s: the epoch begins anew", message)


def check_step(value: Mapping[str, Any], path: Path) -> None:
    """Raises CheckpointCorruptError unless the value has the fields of StepInfo, each of them 0 or more."""
    counts = [value.get(name) for name in STEP_FIELDS]
    if set(value) != set(STEP_FIELDS) or not all(type(count) is int and count >= 0 for count in counts):
        raise CheckpointCorruptError(
            f"{path}: has {reprlib.repr(dict(value))}, but must have {', '.join(STEP_FIELDS)}, each of them 0 or more"
        )
