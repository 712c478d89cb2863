"""Builds and parses all names of files and folders on disk. No other module does this. See docs/format.md."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.errors import InvalidArgumentError

TRACKER_FILE = "latest_checkpointed_iteration.txt"
MANIFEST_FILE = "manifest.json"
OWNER_FILE = ".owner.json"
# A step whose folder contains this file is pinned, so retention keeps the step.
PINNED_FILE = ".pinned"
# This file holds the identity of a run. Each place that the run owns has such a file: a root, a remote store, or a
# folder of `run_home`.
RUN_FILE = ".run.json"
# This file is a manifest of the files from which the save exports its HuggingFace model. It exists only in staging
# folders.
WRITTEN_FILE = ".written.json"
# The name of the record that contains the index. The record is in a `.pt` file of this package, which is a zip archive.
INDEX_RECORD = "archive/.mcore_ckpt/index.json"
MODEL_DIR = "model"
MODEL_FILE = "model_states.pt"
HUGGINGFACE_DIR = "huggingface"
# The folders, relative to a role's folder, that can hold config.json and the tokenizer. This package and verl write the
# first folder, and verl up to 0.4 wrote the second. The third is the role's folder itself, in which other programs put
# these files next to the weights. The fourth is verl's folder next to `dist_ckpt`, if `dist_ckpt` is the role's folder.
_CONFIG_DIRS = (HUGGINGFACE_DIR, "hf_config_and_tokenizer", ".", f"../{HUGGINGFACE_DIR}")
# The folder of the adapters in HUGGINGFACE_DIR. verl (0.9) writes this folder, too.
ADAPTER_DIR = "adapter"
# The folder of the adapters in a merged model. verl's merger (0.9) writes this folder, too.
MERGED_ADAPTER_DIR = "lora_adapter"
OPTIMIZER_DIR = "optim"
RNG_DIR = "rng_states"
EXTRA_DIR = "extra_state"
# The folder of all parts of a step. It contains a folder for each part. The folder of a part contains a folder for each
# rank that saved files for the part.
PARTS_DIR = "parts"
# The name of a part's file if the trainer hands over the part as bytes.
PART_FILE = "data"
COMMON_FILE = f"{OPTIMIZER_DIR}/common.pt"
# The names that a save puts into a role's folder. Files and folders with other names in a role's folder do not belong
# to this package.
_OWN_NAMES = {
    MANIFEST_FILE,
    OWNER_FILE,
    WRITTEN_FILE,
    MODEL_DIR,
    OPTIMIZER_DIR,
    RNG_DIR,
    EXTRA_DIR,
    PARTS_DIR,
    HUGGINGFACE_DIR,
}

# The names of step folders begin with "global_step" in this package and verl, and with "checkpoint-" in ROLL.
_STEP_PREFIX = r"(?:global_steps?_|checkpoint-)"
_STEP_DIR = re.compile(_STEP_PREFIX + r"(0|[1-9][0-9]*)")
_ROLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
# The most characters that a role's name can have. File systems accept names of up to 255 bytes, and the name of a
# role's staging folder is longer than the role's name.
_ROLE_LENGTH = 128
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_PART_PLACE = re.compile(rf"{PARTS_DIR}/({_PART.pattern})/rank_([0-9]{{5,9}})/(.+)")
# Matches the names of working folders of roles and of exported models. A model can have any name ("Qwen2.5-7B"), so the
# pattern accepts all characters except `/`.
_ROLE_WORK_DIR = re.compile(r"\.([^/]+)\.(staging|replaced|uploading)-([0-9a-f]+)")
# Matches the name of a note that lists the files handed over with a save.
_HANDED_OVER_NOTE = re.compile(r"\.([^/]+)\.handed_over-([0-9a-f]+)-[0-9]{5,9}\.json")
_DELETED_DIR = re.compile(r"\.deleted-" + _STEP_PREFIX + r"[0-9]+-[0-9a-f]+")
# Matches the name of a file with metrics that were set after a role's checkpoint was saved. The file is in the step's
# folder.
_METRICS_FILE = re.compile(r"\.([^./]+)\.metrics-([0-9a-f]{32})\.json")
# Matches the name of an optimizer's folder that retention has taken out of a checkpoint, to remove the folder's files.
_DROPPED_DIR = re.compile(r"\.optim\.dropped-[0-9a-f]+")
_TRIAL_DIR = re.compile(r"\.doctor-[0-9a-f]+")
_TRAINER_FILE = re.compile(r"\.([^./]+)\.trainer\.json")
_RULES_FILE = re.compile(r"\.([^./]+)\.retention\.json")
_ATTEMPT = re.compile(r"[0-9a-f]{32}")
_TRACKER = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True)
class RoleWorkDir:
    """A working folder next to a role's folder.

    `purpose` is "staging" for the folder that a running save writes into, "replaced" for a checkpoint that a newer save
    has replaced, and "uploading" for a folder that marks the checkpoint as being copied to a remote store.
    """

    role: str
    purpose: str
    attempt: str


def step_dir(root: Path, step: int) -> Path:
    """Returns the folder of a step."""
    return root / step_name(step)


def step_name(step: int) -> str:
    """Returns the name of a step's folder."""
    return f"global_steps_{step}"


