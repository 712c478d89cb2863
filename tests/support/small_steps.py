"""Checkpoints of four small text files, committed as a save does it: for tests of what is kept, with no tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import WrittenFile
from mcore_ckpt.checkpoint.provenance import Commit
from mcore_ckpt.io.checksums import crc32
from mcore_ckpt.io.files import make_folders, write_file
from mcore_ckpt.steps import commit
from mcore_ckpt.steps.role_files import files_manifest
from tests.support.checkpoints import ROLE

OPTIMIZER_FILES = ("optim/common.pt", "optim/a.pt")
FILES = ("model/a.pt", *OPTIMIZER_FILES, "rng_states/a.pt")


def save_small(
    root: Path,
    step: int,
    *,
    role: str = ROLE,
    flat: bool = False,
    roles: Sequence[str] = (),
    attempt: str | None = None,
    number: Commit | None = None,
    metrics: Mapping[str, float] | None = None,
    created: str = "2026-01-01T00:00:00+00:00",
    contents: Sequence[str] = ("model", "optimizer", "extra"),
) -> Path:
    """Commits a checkpoint with an optimizer. Each file holds the id of the save. Returns the role's folder.

    If it is `flat`, this is the step's own folder.
    """
    role_dir = file_names.step_dir(root, step) if flat else file_names.step_dir(root, step) / role
    attempt = attempt or commit.new_attempt()
    staging, data = commit.open_staging(role_dir, attempt), attempt.encode()
    for name in FILES:
        make_folders(staging, name)
        write_file(staging / name, [data])
    files = [(0, WrittenFile(name, name.split("/")[0], len(data), crc32(data))) for name in FILES]
    manifest = replace(
        files_manifest(role, step, roles or (role,), attempt, files, 1),
        contents=tuple(contents),
        created=created,
        commit=number,
        metrics=metrics or {},
    )
    commit.write_manifest(staging, manifest)
    commit.publish(staging, role_dir, attempt)
    return role_dir
