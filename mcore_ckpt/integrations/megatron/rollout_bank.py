"""Makes Megatron-LM's rollout bank (`megatron/rl/rollout_bank.py` of 2026-08, format 2) part of each checkpoint.

The bank is a folder to which rank 0 appends each group of rollouts as soon as the group is complete. The bank records
the iteration at which each group was used. A load of iteration T drops the groups that were used up to T. A compaction
removes used groups for good. The bank therefore fits every checkpoint since the bank's last compaction. After a load of
an older checkpoint, or of a checkpoint from another folder, Megatron-LM would go on without the rollouts that belong to
the checkpoint.

Each checkpoint gets a copy of the bank. A load takes the copy only if the bank does not belong to the checkpoint,
because a bank that belongs to the checkpoint also has the groups that were completed after the save.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from mcore_ckpt import SavedPart, SaveHandle
from mcore_ckpt.errors import CheckpointCorruptError, UnsupportedError
from mcore_ckpt.integrations.kit.arguments import Arguments
from mcore_ckpt.integrations.kit.free_names import free_name
from mcore_ckpt.io import copy_durably, parse_json, read_small, replace_file, sync_dir
from mcore_ckpt.steps import remove_entry, replace_entry

logger = logging.getLogger(__name__)

PART = "rollout_bank"
_MANIFEST = "MANIFEST.json"
_FORMAT = 2
_MANIFEST_BYTES = 64 << 20
# This file in the bank's folder says which checkpoint the bank has been loaded with. Megatron-LM ignores the file.
_LOADED_FILE = "loaded_by_mcore_ckpt.json"
# This file says that the folder is being filled with a checkpoint's copy.
_FILLING = "filling_by_mcore_ckpt"
# The order in which files are measured. Megatron-LM writes the bytes of a group to the other files before it adds the
# group's line to the ledger, so the ledger is measured before these files. Used groups are noted before a save, so
# the file of these notes can be measured last.
_ORDER = {_MANIFEST: 0, "ledger.log": 1, "consumed.log": 3}
# At most this many files stay open, because a process may often have only 1024 open files.
_MOST_OPEN = 256


class _Bank(NamedTuple):
    """The manifest of a bank: its timeline (one per start of training), and the iteration of the last compaction."""

    timeline: str
    compacted_at: int


class RolloutBankPart:
    """Saves, loads and compacts the bank of rank 0. `arguments` returns Megatron-LM's arguments."""

    def __init__(self, arguments: Callable[[], Arguments]) -> None:
        self._arguments = arguments
        self._saved: tuple[int, SaveHandle] | None = None

    def save(self, folder: Path) -> Callable[[], None] | None:
        """Measures the files of the bank, and returns the function that copies them while the training continues.

        The files only grow. But a compaction replaces them, so they stay open until they are copied. If there are too
        many files, the smallest are copied at once. Returns None if there is no bank yet.
        """
        bank = self._folder()
        if not (bank / _MANIFEST).exists():
            return None
        read_bank(bank)
        found = [path for path in bank.rglob("*") if path.is_file() and not path.name.endswith(".tmp")]
        ordered = sorted(found, key=lambda path: _ORDER.get(path.name, 2))
        sizes = {path: path.stat().st_size for path in ordered if path.name != _LOADED_FILE}
        by_size = sorted(sizes, key=lambda path: sizes[path])
        for path in by_size[:-_MOST_OPEN]:
            with path.open("rb") as file:
                _copy(file, folder / path.relative_to(bank), sizes[path])
        with ExitStack() as stack:
            files = [(path, stack.enter_context(path.open("rb"))) for path in by_size[-_MOST_OPEN:]]
            opened = stack.pop_all()

        def copy() -> None:
            with opened:
                for path, file in files:
                    _copy(file, folder / path.relative_to(bank), sizes[path])

        return copy

    def load(self, saved: SavedPart) -> None:
        """Replaces the bank by the checkpoint's copy, unless the bank belongs to the checkpoint.

        The replaced bank stays next to the new bank, as `<bank>.before_step_<N>`.

        Raises:
            UnsupportedError: the bank has another format, or its folder cannot be renamed, for example because it is a
                mount point. An empty mount point is filled.
            CheckpointCorruptError: the copy has no manifest that can be read.
        """
        stored = saved.folder()
        if self._arguments()["finetune"] or not (stored / _MANIFEST).exists():
            return  # training begins at iteration 0, or there was no bank yet
        bank, of_step = self._folder(), read_bank(stored)
        loaded = {"timeline": of_step.timeline, "step": saved.step}
        if not _belongs(bank, of_step, loaded):
            _replace(bank, stored, saved.step)
        (bank / _FILLING).unlink(missing_ok=True)
        replace_file(bank / _LOADED_FILE, json.dumps(loaded).encode())

    def saved(self, iteration: int, handle: SaveHandle) -> None:
        """Notes a save. Once this save is committed, the bank no longer needs groups that were used before the save."""
        self._saved = (iteration, handle)
        self.compact()

    def compact(self) -> None:
        """Compacts the bank if a save has been committed since the last call, as Megatron-LM's own save does."""
        if self._saved is None or not self._saved[1].committed:
            return
        from megatron.rl.rl_utils import get_rollout_bank

        iteration, self._saved = self._saved[0], None
        bank: Any = get_rollout_bank()
        if bank is not None:
            bank.checkpoint(iteration)

    def _folder(self) -> Path:
        args = self._arguments()  # as Megatron-LM's `maybe_get_rollout_bank` does
        return Path(args["rl_rollout_bank_dir"] or os.path.join(args["save"] or ".", "rollout_bank"))