def step_dirs(root: Path) -> dict[int, list[Path]]:
    """Returns the folders of each step below `root`, by step. Of several folders, `global_steps_<step>` is first."""
    if not root.is_dir():
        return {}
    with os.scandir(root) as entries:
        return step_dirs_among(root, entries)


def step_dirs_among(root: Path, entries: Iterable[os.DirEntry[str]]) -> dict[int, list[Path]]:
    """Returns what `step_dirs` returns. `entries` is a listing of `root`."""
    found: dict[int, list[Path]] = {}
    for entry in sorted(entries, key=lambda entry: entry.name, reverse=True):
        match = _STEP_DIR.fullmatch(entry.name)
        if match and _may_be_folder(entry):
            found.setdefault(int(match.group(1)), []).append(root / entry.name)
    return found


def _may_be_folder(entry: os.DirEntry[str]) -> bool:
    """Returns True for a folder, for a broken link, and for a path that cannot be examined.

    A step whose folder is a broken link or cannot be examined must be reported as unreadable, not as missing.
    """
    # The parent's listing already shows the type of an entry, so only a link takes another call to the file system.
    try:
        return entry.is_dir() or (entry.is_symlink() and not os.path.exists(entry.path))
    except OSError:
        return True


def megatron_dir(root: Path, iteration: int) -> Path:
    """Returns the folder in which Megatron-LM saves its own checkpoint (`get_checkpoint_name`, core_r0.16)."""
    return root / f"iter_{iteration:07d}"


def parse_step(name: str) -> int | None:
    """Returns the number of the step whose folder has this name. Returns None for the name of any other folder."""
    match = _STEP_DIR.fullmatch(name)
    return int(match.group(1)) if match else None


def step_root(role_dir: Path, role: str, step: int) -> Path | None:
    """Returns the root above a role's folder. Returns None if the folder does not belong to a step.

    A role's folder is `<root>/<step>/<role>`. In a step of verl's SFT trainer, the role's folder is `<root>/<step>`
    itself, because such a step has only one role.

    Raises InvalidArgumentError if the folder belongs to another step.
    """
    step_path = role_dir if parse_step(role_dir.name) is not None else role_dir.parent
    found = parse_step(step_path.name)
    if found is None:
        return None
    if found != step:
        raise InvalidArgumentError(f"{role_dir} is a folder of step {found}, not of step {step}")
    return step_path.parent if step_path is role_dir or role_dir.name == role else None


def is_own(name: str) -> bool:
    """Returns True if this package writes a file or folder with this name into a role's folder."""
    return name in _OWN_NAMES or is_dropped_dir(name) or parse_metrics_file(name) is not None


def check_role(role: str) -> str:
    """Returns `role` if it can be the name of a role's folder. Raises InvalidArgumentError otherwise."""
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise InvalidArgumentError(f"role {role!r} is not a folder name: use letters, digits, '_' and '-'")
    if parse_step(role) is not None:
        raise InvalidArgumentError(f"role {role!r} is the name of a step's folder: use another name")
    if len(role) > _ROLE_LENGTH:
        raise InvalidArgumentError(f"role {role!r} has {len(role)} characters: use at most {_ROLE_LENGTH}")
    return role


def check_roles(roles: Sequence[str]) -> tuple[str, ...]:
    """Returns the roles of a step without duplicates.

    Raises InvalidArgumentError for an invalid role, and for a string, because each of its letters would become a role.
    Also raises InvalidArgumentError for two roles that differ only in upper and lower case, because some file systems
    would give both roles the same folder.
    """
    if isinstance(roles, str):
        raise InvalidArgumentError(f"roles is the string {roles!r}: use a list of roles, such as [{roles!r}]")
    if not isinstance(roles, Sequence):
        raise InvalidArgumentError(f"roles is {roles!r}: use a list of roles, such as ['actor']")
    unique = tuple(dict.fromkeys(map(check_role, roles)))
    if len({role.lower() for role in unique}) < len(unique):
        raise InvalidArgumentError(
            f"roles {unique} differ only in upper and lower case: on some file systems they share a folder. Use other "
            "names"
        )
    return unique


def is_role(name: str) -> bool:
    """Returns True if a role's folder can have this name. The length of the name is not checked."""
    return _ROLE.fullmatch(name) is not None and parse_step(name) is None


