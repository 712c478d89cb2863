"""Finds out what is at a path, which program wrote it, and which command or path the user may have meant.

A path is recognized by the names of its files and folders, and by the `metadata.json` of `torch_dist`. verl and this
package give a rank's model file the same name, so the records in that file are looked at, too.

If there is only one folder of steps below the path, commands on folders of steps take that folder, because the user can
mean no other folder. Only `list` and `watch` take a folder of steps above the path: a user who names one step for
`prune` does not mean all steps.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.formats.huggingface.kind import is_hf_folder
from mcore_ckpt.formats.kinds import NATIVE, kinds_by_name, recognize
from mcore_ckpt.formats.step_folders import is_legacy, number_of, step_folders
from mcore_ckpt.io.files import names_in
from mcore_ckpt.io.links import broken_link
from mcore_ckpt.steps.listing import StepStatus, find_moved_aside, is_step
from mcore_ckpt.tools.examine.nearby import nearby_roots

_HUB_CACHE = re.compile(r"models--([\w.-]+)--([\w.-]+)")
_SAFETENSORS = {"model.safetensors", "model.safetensors.index.json"}

# How many of the newest steps are examined to find out which program wrote a folder of steps.
_LOOKED_AT = 3
_SHOWN = 3

_ASK = "use an account that may read the folder, or ask its owner"

# Descriptions of paths, by kind. For kinds of checkpoints, see `CheckpointKind.what`.
_WORDS = {
    "root": "a folder of steps",
    "step": "the folder of a step",
    "role": "the folder of a role",
    "legacy": "a checkpoint in Megatron's legacy format",
    "adapter": "an adapter in PEFT's form",
    "hub cache": "a model's folder in the hub's cache",
    "other": "a folder without any checkpoint that this package knows",
    "empty": "an empty folder",
}


@dataclass(frozen=True)
class PathInfo:
    """The kind of file or folder at a path, and advice for the user.

    Attributes:
        kind: the name of a kind of checkpoint, a key of `_WORDS`, or "parent" (above the steps), "inside" (a step),
            "foreign root", "file", "unreadable" or "missing".
        what: a description of the kind, such as "a torch_dist checkpoint of Megatron".
        advice: a command that takes this path, or another path that may be meant; may be empty.
        roots: the folders of steps right above or below the path.
    """

    path: Path
    kind: str
    what: str
    advice: str = ""
    roots: tuple[Path, ...] = ()

    def refusal(self, command: str) -> str:
        """Returns the error message of a command that does not take this path."""
        if self.kind in ("missing", "unreadable"):
            return f"{self.path}: {self.what}{self._end}"
        return f"{self.path}: is {self.what}, which `mcore-ckpt {command}` does not take{self._end}"

    @property
    def is_foreign_checkpoint(self) -> bool:
        """True if the path is a checkpoint of another program that `merge` and `test` read."""
        kind = kinds_by_name().get(self.kind)
        return kind is not None and kind is not NATIVE and kind.backend is not None

    @property
    def reason(self) -> str:
        """The end of a message about a missing checkpoint: what is at the path instead."""
        return f": {'' if self.kind in ('missing', 'unreadable') else 'it is '}{self.what}{self._end}"

    @property
    def _end(self) -> str:
        return f": {self.advice}" if self.advice else ""


def what_is(path: Path) -> PathInfo:
    """Returns what is at a path, from names and from small parts of the files that show which program wrote a folder.

    Raises nothing.

    Example:
        >>> what_is(Path("/nowhere")).kind
        'missing'
    """
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)
        names = set(os.listdir(path)) if is_folder else set()
    except PermissionError:
        return PathInfo(path, "unreadable", *_permission(path))
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return PathInfo(path, "unreadable", f"cannot be read: {error.strerror}")
        return _missing(path)
    if not is_folder:
        return _file(path)
    try:
        kind = _ours(path, names) or _foreign(path, names)
    except CheckpointError as error:
        return PathInfo(path, "unreadable", str(error).removeprefix(f"{path}: "), _ASK)
    if kind is None:
        steps = step_folders(path)
        if steps:
            return _folder_of_steps(path, steps[: -_LOOKED_AT - 1 : -1])
    roots = tuple(nearby_roots(path))
    above = {*Path(os.path.abspath(path)).parents, *path.resolve().parents}
    is_above = bool(roots) and Path(os.path.abspath(roots[0])) in above
    if kind is not None:
        advice = _advice(kind, path) + (f"; all steps are in {roots[0]}" if is_above else "")
        return PathInfo(path, kind, _words(kind), advice, roots if is_above else ())
    if roots:
        one = f"the steps are in {roots[0]}: name that folder"
        advice = one if len(roots) == 1 else f"name one of these folders of steps: {_some(roots)}"
        what = "a folder inside a step" if is_above else "a folder above the steps"
        return PathInfo(path, "inside" if is_above else "parent", what, advice, roots)
    kind = "other" if names else "empty"
    return PathInfo(path, kind, _words(kind))


def _words(kind: str) -> str:
    known = kinds_by_name().get(kind)
    return _WORDS[kind] if known is None else known.what


def why_none(path: Path, step: int | None, statuses: Sequence[StepStatus]) -> str:
    """Returns the end of a message on a path without a checkpoint.

    `step` is the wanted step, and `statuses` are the incomplete steps that could be meant, the oldest first.
    """
    if statuses:
        return "".join(f"\n  {status.reason}" for status in reversed(statuses))
    with suppress(OSError):
        there = sorted(file_names.step_dirs(path), reverse=True)
        if step is not None and there:
            return f": there are the steps {_some(there)}"
    return what_is(path).reason


def _some(items: Sequence[object]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(map(str, items[:_SHOWN])) + more


def _ours(path: Path, names: set[str]) -> str | None:
    if file_names.MANIFEST_FILE in names:
        return "role"
    if _foreign(path, names) is not None:
        return None
    # Decide by names alone, so that commands also accept a step that a crash has left incomplete.
    for place in (Path(os.path.abspath(path)), path.resolve()):
        if is_step(place):
            return None if _foreign_step(path) else "step"
        if file_names.parse_step(place.parent.name) is not None and file_names.is_role(place.name):
            return "role"
    return None


def _foreign(path: Path, names: set[str]) -> str | None:
    kind = recognize(path)
    if (kind is None or kind.backend is None) and is_legacy(path):
        return "legacy"  # "legacy" even if the folder has a HuggingFace model, which is then a part of the checkpoint
    if kind is not None:
        return kind.name
    if _HUB_CACHE.fullmatch(path.name) and "snapshots" in names:
        return "hub cache"
    return "adapter" if is_hf_folder(path) else None


def _foreign_step(path: Path) -> str | None:
    """Returns the kind of foreign checkpoint that a step is or contains; None if the step may be ours."""
    folders = [path, *(path / name for name in sorted(names_in(path)))]
    if any(os.path.exists(folder / file_names.MANIFEST_FILE) for folder in folders):
        return None
    with suppress(CheckpointError):  # a step that cannot be read may be ours
        return next((kind for folder in folders if (kind := _foreign(folder, names_in(folder))) is not None), None)
    return None


def _folder_of_steps(path: Path, steps: Sequence[Path]) -> PathInfo:
    kinds = [_foreign_step(step) for step in steps]
    if any(
        kind is None and file_names.parse_step(step.name) is not None for kind, step in zip(kinds, steps, strict=True)
    ):
        return PathInfo(path, "root", _WORDS["root"], _advice("root", path))
    step, kind = steps[0], kinds[0]
    if kind is None and is_step(step):
        name = file_names.step_name(number_of(step.name) or 0)
        what = f"a folder of steps of this package whose names were changed ({step.name})"
        return PathInfo(path, "parent", what, f"rename the steps ({step.name} to {name}), or name one step")
    what = f"a folder of steps of another program ({step.name}{f': {_words(kind)}' if kind else ''})"
    advice = f"name one step, such as {step}" + (f": {_advice(kind, step)}" if kind else "")
    return PathInfo(path, "foreign root", what, advice)


def _advice(kind: str, path: Path) -> str:
    model = f"`mcore-ckpt merge {path} OUT` makes a HuggingFace model of it"
    known = kinds_by_name().get(kind)
    if known is not None and known.backend == "megatron":
        return f"{model} (with --hf_model_path MODEL if it has no config.json)"
    if known is not None and known.backend is not None:
        return f"`mcore-ckpt merge {path} OUT --backend {known.backend}` makes a HuggingFace model of it"
    hub = _HUB_CACHE.fullmatch(path.name)
    return {
        "root": f"`mcore-ckpt list {path}` shows its steps, and {model}",
        "step": model,
        "role": model,
        "legacy": "this package does not read this format: convert the checkpoint to torch_dist with Megatron-LM "
        "(ckpt-convert-format)",
        "huggingface": f"{_conversion(path)}, and `mcore-ckpt test {path} --reference MODEL` compares it with "
        "another model",
        "adapter": "load_hf loads it into a model, and PEFT merges it into its base model",
        "hub cache": f"name the model, {'/'.join(hub.groups())}, or a folder in {path / 'snapshots'}" if hub else "",
    }.get(kind, "")


def _conversion(path: Path) -> str:
    if names_in(path).isdisjoint(_SAFETENSORS):
        return "`mcore-ckpt convert` needs the weights as model.safetensors, or as safetensors files with an index"
    return f"`mcore-ckpt convert --hf_model_path {path} --output_path OUT` makes a checkpoint of it"


def _file(path: Path) -> PathInfo:
    for folder in path.absolute().parents:
        if os.path.exists(folder / file_names.MANIFEST_FILE):
            return PathInfo(path, "file", "a file of a checkpoint", f"name the folder {folder}")
    return PathInfo(path, "file", "a file", "name a folder")


def _missing(path: Path) -> PathInfo:
    link = broken_link(path)
    if link is not None:
        return PathInfo(path, "missing", link)
    if find_moved_aside(path) is not None:
        kind: str = "role" if file_names.parse_step(path.name) is None else "step"
        return PathInfo(path, kind, _words(kind))
    what = "there is no such folder"
    above = next(folder for folder in (*path.absolute().parents, Path("/")) if os.path.lexists(folder))
    if not above.is_dir():
        return PathInfo(path, "missing", what, f"{above} is a file")
    near = path.absolute().relative_to(above).parts
    siblings = [name for name in names_in(above) if not name.startswith(".")]
    closest = difflib.get_close_matches(near[0], siblings, 1, 0.6) if near else []
    advice = f"the closest name is {above / closest[0]}" if closest else ""
    return PathInfo(path, "missing", what, advice)


def _permission(path: Path) -> tuple[str, str]:
    closed = path.absolute()
    for folder in (*reversed(closed.parents), closed):
        try:
            os.stat(folder)
        except PermissionError:
            closed = folder.parent
            break
        except OSError:
            break
    return f"cannot be read: permission denied by {closed}", _ASK
