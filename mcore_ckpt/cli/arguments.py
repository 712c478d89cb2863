"""Parses and checks arguments that several commands share."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_ckpt.errors import CheckpointError, InvalidArgumentError
from mcore_ckpt.urls import local_path

if TYPE_CHECKING:
    from mcore_ckpt.ranks import Agreement


def expanded_path(text: str) -> Path:
    """Returns a path, with the home folder in place of a leading `~`.

    A shell does not replace the `~` in `--dir=~/x`.

    Raises ArgumentTypeError for a URL.
    """
    try:
        return local_path(text, "the path")
    except InvalidArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def step_number(text: str) -> int:
    """Returns the number of a step, which is at least 0."""
    number = _number_in(text)
    if number is None or number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a step: use a number of 0 or more")
    return number


def at_least(least: int) -> Callable[[str], int]:
    """Returns a parser of whole numbers that are not smaller than `least`."""

    def number(text: str) -> int:
        found = _number_in(text)
        if found is None or found < least:
            raise argparse.ArgumentTypeError(f"{text}: use {least} or more")
        return found

    return number


def _number_in(text: str) -> int | None:
    """Returns the whole number in a text; None if the text is not a number, or has thousands of digits."""
    try:
        return int(text)
    except ValueError:
        return None


def seconds_in(text: str) -> float:
    """Returns the seconds of an argument such as 90, 45min, 12h or 2d, for argparse."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *(s|min|h|d)?", text)
    seconds = 0.0 if match is None else float(match.group(1)) * _SECONDS[match.group(2) or "s"]
    if not seconds:
        raise argparse.ArgumentTypeError(f"{text}: use a time, such as 45min, 12h or 2d")
    return seconds


_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def folder_or_model(text: str) -> str:
    """Returns the path of a HuggingFace folder, with `~` replaced, or the unchanged name of a model on the hub."""
    expanded_path(text)  # refuses a URL
    return os.path.expanduser(text)


# The options for the sizes of a layout, with their help texts.
SIZES: Mapping[str, str] = {
    "tp": "tensor-parallel size",
    "pp": "pipeline-parallel size",
    "vpp": "virtual stages per pipeline rank",
    "cp": "context-parallel size",
    "dp": "data-parallel size",
    "ep": "expert-parallel size",
    "etp": "tensor-parallel size of experts",
}

_STEPS = frozenset({"root", "empty", "other"})  # "other": a root may have other files before its first step
_CHECKPOINT = frozenset({"root", "step", "role", "empty", "other"})
# Stands for all kinds of foreign checkpoints (`PathInfo.is_foreign_checkpoint`).
_FOREIGN_CHECKPOINT = "foreign checkpoint"
_FOREIGN = frozenset({"foreign root", _FOREIGN_CHECKPOINT})
_ANY_FOLDER = frozenset(
    {*_CHECKPOINT, *_FOREIGN, "parent", "inside", "legacy", "huggingface", "adapter", "hub cache"},
)
_HF = frozenset({"huggingface", "adapter", "empty", "other"})
# The kinds of paths (`tools.examine.what_is`) that each command takes. All commands take empty and unknown folders
# here, because the commands' own messages then say what is missing.
TAKES: Mapping[str, frozenset[str]] = {
    "list": _STEPS,
    "watch": _STEPS,
    "prune": _STEPS,
    "branch": _STEPS,
    "inspect": _CHECKPOINT,
    "verify": _CHECKPOINT,
    "diff": _CHECKPOINT,
    "reshard": _CHECKPOINT,
    "convert": _CHECKPOINT,
    "collect": _STEPS,
    "merge": _CHECKPOINT | _FOREIGN,
    "test --local_dir": _CHECKPOINT | _FOREIGN,
    "test": _HF,
    "test --reference": _HF,
    "convert --hf_model_path": _HF,
    # These options need only a config.json, so they also take the folder huggingface/ of a role, which may have no
    # weights.
    "merge --hf_model_path": _HF | {"inside"},
    "bench --model": _HF | {"inside"},
    "convert CHECKPOINT --hf_model_path": _ANY_FOLDER,
    "doctor": _ANY_FOLDER,
    "bench": _ANY_FOLDER,
}
# If one of these commands gets a path within a folder of steps, the command takes the folder of steps. Other commands
# do not take the folder of steps instead, because with this folder they would do more than the user wants.
_TAKES_ABOVE = ("list", "watch")


