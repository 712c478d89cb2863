"""Finds what a trainer keeps in a step beside the roles, and whether all of it is there.

verl's trainers write `data.pt` (PPO) or `data_{dp}.pt` (SFT), and, since 0.9 in its asynchronous modes, the folder
`transfer_queue` with the prompts in flight. Other programs and later versions write other things. So there is no list
of names: what belongs to a step is what the last complete steps have.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from mcore_ckpt.checkpoint.file_names import MANIFEST_FILE, is_own
from mcore_ckpt.formats.kinds import kind_of

# Numbers and ids, which differ between steps and between ranks.
_VARIES = re.compile(r"[0-9a-fA-F]{6,}|\d+")
# Of how many complete steps each must have something, before it counts as a part of a step. With two of them, what a
# user has put into one step is not missed in the next one.
_STEPS = 2


def companions_of(step_path: Path | None) -> dict[str, Path]:
    """Returns the files and folders in a step's folder that belong to the trainer, by name. Raises OSError.

    Roles, hidden entries and what a save writes into a role's folder are not among them. If another program's
    checkpoint is the step's folder itself, only files are, because its folders are parts of the checkpoint.
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


def what_is_missing(step_path: Path, others: Sequence[Path]) -> str | None:
    """Returns what a step lacks of what other steps have, or which of its files is cut; None if nothing is missing.

    Args:
        step_path: the step's folder.
        others: the folders of complete steps, the newest first.

    Raises OSError: a folder cannot be read.
    """
    mine = _by_form(companions_of(step_path))
    for form, name in _expected(others).items():
        if form not in mine:
            return f"{step_path}: {name} is missing, which the other complete steps have"
    cut = first_cut(step_path)
    return None if cut is None else f"{cut}: is cut off, because the trainer died while writing it"


def _expected(others: Sequence[Path]) -> Mapping[str, str]:
    """Returns the forms of what the last complete steps have, each with the path in the newest of these steps."""
    found = [forms for path in others if (forms := _by_form(companions_of(path)))][:_STEPS]
    return {} if not found else {form: name for form, name in found[0].items() if all(form in each for each in found)}


def _by_form(entries: Mapping[str, Path]) -> dict[str, str]:
    """Returns the relative path of each entry, and of each file in a folder whose end can be checked, by its form.

    Folders may hold any number of other files: a queue has as many as there are prompts.
    """
    forms: dict[str, str] = {}
    for name, path in entries.items():
        forms.setdefault(_VARIES.sub("#", name), name)
        for file in _files_below(path) if path.is_dir() else ():
            relative = f"{name}/{file.relative_to(path)}"
            forms.setdefault(_VARIES.sub("#", relative), relative)
    return forms


def first_cut(step_path: Path) -> Path | None:
    """Returns a file of the trainer's that was cut off while it was written; None if there is none. Raises OSError."""
    for path in companions_of(step_path).values():
        for file in _files_below(path) if path.is_dir() else (path,):
            check = _CHECKS.get(file.suffix)
            if check is not None and not check(file):
                return file
    return None


def _files_below(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders.sort()
        yield from (Path(parent) / name for name in sorted(names) if Path(name).suffix in _CHECKS)


def _ends_like_pickle(file: Path) -> bool:
    # A pickle's last byte is the opcode STOP.
    with file.open("rb") as opened:
        size = opened.seek(0, os.SEEK_END)
        opened.seek(max(0, size - 1))
        return opened.read(1) == b"."


def _is_json(file: Path) -> bool:
    try:
        json.loads(file.read_bytes())
    except ValueError:
        return False
    return True


_CHECKS: dict[str, Callable[[Path], bool]] = {
    ".pt": zipfile.is_zipfile,  # torch.save writes the zip directory last
    ".pkl": _ends_like_pickle,
    ".json": _is_json,
}
