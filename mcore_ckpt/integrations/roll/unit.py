"""A checkpoint of ROLL is one unit: the clusters' parts, and the driver's, which is committed last.

`checkpoint-{N}` counts when all have committed. What the driver writes beside the weights is the data position
(`worker_state_pipeline.json`: step, metrics, the state of the prompts' schedulers): weights of one step with that of
another would train on some prompts twice, or on others never.
"""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import Manifest, WrittenFile
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointNotFoundError
from mcore_ckpt.formats.native.folder import LocalFolder
from mcore_ckpt.integrations.extra_roles import manifest_of
from mcore_ckpt.integrations.roll.options import PIPELINE_ROLE, step_of
from mcore_ckpt.io.checksums import crc32
from mcore_ckpt.io.files import make_folders, sync_dir, write_file
from mcore_ckpt.ranks.rounds import Agreement, Record
from mcore_ckpt.recover import resumable_steps
from mcore_ckpt.steps import commit, tracker
from mcore_ckpt.steps import listing as steps
from mcore_ckpt.steps.listing import StepStatus, step_status
from mcore_ckpt.steps.transaction import commit_together, open_together

logger = logging.getLogger(__name__)

_commits = itertools.count()


def commit_pipeline(root: Path, ckpt_id: str, source: Path, roles: Sequence[str] | None, timeout_s: float) -> None:
    """Puts the driver's files into `<root>/<ckpt_id>/pipeline`, all or none, and moves the tracker if that completes
    the step.

    Args:
        root: the folder of all steps.
        ckpt_id: `checkpoint-{N}`.
        source: the folder that has the files.
        roles: of which the step is made, beside the driver's; None: those that have committed to it, or are about to.
        timeout_s: see CheckpointConfig.

    Raises:
        CommitError: an OSError on the way; nothing has been put in place.
    """
    step_path, step = root / ckpt_id, step_of(ckpt_id)
    # The driver is one process without a process group. Whoever saves the clusters' parts holds their locks.
    agreement = Agreement(dist.HashStore(), 0, 1, f"{PIPELINE_ROLE}/{next(_commits)}", timeout_s)  # type: ignore[attr-defined]
    topic = f"saving {ckpt_id} of {PIPELINE_ROLE}"
    attempt = open_together(
        agreement, topic, step_path / PIPELINE_ROLE, prepare=lambda: commit.sweep(root, PIPELINE_ROLE, alone=True)
    )

    def write(staging: Path) -> Record:
        return {"files": [asdict(record) for record in _copy(source, staging)]}

    def describe(records: Sequence[Record]) -> Manifest:
        files = [(0, WrittenFile(**record)) for record in records[0]["files"]]
        return manifest_of(PIPELINE_ROLE, step, _seen(step_path) if roles is None else roles, attempt.number, files, 1)

    commit_together(agreement, topic, attempt, write, describe, lambda: tracker.move_tracker(root, step))


def _copy(source: Path, staging: Path) -> list[WrittenFile]:
    records = []
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        name, data = path.relative_to(source).as_posix(), path.read_bytes()
        make_folders(staging, name)
        write_file(staging / name, [data])
        records.append(WrittenFile(name, "extra", len(data), crc32(data)))
    for folder in {(staging / record.path).parent for record in records}:
        sync_dir(folder)
    return records


def _seen(step_path: Path) -> list[str]:
    """The roles that have committed to a step, or have begun to."""
    under_way = [file_names.parse_work_dir(entry.name) for entry in step_path.iterdir()]
    staged = {work.role for work in under_way if work is not None and work.purpose == "staging"}
    return sorted((step_status(step_path).committed | staged) - {PIPELINE_ROLE})


def give_up(step_path: Path, role: str) -> None:
    """Before a role is saved to a step again (after a rollback, or a crash before the step was complete).

    A step of parts that were saved at different times would be complete, and none that ever was. So what is there goes
    first, the driver's part before all, which is the last to come again.

    Raises OSError.
    """
    for folder in (step_path / PIPELINE_ROLE, step_path / role):
        with suppress(FileNotFoundError):
            (folder / file_names.MANIFEST_FILE).unlink()
            sync_dir(folder)
    with suppress(FileNotFoundError):
        shutil.rmtree(step_path / PIPELINE_ROLE)


def newest_valid(root: Path, verify: bool) -> Path | None:
    """The newest `checkpoint-{N}` that is complete and whose files are all there; None if there never was any.

    Args:
        root: the folder of all steps.
        verify: read all files, and compare them with their CRCs. Without it their sizes are looked at; a load compares
            all that it reads in any case.

    Raises:
        CheckpointNotFoundError: there are checkpoints, but none of them is complete and valid.
    """
    if _first_was_interrupted(root):
        logger.warning("%s: the first checkpoint was never complete: training starts from the beginning", root)
        return None
    reasons = []
    for status in resumable_steps(root, (PIPELINE_ROLE,)):
        problem = _problem(status, verify)
        if problem is None:
            return status.path
        logger.warning("%s is not taken, but the next older one: %s", status.path, problem)
        reasons.append(problem)
    if reasons:
        raise CheckpointNotFoundError("\n  ".join([f"{root}: no checkpoint is valid", *reasons]))
    return None


def _first_was_interrupted(root: Path) -> bool:
    """Whether there are parts of steps, and no step has ever been complete: that would have made a tracker."""
    statuses = steps.list_steps(root)
    began = any(status.committed for status in statuses) and not any(status.problems for status in statuses)
    driver = any(PIPELINE_ROLE in status.committed for status in statuses)
    return began and not driver and not (root / file_names.TRACKER_FILE).exists()


def _problem(status: StepStatus, verify: bool) -> str | None:
    for role in sorted(status.committed):
        folder = LocalFolder(status.role_dir(role))
        try:
            manifest = folder.manifest()
            for file in manifest.files:
                folder.check(file)
        except (CheckpointCorruptError, CheckpointNotFoundError) as error:
            return str(error)
        if verify and (damages := folder.verify(manifest.files)):
            return damages[0].problem
    return None


def part_of(load_dir: Path, role: str) -> Path | None:
    """A role's folder in the checkpoint that ROLL names; None if it is not one of ours.

    ROLL hands `<checkpoint>` to actors and `<checkpoint>/<cluster>` to critics and students.

    Raises CheckpointNotFoundError if it is ours, and not complete.
    """
    step_path = load_dir.parent if load_dir.name == role else load_dir
    if file_names.parse_step(step_path.name) is None or not step_path.is_dir():
        return None
    status = step_status(step_path)
    if not status.committed | status.declared and not status.problems:
        return None
    if not status.is_complete or role not in status.committed:
        missing = f"{step_path}: complete, but without {role}" if status.is_complete else status.reason
        raise CheckpointNotFoundError(f"{missing}: resume_from_checkpoint: true takes the newest that is whole")
    return status.role_dir(role)