def taken(path: Path, command: str, flag: str = "") -> Path:
    """Returns the path that a command is to use: the given path, or the only folder of steps right below or above it.

    If the result is not the given path, a line on stderr says so. `command` is a key of TAKES. `flag` is the option
    that named the path, for messages; empty if the path was given by position.

    Raises:
        InvalidArgumentError: the command does not take such a path. The message says what the path is, and which
            command or path can be used instead.
        CheckpointError: the path cannot be read.
    """
    from mcore_ckpt.tools.examine.what_is import what_is

    found = what_is(path)
    if (_FOREIGN_CHECKPOINT if found.is_foreign_checkpoint else found.kind) in TAKES[command]:
        return path
    goes_above = found.kind in ("inside", "step", "role") and command in _TAKES_ABOVE
    goes_below = found.kind == "parent" and "root" in TAKES[command]
    if len(found.roots) == 1 and (goes_above or goes_below):
        print(f"{path}: has no steps: taking {found.roots[0]}", file=sys.stderr)
        return found.roots[0]
    advice = _hub_advice(path, command) if found.kind == "missing" and not found.advice else ""
    message = f"{flag + ' ' if flag else ''}{found.refusal(command)}{advice}"
    raise CheckpointError(message) if found.kind == "unreadable" else InvalidArgumentError(message)


def _hub_advice(path: Path, command: str) -> str:
    """Returns advice if a path looks like the name of a model on the hub; otherwise an empty text."""
    from mcore_ckpt.formats import HubModel

    if HubModel.find(path) is None:
        return ""
    return {
        "merge": ": a model on the hub is only taken as --hf_model_path",
        "convert": ": a model on the hub is only taken as --hf_model_path",
        "test --local_dir": ": a model on the hub is only taken as --hf_model_path, or as the model to test",
        "convert CHECKPOINT --hf_model_path": ": with CHECKPOINT, name a folder, not a model on the hub",
    }.get(command, "")


def check_can_be_file(flag: str, path: Path) -> None:
    """Raises InvalidArgumentError (naming `flag`) if a path cannot be a file, for example because it is a folder."""
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "no regular file"
        raise InvalidArgumentError(f"{flag} {path}: is {what}: name another file")
    if not path.parent.is_dir():
        raise InvalidArgumentError(f"{flag} {path}: there is no folder {path.parent}: make it, or name another file")


def check_can_be_folder(flag: str, path: Path) -> None:
    """Raises InvalidArgumentError if no folder can be made at a path, because it is a file or is below a file."""
    with suppress(OSError):  # the command itself will report that the path cannot be read
        there = next(each for each in (path, *path.absolute().parents) if each.exists())
        if not there.is_dir():
            what = "is" if there == path else f"{there} is"
            raise InvalidArgumentError(f"{flag} {path}: {what} a file, not a folder: name another folder")


def check_is_folder_or_model(name: str, flag: str, command: str) -> None:
    """Raises InvalidArgumentError unless `name` is a folder that `command` takes, or can name a model on the hub."""
    from mcore_ckpt.formats import HubModel

    if Path(name).exists():
        taken(Path(name), command, flag)
    elif HubModel.find(name) is None:
        raise InvalidArgumentError(
            f"{flag and f'{flag} '}{name}: there is no such folder, and models on the hub have names such as "
            "Qwen/Qwen3-0.6B"
        )


def check_patterns(flag: str, patterns: Sequence[str]) -> None:
    """Raises InvalidArgumentError unless all patterns of a flag are regular expressions."""
    from mcore_ckpt.sharding import compiled

    compiled(patterns, flag)


def check_not_given(args: argparse.Namespace, flags: Sequence[str], why: str) -> None:
    """Raises InvalidArgumentError if some of these flags are given. The message says why they have no effect."""
    given = [flag for flag in flags if getattr(args, _name_of(flag)) not in (None, False)]
    if given:
        raise InvalidArgumentError(f"{', '.join(given)}: without effect, {why}: leave out these options")


def add_ignore(parser: argparse.ArgumentParser, tensors: str = "tensors") -> None:
    """Adds `--ignore`, whose help calls the left-out tensors `tensors`. `check_patterns` checks the option's values."""
    text = f"leave out {tensors} whose whole name matches; may be repeated"
    parser.add_argument("--ignore", action="append", default=[], metavar="REGEX", help=text)


