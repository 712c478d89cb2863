"""`recover_info`: what of a trainer is not in its engines, as a part of each step like a role's, with a manifest.

The files have the names that AReaL (1.0.4, `RecoverInfo.dump`) gives them; only the data position is no pickle.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import FileRecord, Manifest, WrittenFile
from mcore_ckpt.checkpoint.plain_files import pickle_plain, write_plain
from mcore_ckpt.checkpoint.reading import open_file, read_manifest, read_plain
from mcore_ckpt.errors import CheckpointCorruptError, UnsupportedError
from mcore_ckpt.integrations.extra_roles import manifest_of
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io import limits
from mcore_ckpt.io.checksums import crc32
from mcore_ckpt.io.files import read_exact, write_file
from mcore_ckpt.ranks.rounds import Agreement, Record
from mcore_ckpt.state.plain import to_plain
from mcore_ckpt.steps import commit
from mcore_ckpt.steps.transaction import Attempt, check_seen, commit_together

INFO_ROLE = "recover_info"
STEP_FILE = "step_info.json"
JSON_FILES = {
    "step": STEP_FILE,
    "saver": "saver_info.json",
    "evaluator": "evaluator_info.json",
    "stats_logger": "stats_logger_info.json",
    "checkpoint": "checkpoint_info.json",
}
STEP_FIELDS = ("epoch", "epoch_step", "global_step", "steps_per_epoch")


@dataclass(frozen=True)
class Progress:
    """One rank's view of where a training is.

    Attributes:
        step: the fields of AReaL's StepInfo.
        saver, evaluator, stats_logger, checkpoint: states of these, as JSON values. `checkpoint` is when to save next.
        dataloader: this rank's state of the data loader: plain values and tensors.
    """

    step: Mapping[str, int]
    saver: Mapping[str, Any]
    evaluator: Mapping[str, Any]
    stats_logger: Mapping[str, Any]
    checkpoint: Mapping[str, Any]
    dataloader: Any


def dataloader_file(rank: int, world: int) -> str:
    """Data loaders of several ranks are at several places."""
    return "dataloader_info.pt" if world == 1 else f"dataloader_info_{rank:05d}.pt"


def encode(progress: Progress, rank: int) -> dict[str, bytes]:
    """The JSON files by name. Raises UnsupportedError for what JSON has no word for."""
    encoded = {}
    for field, name in JSON_FILES.items():
        try:
            encoded[name] = json.dumps(getattr(progress, field), indent=4).encode()
        except (TypeError, ValueError) as error:
            raise UnsupportedError(
                f"rank {rank}: the {field} state cannot go to {name}: {error}. Use numbers, strings, lists and dicts"
            ) from error
    return encoded


def write(
    agreement: Agreement,
    topic: str,
    attempt: Attempt,
    read_progress: Callable[[], Progress],
    step: int,
    roles: Sequence[str],
) -> None:
    """Commits this part of a step, for which the others are then waited. Every rank calls it.

    Args:
        agreement: this rank's seat.
        topic: for messages.
        attempt: what was opened for it.
        read_progress: returns this rank's; what is JSON is rank 0's. What it raises on one rank all are told.
        step: its number.
        roles: the step counts when these are committed as well.

    Raises:
        UnsupportedError: a state is not of plain values.
        CheckpointError: on all ranks the same type.
    """

    def work(staging: Path) -> Record:
        check_seen(staging)
        rank, progress = agreement.rank, read_progress()
        state = {"dataloader": to_plain(progress.dataloader, "dataloader.state_dict()")}
        name = dataloader_file(rank, agreement.world_size)
        written = [write_plain(staging, name, INFO_ROLE, pickle_plain(state))]
        if agreement.is_coordinator:
            for path, data in encode(progress, rank).items():
                write_file(staging / path, [data])
                written.append(WrittenFile(path, INFO_ROLE, len(data), crc32(data)))
        return {"files": [asdict(file) for file in written]}

    def describe(records: Sequence[Record]) -> Manifest:
        files = [(rank, WrittenFile(**item)) for rank, record in enumerate(records) for item in record["files"]]
        commit.check_files(attempt.staging, files)
        return manifest_of(INFO_ROLE, step, roles, attempt.number, files, agreement.world_size)

    commit_together(agreement, topic, attempt, work, describe, lambda: None)


def read(folder: Path, rank: int) -> Progress:
    """What `write` has committed, every file's checksum checked.

    Args:
        folder: of the part, in a step.
        rank: whose data loader; if there were fewer ranks, the one it is in turn.

    Raises:
        CheckpointNotFoundError: there is none.
        CheckpointCorruptError: a file is missing, damaged, or not what its name says.
    """
    manifest = read_manifest(folder)
    by_path = {file.path: file for file in manifest.files}
    values = {field: _read_json(folder, by_path, name) for field, name in JSON_FILES.items()}
    world = manifest.topology.world_size
    name = dataloader_file(rank % world, world)
    state = read_plain(folder, _listed(folder, by_path, name))
    if "dataloader" not in state:
        raise CheckpointCorruptError(f"{folder / name}: holds no state of a data loader")
    check_step(values["step"], folder / STEP_FILE)
    if values["step"]["global_step"] != manifest.step:
        raise CheckpointCorruptError(f"{folder / STEP_FILE}: is of another step than the manifest's, {manifest.step}")
    return Progress(**values, dataloader=state["dataloader"])


def check_step(value: Mapping[str, Any], path: Path) -> None:
    """Raises CheckpointCorruptError unless it is what StepInfo is made of, of a step that was done."""
    counts = [value.get(name) for name in STEP_FIELDS]
    if set(value) != set(STEP_FIELDS) or not all(type(count) is int and count >= 0 for count in counts):
        raise CheckpointCorruptError(
            f"{path}: has {fields.shown(dict(value))}, not {', '.join(STEP_FIELDS)}, each of them 0 or more"
        )


def _read_json(folder: Path, by_path: Mapping[str, FileRecord], name: str) -> dict[str, Any]:
    record, path = _listed(folder, by_path, name), folder / name
    if record.size > limits.HF_JSON_BYTES:
        raise CheckpointCorruptError(f"{path}: has {record.size} bytes, more than {limits.HF_JSON_BYTES}")
    with open_file(folder, record) as descriptor:
        data = read_exact(descriptor, record.size, 0, path)
    if crc32(data) != record.crc32:
        raise CheckpointCorruptError(f"{path}: has a wrong CRC: damaged, or edited")
    return parse_json(data, path)


def parse_json(data: bytes, path: Path) -> dict[str, Any]:
    """The object in a file of AReaL's. Raises CheckpointCorruptError."""
    try:
        return fields.parse(data)
    except fields.FieldError as error:
        raise CheckpointCorruptError(f"{path}: {error}") from None


def _listed(folder: Path, by_path: Mapping[str, FileRecord], name: str) -> FileRecord:
    if name not in by_path:
        raise CheckpointCorruptError(f"{folder / file_names.MANIFEST_FILE}: does not list {name}")
    return by_path[name]
