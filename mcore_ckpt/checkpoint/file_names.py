"""Every name on disk, formatted and parsed here and nowhere else. See docs/format.md."""

from __future__ import annotations

import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_ckpt.errors import InvalidArgumentError

TRACKER_FILE = "latest_checkpointed_iteration.txt"
MANIFEST_FILE = "manifest.json"
OWNER_FILE = ".owner.json"
# In a step's folder: retention leaves the step alone.
PINNED_FILE = ".pinned"
# In a staging folder: the manifest of what the HuggingFace model of the same save is made from.
WRITTEN_FILE = ".written.json"
MODEL_DIR = "model"
MODEL_FILE = "model_states.pt"
HUGGINGFACE_DIR = "huggingface"

OPTIMIZER_DIR = "optim"
RNG_DIR = "rng_states"
EXTRA_DIR = "extra_state"
COMMON_FILE = f"{OPTIMIZER_DIR}/common.pt"
# What a save puts into a role's folder. What else is there is somebody else's.
_OWN_NAMES = {MANIFEST_FILE, OWNER_FILE, WRITTEN_FILE, MODEL_DIR, OPTIMIZER_DIR, RNG_DIR, EXTRA_DIR, HUGGINGFACE_DIR}

# Ours, verl's and ROLL's.
_STEP_PREFIX = r"(?:global_steps?_|checkpoint-)"
_STEP_DIR = re.compile(_STEP_PREFIX + r"(0|[1-9][0-9]*)")
_ROLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
# Its staging folder has a longer name, and file systems take 255 bytes.
_ROLE_LENGTH = 128
# Of roles, and of folders that are put in place as theirs are and have any name: "Qwen2.5-7B".
_ROLE_WORK_DIR = re.compile(r"\.([^/]+)\.(staging|replaced|uploading)-([0-9a-f]+)")
_DELETED_DIR = re.compile(r"\.deleted-" + _STEP_PREFIX + r"[0-9]+-[0-9a-f]+")
_TRAINER_FILE = re.compile(r"\.([^./]+)\.trainer\.json")
_ATTEMPT = re.compile(r"[0-9a-f]{32}")
_TRACKER = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True)
class RoleWorkDir:
    """A folder of a save that is under way, of a checkpoint that a newer save has replaced, or that says of one that it
    is being copied.
    """

    role: str
    purpose: str  # "staging", "replaced" or "uploading"
    attempt: str


def step_dir(root: Path, step: int) -> Path:
    return root / step_name(step)


def step_name(step: int) -> str:
    return f"global_steps_{step}"


def step_dirs(root: Path) -> dict[int, list[Path]]:
    """All step folders below `root` by step; of several names of one step `global_steps_` is first."""
    found: dict[int, list[Path]] = {}
    if not root.is_dir():
        return found
    for path in sorted(root.iterdir(), key=lambda p: p.name, reverse=True):
        match = _STEP_DIR.fullmatch(path.name)
        if match and _may_be_folder(path):
            found.setdefault(int(match.group(1)), []).append(path)
    return found


def _may_be_folder(path: Path) -> bool:
    """What cannot be looked at counts, and a link that leads nowhere: a step that is missing has to be told."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        return path.is_symlink()
    except OSError:
        return True


def megatron_dir(root: Path, iteration: int) -> Path:
    """Where Megatron-LM keeps a checkpoint of its own (`get_checkpoint_name`, core_r0.16)."""
    return root / f"iter_{iteration:07d}"


def parse_step(name: str) -> int | None:
    """The step of a folder name, or None if it is not a step folder's."""
    match = _STEP_DIR.fullmatch(name)
    return int(match.group(1)) if match else None


def step_root(role_dir: Path, role: str, step: int) -> Path | None:
    """The folder of steps in which a role's folder is part of a step; None if it is none.

    That is `<root>/<step>/<role>`, and `<root>/<step>` itself, as verl's SFT trainer has it, whose steps have one role.

    Raises InvalidArgumentError if the folder is another step's.
    """
    step_path = role_dir if parse_step(role_dir.name) is not None else role_dir.parent
    found = parse_step(step_path.name)
    if found is None:
        return None
    if found != step:
        raise InvalidArgumentError(f"{role_dir} is a folder of step {found}, not of step {step}")
    return step_path.parent if step_path is role_dir or role_dir.name == role else None


def is_own(name: str) -> bool:
    """Whether a save writes a file or folder of this name into a role's folder."""
    return name in _OWN_NAMES