def add_step(parser: argparse._ActionsContainer, when: str = "") -> None:
    """Adds `--step`. Its help begins with the condition `when`, if there is one."""
    text = f"{when}step in a folder of steps (the newest complete one if not given)"
    parser.add_argument("--step", type=step_number, metavar="N", help=text)


def add_force(parser: argparse.ArgumentParser, what: str) -> None:
    """Adds `--force`. Its help says that the option replaces `what`, and what the option never replaces."""
    parser.add_argument(
        "--force",
        action="store_true",
        help=f"replace {what} that is there already; a pinned step is never replaced, and nothing is written to a "
        "folder of steps in which a trainer that is alive saves",
    )


def add_json(
    parser: argparse.ArgumentParser, what: str = "print the result as one JSON object, and nothing else"
) -> None:
    """Adds `--json`, with the help text `what`."""
    parser.add_argument("--json", action="store_true", help=what)


def add_revision(parser: argparse.ArgumentParser, flag: str) -> None:
    """Adds `--revision`. `flag` is the option that names the model on the hub."""
    parser.add_argument(
        "--revision",
        metavar="NAME",
        help=f"branch, tag or commit, if {flag} names a model on the hub (the main branch if not given)",
    )


def add_ignored_flags(parser: argparse.ArgumentParser) -> None:
    """Adds flags of verl's merger that are accepted, but have no effect here."""
    for flag, why in (
        ("--use_cpu_initialization", "no model is made"),
        ("--trust-remote-code", "no code of the model is executed"),
    ):
        parser.add_argument(flag, action="store_true", help=f"accepted, but without effect: {why}")


@contextmanager
def command_agreement(name: str, timeout_s: float, start_s: float | None = None) -> Iterator[Agreement]:
    """Yields the agreement of the processes that torchrun has started, or of a single process.

    A process waits at most `timeout_s` seconds for other processes that work, and at most `start_s` seconds
    (START_TIMEOUT_S if None) until the other processes have started.

    Raises InvalidArgumentError if torchrun's variables are incomplete (some job schedulers set only a few of them), and
    AgreementError if a process does not start.
    """
    from mcore_ckpt.config import START_TIMEOUT_S
    from mcore_ckpt.ranks import Seat, job_agreement

    start_s = START_TIMEOUT_S if start_s is None else start_s
    try:
        seat = Seat.read(os.environ)
    except ValueError as error:
        raise InvalidArgumentError(
            f"WORLD_SIZE is {os.environ.get('WORLD_SIZE')!r}, but the variables of torchrun are incomplete or invalid "
            f"({error}): use torchrun, or unset WORLD_SIZE to use a single process"
        ) from None
    with job_agreement(name, seat, timeout_s, start_s) as agreement:
        yield agreement


def _name_of(flag: str) -> str:
    """Returns the name that argparse gives to the value of a flag."""
    return flag.lstrip("-").replace("-", "_")


STAGE_FLAGS = (
    "--first-stage-layers",
    "--last-stage-layers",
    "--pipeline-layout",
    "--hybrid-layer-pattern",
    "--account-for-embedding",
    "--account-for-loss",
)


def add_stage_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that divide layers unevenly among pipeline stages. `stage_options` reads them."""
    for which in ("first", "last"):
        text = f"number of layers on the {which} pipeline rank, if the layers are not divided evenly"
        parser.add_argument(f"--{which}-stage-layers", type=int, metavar="N", help=text)
    parser.add_argument("--pipeline-layout", metavar="TEXT", help='pipeline layout of megatron, such as "Et|t*2|t|tL"')
    parser.add_argument(
        "--hybrid-layer-pattern",
        metavar="TEXT",
        help='pattern of a HybridModel, such as "M*-|ME", with one segment for each stage',
    )
    parser.add_argument(
        "--account-for-embedding", action="store_true", help="count the embedding as a layer of the first stage"
    )
    parser.add_argument("--account-for-loss", action="store_true", help="count the loss as a layer of the last stage")


def stage_options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the values of the options of `add_stage_options`, as fields of WantedLayout."""
    return {name: getattr(args, name) for name in map(_name_of, STAGE_FLAGS)}
