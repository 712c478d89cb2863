"""Finds the files that a trainer keeps in a step next to the roles, and checks that none is missing or truncated.

verl's trainers write `data.pt` (PPO) or `data_{dp}.pt` (SFT). Since 0.9, verl's asynchronous modes also write the
folder `transfer_queue` with the prompts in flight. Other programs and later versions write other files, and users add
files, too. So no list of names can tell which files belong to a step. A file belongs to a step if the last two complete
steps have a file of the same name (numbers and ids in names may differ). If there is only one complete step, a file in
this step may be a user's. So the file counts only if the caller knows that the trainer writes files of this name.
"""

from __future__ import annotations

import logging
import os
import re
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from mcore_ckpt import json_bounds
from mcore_ckpt.checkpoint.file_names import MANIFEST_FILE, is_own
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.formats.kinds import kind_of
from mcore_ckpt.io import limits
from mcore_ckpt.io.files import read_small

logger = logging.getLogger(__name__)

# Matches the numbers and ids in file names, which differ between steps and between ranks.
_VARIES = re.compile(r"[0-9a-fA-F]{6,}|\d+")
# If this many complete steps have a file, the file is the trainer's.
_STEPS = 2
# How many bytes are read to find the first or last bracket of a JSON file.
_BLANKS = 4096


def companions_of(step_path: Path | None) -> dict[str, Path]:
    """Returns the files and folders in a step's folder that belong to the trainer, by name. Raises OSError.

    The result leaves out roles, hidden entries and the files that a save writes into a role's folder. If the step's
    folder is itself another program's checkpoint, the result leaves out all folders, because they are parts of that
    checkpoint.
    """
    if step_path is None or not step_path.is_dir():
        return {}
    only_files = kind_of(step_path) is not None and not (step_path / MANIFEST_FILE).exists()
    return {
        entry.name: entry
        for entry in sorted(step_path.iterdir())
        if not entry.name.startswith(".")
        and not is_own(entry.name)
        and (entry.is_file() or (entry.is_dir() and not only_files and not _is_role(entry)))
    }


def _is_role(folder: Path) -> bool:
    return (folder / MANIFEST_FILE).exists() or kind_of(folder) is not None


def what_is_missing(step_path: Path, others: Sequence[Path], known: Collection[str] = ()) -> str | None:
    """Describes a file that a step lacks and other steps have, or a truncated file; None if there is no such file.

    A missing file that may be a user's is only logged.

    Args:
        others: the folders of complete steps, the newest first.
        known: the names that the trainer is known to write, each with "#" in place of a number.

    Raises OSError: a folder cannot be read.
    """
    witnesses = [path for path in others if companions_of(path)][:_STEPS]
    have = [_sound_forms(path) for path in witnesses]
    expected = {form: name for form, name in next(iter(have), {}).items() if all(form in each for each in have)}
    sure = {form for form in expected if len(have) == _STEPS or _is_known(form, known)}
    cut = first_cut(step_path, known, sure)
    if cut is not None:
        return f"{cut}: is cut off, because the trainer died while writing it"
    mine, had = {form for form, _, _ in _entries(step_path)}, " and ".join(path.name for path in witnesses)
    for form, name in expected.items():
        if form not in mine and form in sure:
            advice = (
                "" if _is_known(form, known) else ": if you put that file there yourself, load this step by its path"
            )
            return f"{step_path}: {name} is missing, but {had} had this file{advice}"
        if form not in mine:
            logger.warning(
                "%s: lacks %s, which is in %s: if your trainer writes this file, load another step",
                step_path,
                name,
                had,
            )
    return None


def first_cut(step_path: Path, known: Collection[str], forms: Collection[str] = ()) -> Path | None:
    """Returns a file that was truncated because its writer died; None if there is none. Raises OSError.

    Checks only files that the trainer is known to write (see `what_is_missing`) and files that have one of the `forms`.
    Any other file may be a user's. A form is a relative path with "#" in place of numbers and ids.
    """
    looked_at = (path for form, _, path in _entries(step_path) if form in forms or _is_known(form, known))
    return next((path for path in looked_at if not _is_sound(path)), None)


def _is_known(form: str, known: Collection[str]) -> bool:
    return form.partition("/")[0] in known


def _sound_forms(step_path: Path) -> dict[str, str]:
    """Returns the forms of entries that are not truncated, each with the relative path of its first entry."""
    found: dict[str, str] = {}
    for form, name, path in _entries(step_path):
        if _is_sound(path):
            found.setdefault(form, name)
    return found


def _entries(step_path: Path) -> Iterator[tuple[str, str, Path]]:
    """Yields the form, relative path and path of each entry.

    Also yields a file in a folder if `_CHECKS` can check the file. Other files in folders are skipped, because there
    may be many: `transfer_queue` has one for each prompt.
    """
    for path in companions_of(step_path).values():
        for file in (path, *_files_below(path)):
            relative = str(file.relative_to(step_path))
            yield _VARIES.sub("#", relative), relative, file


def _files_below(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders.sort()
        yield from (Path(parent) / name for name in sorted(names) if Path(name).suffix in _CHECKS)


def _is_sound(path: Path) -> bool:
    check = None if path.is_dir() else _CHECKS.get(path.suffix)
    return check is None or check(path)


def _ends_like_pickle(file: Path) -> bool:
    # A pickle's last byte is the opcode STOP. So a file that ends with another byte was cut.
    with file.open("rb") as opened:
        size = opened.seek(0, os.SEEK_END)
        opened.seek(max(0, size - 1))
        return opened.read(1) == b"."


def _is_json(file: Path) -> bool:
    try:
        json_bounds.loads(read_small(file, limits.HF_JSON_BYTES))
    except (CheckpointCorruptError, json_bounds.TooDenseError):
        return _ends_like_json(file)
    except ValueError:
        return False
    return True


def _ends_like_json(file: Path) -> bool:
    """Returns True if the last bracket closes the first bracket in a file that is too large to be decoded."""
    with file.open("rb") as opened:
        first = opened.read(_BLANKS).lstrip()[:1]
        opened.seek(-min(_BLANKS, opened.seek(0, os.SEEK_END)), os.SEEK_END)
        last = opened.read().rstrip()[-1:]
    return first + last in (b"{}", b"[]")


_CHECKS: dict[str, Callable[[Path], bool]] = {
    ".pt": zipfile.is_zipfile,  # torch.save writes the zip directory last, so a cut file has none
    ".pkl": _ends_like_pickle,
    ".json": _is_json,
}