def staging_dir(role_dir: Path, attempt: str) -> Path:
    """Returns the folder that a save writes into before it commits."""
    return role_dir.with_name(f".{role_dir.name}.staging-{attempt}")


def replaced_dir(role_dir: Path, attempt: str) -> Path:
    """Returns the path to which an old checkpoint is renamed when a newer save of the same step replaces it."""
    return role_dir.with_name(f".{role_dir.name}.replaced-{attempt}")


def uploading_dir(role_dir: Path, attempt: str) -> Path:
    """Returns the folder that protects a checkpoint from deletion while the checkpoint is copied to a remote store."""
    return role_dir.with_name(f".{role_dir.name}.uploading-{attempt}")


def metrics_file(place: Path, role: str, attempt: str) -> Path:
    """Returns the file with the metrics that were set after a role's checkpoint was saved.

    Args:
        place: the step's folder.
        role: the role.
        attempt: the id of the save. Readers ignore files of metrics with the id of an earlier save.
    """
    return place / f".{role}.metrics-{attempt}.json"


def parse_metrics_file(name: str) -> tuple[str, str] | None:
    """Returns the role and the attempt in the name of a file of metrics; None for any other name."""
    match = _METRICS_FILE.fullmatch(name)
    return None if match is None else (match.group(1), match.group(2))


def handed_over_note(role_dir: Path, attempt: str, rank: int) -> Path:
    """Returns the file in which a rank notes the files that were handed over to a save (`steps.handed_over`)."""
    return role_dir.with_name(f".{role_dir.name}.handed_over-{attempt}-{rank:05d}.json")


def parse_handed_over_note(name: str) -> tuple[str, str] | None:
    """Returns the role and the attempt in the name of a note of handed-over files; None for any other name."""
    match = _HANDED_OVER_NOTE.fullmatch(name)
    return None if match is None else (match.group(1), match.group(2))


def handed_over_copy(note: Path) -> Path:
    """Returns the temporary file of a copy that will replace a linked file of the checkpoint.

    `note` is the path of the note.
    """
    return note.with_suffix(".copy")


def dropped_dir(role_dir: Path, attempt: str) -> Path:
    """Returns the path to which an optimizer's folder is renamed before retention removes its files."""
    return role_dir / f".{OPTIMIZER_DIR}.dropped-{attempt}"


def is_dropped_dir(name: str) -> bool:
    """Returns True for the name of an optimizer's folder that retention has taken out of a checkpoint."""
    return _DROPPED_DIR.fullmatch(name) is not None


def partial_file(role_dir: Path, path: str, position: int) -> Path:
    """Returns the hidden file into which a copy of another node's file is written until the copy is complete.

    The hidden file is in the first folder of `path`. No file of a checkpoint has such a name in this folder: only files
    of parts can have any name, and files of parts are in deeper folders. `path` is the copied file's path in the role's
    folder, and `position` is this file's position in the manifest's list of files.
    """
    return role_dir / Path(path).parts[0] / f".copy-{position}.partial"


def deleted_dir(step_path: Path, attempt: str) -> Path:
    """Returns the path to which a step's folder is renamed before it is deleted."""
    return step_path.with_name(f".deleted-{step_path.name}-{attempt}")


def parse_work_dir(name: str) -> RoleWorkDir | None:
    """Parses the name of a working folder. Returns None for any other name."""
    match = _ROLE_WORK_DIR.fullmatch(name)
    return RoleWorkDir(*match.groups()) if match else None


def run_home(node_folder: Path, root: Path) -> Path:
    """Returns the folder, below a node's folder, for the identity of a root's run.

    Several roots may use the same node's folder, so each root has a separate folder for the identity of its run.
    """
    return node_folder / f".run-{hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]}"


def remote_dir(step: int, role: str, attempt: str) -> str:
    """Returns the folder for one save of a role, as a path below the root of a remote store."""
    return f"{step_name(step)}/{role}/{attempt}"


def is_attempt(name: str) -> bool:
    """Returns True if a name is an attempt's id, which names the folder of one save in a remote store."""
    return _ATTEMPT.fullmatch(name) is not None


def secret_file(folder: Path, role: str, nonce: str) -> Path:
    """Returns the file from which the ranks of a job read the secret that the job's nodes share."""
    return folder / f".{role}.secret-{nonce}"


def is_deleted_dir(name: str) -> bool:
    """Returns True for the name of a folder whose step is being deleted."""
    return _DELETED_DIR.fullmatch(name) is not None


def trial_dir(root: Path, attempt: str) -> Path:
    """Returns the folder in which `mcore-ckpt doctor` tries what the file system can do."""
    return root / f".doctor-{attempt}"


def is_trial_dir(name: str) -> bool:
    """Returns True for the name of a folder in which `mcore-ckpt doctor` tries what the file system can do."""
    return _TRIAL_DIR.fullmatch(name) is not None