def check_role(role: str) -> str:
    """The role. Raises InvalidArgumentError if it cannot be the name of a role's folder (a path, a step, too long)."""
    if not _ROLE.fullmatch(role):
        raise InvalidArgumentError(f"role {role!r} is not a folder name: use letters, digits, '_' and '-'")
    if parse_step(role) is not None:
        raise InvalidArgumentError(f"role {role!r} is the name of a step's folder: use another")
    if len(role) > _ROLE_LENGTH:
        raise InvalidArgumentError(f"role {role!r} has {len(role)} letters: use {_ROLE_LENGTH} at most")
    return role


def check_roles(roles: Sequence[str]) -> tuple[str, ...]:
    """The roles of a step, each once.

    Raises:
        InvalidArgumentError: a name cannot be a folder's, it is a string (which would be one role per letter), or two
            names are one folder where the file system does not tell capital letters from small ones.
    """
    if isinstance(roles, str):
        raise InvalidArgumentError(f"roles is the string {roles!r}: use a list of roles, such as [{roles!r}]")
    unique = tuple(dict.fromkeys(map(check_role, roles)))
    if len({role.lower() for role in unique}) < len(unique):
        raise InvalidArgumentError(
            f"roles {unique} differ in capital letters alone: on some file systems they are one folder"
        )
    return unique


def is_role(name: str) -> bool:
    return _ROLE.fullmatch(name) is not None and parse_step(name) is None


def staging_dir(role_dir: Path, attempt: str) -> Path:
    return role_dir.with_name(f".{role_dir.name}.staging-{attempt}")


def replaced_dir(role_dir: Path, attempt: str) -> Path:
    return role_dir.with_name(f".{role_dir.name}.replaced-{attempt}")


def uploading_dir(role_dir: Path, attempt: str) -> Path:
    """The folder that keeps a checkpoint from being deleted while it is copied to a remote store."""
    return role_dir.with_name(f".{role_dir.name}.uploading-{attempt}")


def deleted_dir(step_path: Path, attempt: str) -> Path:
    return step_path.with_name(f".deleted-{step_path.name}-{attempt}")


def parse_work_dir(name: str) -> RoleWorkDir | None:
    match = _ROLE_WORK_DIR.fullmatch(name)
    return RoleWorkDir(*match.groups()) if match else None


def remote_dir(step: int, role: str, attempt: str) -> str:
    """The folder of one save of a role below the root of a remote store."""
    return f"{step_name(step)}/{role}/{attempt}"


def is_attempt(name: str) -> bool:
    """Whether a folder of a remote store is that of a save."""
    return _ATTEMPT.fullmatch(name) is not None


def is_deleted_dir(name: str) -> bool:
    return _DELETED_DIR.fullmatch(name) is not None


def is_tracker_under_way(name: str) -> bool:
    """Whether a file is a tracker that was being replaced (`storage.files.replace_file`)."""
    return name.startswith(f".{TRACKER_FILE}.")


def trainer_file(root: Path, role: str) -> Path:
    """Names the process that saves `role` below `root`."""
    return root / f".{role}.trainer.json"


def is_trainer_file_under_way(name: str, role: str) -> bool:
    """Whether a file is a role's trainer file that was being replaced (`storage.files.replace_file`)."""
    return name.startswith(f".{trainer_file(Path(), role).name}.")


def is_trainer_file_of_another(name: str, role: str) -> bool:
    """Whether a file is the trainer file of another role."""
    match = _TRAINER_FILE.fullmatch(name)
    return match is not None and match.group(1) != role


def parse_tracker(text: str) -> int | None:
    """The step a tracker names, or None if it is torn or holds anything else (Megatron writes `release` there)."""
    text = text.strip()
    return int(text) if _TRACKER.fullmatch(text) else None


def model_file(tp: int, pp: int) -> str:
    return f"{MODEL_DIR}/mp_rank_{tp:02d}_{pp:03d}/{MODEL_FILE}"


def expert_file(etp: int, pp: int, ep: int) -> str:
    return f"{MODEL_DIR}/mp_rank_{etp:02d}_{pp:03d}_{ep:03d}/{MODEL_FILE}"


def optimizer_file(pp: int, tp: int, cp: int, dp: int) -> str:
    return f"{OPTIMIZER_DIR}/distrib_optim_pp{pp}_tp{tp}_cp{cp}_dp{dp}.pt"


def rng_file(pp: int, tp: int, cp: int, dp: int) -> str:
    return f"{RNG_DIR}/rng_states_pp{pp}_tp{tp}_cp{cp}_dp{dp}.pt"


def extra_file(pp: int, tp: int, cp: int, dp: int) -> str:
    return f"{EXTRA_DIR}/extra_state_pp{pp}_tp{tp}_cp{cp}_dp{dp}.pt"
