"""`mcore-ckpt merge`: writes a checkpoint as a HuggingFace model, without GPUs and without megatron."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mcore_ckpt.cli.arguments import add_ignored_flags, add_json, check_patterns, expanded_path, torchrun_variables
from mcore_ckpt.cli.progress import progress_of_bytes
from mcore_ckpt.errors import InvalidArgumentError

if TYPE_CHECKING:
    from mcore_ckpt.tools.merge import MergeReport, MergeRequest

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DESCRIPTION = """\
Makes a HuggingFace model's folder out of a committed checkpoint, on one machine, without GPUs and without the model in
memory. The folder is there when all of it is. Under torchrun the ranks share the work."""

_DTYPES = ("float32", "bfloat16", "float16")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def add_to(subparsers: Subparsers) -> None:
    """Adds the parser of `merge`."""
    parser = subparsers.add_parser("merge", help="make a HuggingFace model of a checkpoint", description=DESCRIPTION)
    # Each may come as verl's merger has it, too.
    for name, flag, what in (
        ("source", "--local_dir", "folder of a role, of a step, or of the steps"),
        ("target", "--target_dir", "folder to make; it may be there if it is empty"),
    ):
        parser.add_argument(name, type=expanded_path, nargs="?", help=what)
        parser.add_argument(flag, type=expanded_path, dest=f"{name}_flag", metavar="DIR", help=f"the same as {name}")
    parser.add_argument("--step", type=int, metavar="N", help="of a folder of steps; else the newest complete one")
    parser.add_argument("--role", metavar="NAME", help="of a step with several roles")
    parser.add_argument("--backend", choices=("megatron", "fsdp"), default="megatron", help="what trained the model")
    parser.add_argument(
        "--hf_model_path",
        "--hf-model-path",
        type=expanded_path,
        metavar="DIR",
        help="folder with config.json and tokenizer; else the checkpoint's own",
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="of the weights; else as saved")
    parser.add_argument("--max-shard-size", type=_size, metavar="SIZE", help="of a file: 5GB (the default), 500MiB")
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="REGEX",
        help="leave out the checkpoint's tensors of this name; may be repeated",
    )
    parser.add_argument("--allow-nan", action="store_true", help="write weights that are NaN; else they are refused")
    parser.add_argument(
        "--tie-word-embedding",
        action="store_true",
        help="say that embeddings are tied; config.json knows, and is asked whether it is so",
    )
    parser.add_argument("--is-value-model", action="store_true", help="say that it is a critic; the weights know, too")
    parser.add_argument("--hf_upload_path", "--hf-upload-path", metavar="REPO", help="upload to this repository, after")
    parser.add_argument("--private", action="store_true", help="a repository that is made is private")
    add_json(parser)
    add_ignored_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Merges. Returns 0 when the folder is in place, and pushed to a hub if that was asked for."""
    # torch takes a second to import, which `--help` need not wait for.
    from mcore_ckpt.tools.merge import merge, ranks_of_torchrun
    from mcore_ckpt.tools.push_to_hub import can_push_to_hub, push_to_hub

    check_patterns("--ignore", args.ignore)
    request = _request(args)
    if args.private and args.hf_upload_path is None:
        raise InvalidArgumentError("--private is said of a repository to upload to: give --hf_upload_path")
    if args.hf_upload_path is not None and not can_push_to_hub():
        raise InvalidArgumentError("--hf_upload_path needs huggingface_hub: pip install huggingface_hub")
    with torchrun_variables():
        ranks = ranks_of_torchrun()
    is_first = ranks is None or ranks.is_coordinator
    with progress_of_bytes(args.json or not is_first) as bar:
        task = bar.add_task("merge", total=None)
        report = merge(request, lambda done, total: bar.update(task, completed=done, total=total), ranks)
    if not is_first:
        return 0
    if args.hf_upload_path is not None:
        push_to_hub(report.target, args.hf_upload_path, args.private)
    if args.json:
        print(json.dumps(as_json(report)))
    else:
        _show(report)
    return 0


def _request(args: argparse.Namespace) -> MergeRequest:
    import torch

    from mcore_ckpt.tools.merge import MergeRequest

    request = MergeRequest(
        source=_one_of(args, "source", "--local_dir"),
        target=_one_of(args, "target", "--target_dir"),
        step=args.step,
        role=args.role,
        backend=args.backend,
        hf_model_path=args.hf_model_path,
        dtype=None if args.dtype is None else getattr(torch, args.dtype),
        allow_nan=args.allow_nan,
        tied=True if args.tie_word_embedding else None,
        value=True if args.is_value_model else None,
        ignore=tuple(args.ignore),
    )
    return replace(request, max_shard_bytes=args.max_shard_size) if args.max_shard_size else request


def _one_of(args: argparse.Namespace, name: str, flag: str) -> Path:
    given: list[Path] = [path for path in (getattr(args, name), getattr(args, f"{name}_flag")) if path is not None]
    if len(given) != 1:
        raise InvalidArgumentError(f"{name}: give it once, by its place or as {flag}")
    return given[0]


def _size(text: str) -> int:
    """Returns a size in bytes, read as transformers reads it: units are powers of ten unless they have an i."""
    match = re.fullmatch(r"(\d+)\s*([KMG]I?B)?", text.strip().upper())
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB, 500MiB or 100000")
    return int(match[1]) * _UNITS[match[2] or ""]


def _show(report: MergeReport) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{report.target}: {report.model}, {str(report.dtype).removeprefix('torch.')}", markup=False)
    speed = report.nbytes / report.seconds / 1e9
    console.print(
        f"{report.nbytes / 1e9:.2f} GB in {report.files} files, {report.seconds:.1f} s ({speed:.2f} GB/s)",
        markup=False,
    )


def as_json(report: MergeReport) -> dict[str, Any]:
    """Returns the report as JSON values."""
    return {
        "source": str(report.source),
        "target": str(report.target),
        "model": report.model,
        "dtype": str(report.dtype).removeprefix("torch."),
        "files": report.files,
        "bytes": report.nbytes,
        "multi_token_prediction": report.has_mtp,
        "seconds": report.seconds,
    }