def is_under_way(name: str, file: Path) -> bool:
    """Returns True for the name of a temporary file with which `io.files.replace_file` replaces `file`."""
    return name.startswith(f".{file.name}.")


def trainer_file(root: Path, role: str) -> Path:
    """Returns the file of the trainer lock, which records the process that saves `role` below `root`."""
    return root / f".{role}.trainer.json"


def role_of_trainer_file(name: str) -> str | None:
    """Returns the role of a trainer lock, from the file's name; None for any other name."""
    match = _TRAINER_FILE.fullmatch(name)
    return None if match is None else match.group(1)


def rules_file(root: Path, role: str) -> Path:
    """Returns the file with the rules of retention of a role that shares its steps with other roles."""
    return root / f".{role}.retention.json"


def role_of_rules_file(name: str) -> str | None:
    """Returns the role of a file with rules of retention, from the file's name; None for any other name."""
    match = _RULES_FILE.fullmatch(name)
    return None if match is None else match.group(1)


def parse_tracker(text: str) -> int | None:
    """Returns the step that a tracker names; None if the text was cut, or names no step (Megatron writes `release`)."""
    text = text.strip()
    return int(text) if _TRACKER.fullmatch(text) else None


def model_file(tp: int, pp: int) -> str:
    """Returns the path, below a role's folder, of a model file with all tensors, or with all tensors except experts."""
    return f"{MODEL_DIR}/mp_rank_{tp:02d}_{pp:03d}/{MODEL_FILE}"


def expert_file(etp: int, pp: int, ep: int) -> str:
    """Returns the path of a model file with experts, for layouts in which experts have separate files."""
    return f"{MODEL_DIR}/mp_rank_{etp:02d}_{pp:03d}_{ep:03d}/{MODEL_FILE}"


def optimizer_file(pp: int, tp: int, cp: int, dp: int) -> str:
    """Returns the path of the file with one rank's shard of the optimizer's state."""
    return f"{OPTIMIZER_DIR}/distrib_optim_pp{pp}_tp{tp}_cp{cp}_dp{dp}.pt"


def rng_file(pp: int, tp: int, cp: int, dp: int) -> str:
    """Returns the path of the file with the states of one rank's random number generators."""
    return f"{RNG_DIR}/rng_states_pp{pp}_tp{tp}_cp{cp}_dp{dp}.pt"


def extra_file(pp: int, tp: int, cp: int, dp: int) -> str:
    """Returns the path of the file with the extra state that the trainer passed to `save` on one rank."""
    return f"{EXTRA_DIR}/extra_state_pp{pp}_tp{tp}_cp{cp}_dp{dp}.pt"


def part_dir(part: str, rank: int) -> str:
    """Returns the path of the folder with the files that one rank has saved for a part of the step."""
    return f"{PARTS_DIR}/{part}/rank_{rank:05d}"


def parse_part(path: str) -> tuple[str, int, str] | None:
    """Splits the path of a part's file into part, rank and path below `part_dir`. Returns None for any other path."""
    match = _PART_PLACE.fullmatch(path)
    return (match.group(1), int(match.group(2)), match.group(3)) if match else None


def is_part(name: str) -> bool:
    """Returns True if a part of a step can have this name."""
    return _PART.fullmatch(name) is not None


def check_part(name: str) -> str:
    """Returns `name` if it can be the name of a part. Raises InvalidArgumentError otherwise."""
    if not isinstance(name, str) or not is_part(name):
        raise InvalidArgumentError(
            f"part {name!r} is not a folder name: use at most 128 letters, digits, '_', '-' and '.'"
        )
    return name


def problem_of_names(folder: Path, paths: Iterable[str]) -> str | None:
    """Returns why a manifest cannot list some files, and what the user can do; None if a manifest can list all files.

    Args:
        folder: the folder that the paths are relative to.
        paths: the paths of the files, and of folders whose names must follow the same rules.
    """
    seen = set[str]()
    for path in paths:
        if not path.isprintable() or "\\" in path:
            return f"{path!r} cannot be the name of a file: use printable characters, and no backslash"
        if path.casefold() in seen:
            return (
                f"{folder / path}: another file's name differs only in upper and lower case, and some file systems "
                "treat the two as one file: rename one of them"
            )
        seen.add(path.casefold())
    return None


def config_dirs(role_dir: Path) -> list[Path]:
    """Returns the folders that can hold the `config.json` and the tokenizer of a checkpoint's model."""
    return [role_dir / name for name in _CONFIG_DIRS]


def config_dir(role_dir: Path) -> Path | None:
    """Returns the first of the `config_dirs` that holds a `config.json`; None if no folder does."""
    return next((folder for folder in config_dirs(role_dir) if (folder / "config.json").is_file()), None)