def read_bank(folder: Path) -> _Bank:
    """Reads the manifest of a bank. Raises UnsupportedError, CheckpointCorruptError and OSError."""
    path = folder / _MANIFEST
    found = parse_json(read_small(path, _MANIFEST_BYTES), path)
    version = found.get("format_version") if isinstance(found, dict) else None
    if version != _FORMAT:
        raise UnsupportedError(
            f"{path}: has format {version}, but mcore_ckpt knows only format {_FORMAT}: update mcore_ckpt, or do not "
            "attach the bank"
        )
    try:
        return _Bank(str(found["timeline"]), int(found["compacted_at"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointCorruptError(f"{path}: is not the manifest of a rollout bank: {error!r}") from error


def _belongs(bank: Path, of_step: _Bank, loaded: dict[str, Any]) -> bool:
    """True if the bank has gone on from the checkpoint's copy, and still has all groups that the checkpoint needs."""
    try:
        found = read_bank(bank)
    except (OSError, CheckpointCorruptError):
        return False
    if found.compacted_at > loaded["step"]:
        return False
    if found.timeline == of_step.timeline:
        return True
    # Each start of the training begins a new timeline. The bank also belongs to the checkpoint if the training that
    # wrote the bank started from this checkpoint, and ended before the next save.
    path = bank / _LOADED_FILE
    return path.exists() and parse_json(read_small(path, _MANIFEST_BYTES), path) == loaded


def _replace(bank: Path, stored: Path, step: int) -> None:
    """Replaces the bank by a step's copy. The replaced bank stays next to the new bank under another name.

    The replaced bank may have groups that no checkpoint has, because they were completed after the last save.
    """
    bank = bank.resolve()  # the folder may be a link to another disk
    new = bank.with_name(f".{bank.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    copy_durably(stored, new)
    old = free_name(bank.with_name(f"{bank.name}.before_step_{step}"))
    try:
        replace_entry(bank, new, old)
    except OSError as error:
        shutil.rmtree(new, ignore_errors=True)
        if error.errno not in (errno.EBUSY, errno.EXDEV):
            raise
        if not _is_empty(bank):
            raise UnsupportedError(
                f"{bank}: does not belong to step {step}, and the copy in the step cannot take its place, because the "
                f"system does not rename this folder ({error.strerror}): it may be a mount point. The bank has "
                "not been changed. Move its contents to another folder, or name a folder inside it with "
                "--rl-rollout-bank-dir, and start again"
            ) from error
        _fill(bank, stored)
        return
    _tell_or_remove(old, bank, step)


def _tell_or_remove(old: Path, bank: Path, step: int) -> None:
    if not os.path.lexists(old):
        return  # there was no bank
    if _is_empty(old):
        shutil.rmtree(old, ignore_errors=True)
        return
    logger.warning(
        "%s did not belong to step %d: the copy in the step has replaced it. The bank that was there is now %s, "
        "because it may have rollouts that no checkpoint has: delete it if nobody needs them",
        bank,
        step,
        old,
    )


def _fill(bank: Path, stored: Path) -> None:
    """Copies a step's bank into an empty folder. The manifest comes last, because the manifest makes the folder a bank.

    If the process dies midway, a marker tells the next load that it may fill the folder again. `load` removes the
    marker at the end.
    """
    replace_file(bank / _FILLING, b"")
    for entry in sorted(stored.iterdir(), key=lambda entry: entry.name == _MANIFEST):
        target = bank / entry.name
        remove_entry(target)
        copy_durably(entry, target)
    sync_dir(bank)


def _is_empty(folder: Path) -> bool:
    """True if a folder has no rollouts, or only an unfinished copy. (A new ext4 file system has `lost+found`.)"""
    if not folder.is_dir():
        return False
    names = {entry.name for entry in folder.iterdir()}
    return _FILLING in names or names <= {_LOADED_FILE, "lost+found"}


def _copy(source: BinaryIO, target: Path, size: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as copied:
        while size > 0:
            piece = source.read(min(size, 16 << 20))
            if not piece:
                raise OSError(f"{target}: its source has become shorter while it was copied")
            copied.write(piece)
            size -= len(piece)
