"""`mcore-ckpt merge`: writes a checkpoint as a HuggingFace model, without GPUs and without megatron."""

from __future__ import annotations

import argparse
import re
from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_ckpt.amounts import rate_text, size_text
from mcore_ckpt.cli import arguments
from mcore_ckpt.cli.progress import progress_in, progress_of_bytes
from mcore_ckpt.cli.results import result_console, show_result
from mcore_ckpt.config import MERGE_TIMEOUT_S
from mcore_ckpt.errors import InvalidArgumentError

if TYPE_CHECKING:
    from mcore_ckpt.tools.convert.merge import MergeReport, MergeRequest

HELP = "make a HuggingFace model of a checkpoint"
DESCRIPTION = """\
Writes a committed checkpoint as a HuggingFace model, on one machine and without GPUs. The model need not fit into
memory. The folder appears once it is complete. Under torchrun the ranks share the work."""

EXAMPLES = (
    "merge checkpoints merged # the newest complete step",
    "merge checkpoints/global_steps_100/actor merged --dtype bfloat16 --max-shard-size 2GiB",
    "merge checkpoints adapter --adapters only # LoRA for PEFT",
)

_DTYPES = ("float32", "bfloat16", "float16")
_HOW = {"merge": "adapters merged", "beside": "adapters in lora_adapter/", "only": "only its adapters"}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # Each argument can also be given with the flag that verl's merger has for it.
    for name, flag, kind, what in (
        ("source", "--local_dir", arguments.expanded_path, "folder of a role, of a step, or of the steps"),
        ("target", "--target_dir", arguments.expanded_path, "folder to make; it may exist if it is empty"),
    ):
        parser.add_argument(name, type=kind, nargs="?", help=what)
        parser.add_argument(flag, type=kind, dest=f"{name}_flag", metavar="DIR", help=f"the same as {name}")
    arguments.add_step(parser)
    parser.add_argument("--role", metavar="NAME", help="role to merge, if the step has several")
    parser.add_argument(
        "--backend", choices=("megatron", "fsdp"), default="megatron", help="framework that trained the model"
    )
    text = (
        "folder with config.json and tokenizer, or a model on the hub that has them (the checkpoint's own if not given)"
    )
    parser.add_argument("--hf_model_path", type=arguments.folder_or_model, metavar="MODEL", help=text)
    arguments.add_revision(parser, "--hf_model_path")
    parser.add_argument("--dtype", choices=_DTYPES, help="dtype of the weights (as saved if not given)")
    parser.add_argument(
        "--quantize",
        choices=("fp8-block",),
        help="write linear layers as float8 with a scale for each block, as DeepSeek-V3 is published",
    )
    parser.add_argument(
        "--max-shard-size", type=_size, metavar="SIZE", help="largest size of a file, such as 500MiB (5GB if not given)"
    )
    arguments.add_ignore(parser, "tensors of the checkpoint")
    parser.add_argument("--allow-nan", action="store_true", help="write weights that are NaN instead of refusing them")
    parser.add_argument(
        "--tie-word-embedding",
        action="store_true",
        help="state that the embeddings are tied; an error if config.json or the tensors contradict",
    )
    parser.add_argument(
        "--is-value-model",
        action="store_true",
        help="state that the model is a critic; an error if the tensors contradict",
    )
    parser.add_argument(
        "--adapters",
        choices=("merge", "beside", "only"),
        help="LoRA adapters: merge: into the weights (the default; if the checkpoint has only adapters, into the "
        "weights in --hf_model_path); beside: next to the unchanged weights, in PEFT's form in lora_adapter/ "
        "(the default for FSDP shards, as in verl); only: the adapters alone, in PEFT's form",
    )
    parser.add_argument(
        "--lora-alpha", type=_alpha, metavar="X", help="alpha of the adapters, if the checkpoint does not have it"
    )
    parser.add_argument(
        "--hf_upload_path", metavar="REPO", help="afterwards upload the model to this HuggingFace repository"
    )
    visibility = parser.add_mutually_exclusive_group()
    visibility.add_argument("--public", action="store_true", help="if the repository is new, let everybody see it")
    visibility.add_argument("--private", action="store_true", help="if the repository is new, hide it (the default)")
    arguments.add_force(parser, "a HuggingFace model in target, or in REPO,")
    arguments.add_json(parser)
    arguments.add_ignored_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Merges a checkpoint. Returns 0 when the folder is in place and, with `--hf_upload_path`, uploaded."""
    from mcore_ckpt.tools.convert.merge import merge
    from mcore_ckpt.tools.convert.push_to_hub import can_push_to_hub, check_has_no_model, push_to_hub

    arguments.check_patterns("--ignore", args.ignore)
    request = _request(args)
    if (args.public or args.private) and args.hf_upload_path is None:
        flag = "--public" if args.public else "--private"
        raise InvalidArgumentError(f"{flag} needs a repository to upload to: give --hf_upload_path")
    if args.hf_upload_path is not None and not can_push_to_hub():
        raise InvalidArgumentError("--hf_upload_path needs huggingface_hub: pip install huggingface_hub")
    if args.hf_upload_path is not None and not args.force:
        check_has_no_model(args.hf_upload_path)
    with (
        arguments.command_agreement("merge", MERGE_TIMEOUT_S) as ranks,
        progress_of_bytes(args.json or not ranks.is_coordinator) as bar,
    ):
        report = merge(request, progress_in(bar, "merge"), ranks if ranks.world_size > 1 else None)
    if not ranks.is_coordinator:
        return 0
    if args.hf_upload_path is not None:
        push_to_hub(report.target, args.hf_upload_path, private=not args.public)
    show_result(report, as_json, _show, args.json)
    return 0


def _request(args: argparse.Namespace) -> MergeRequest:
    import torch

    from mcore_ckpt.formats import with_revision
    from mcore_ckpt.tools.convert.merge import MergeRequest

    if args.revision is not None and args.hf_model_path is None:
        raise InvalidArgumentError("--revision selects a revision of a model on the hub: give --hf_model_path, too")
    if args.hf_model_path is not None:
        arguments.check_is_folder_or_model(args.hf_model_path, "--hf_model_path", "merge --hf_model_path")
    source, target = _one_of(args, "source", "--local_dir"), _one_of(args, "target", "--target_dir")
    arguments.check_can_be_folder("target", target)
    request = MergeRequest(
        source=arguments.taken(source, "merge"),
        target=target,
        step=args.step,
        role=args.role,
        backend=args.backend,
        hf_model_path=None if args.hf_model_path is None else with_revision(args.hf_model_path, args.revision),
        dtype=None if args.dtype is None else getattr(torch, args.dtype),
        allow_nan=args.allow_nan,
        tied=True if args.tie_word_embedding else None,
        value=True if args.is_value_model else None,
        ignore=tuple(args.ignore),
        fp8_blocks=args.quantize == "fp8-block",
        adapters=args.adapters,
        lora_alpha=args.lora_alpha,
        force=args.force,
    )
    return replace(request, max_shard_bytes=args.max_shard_size) if args.max_shard_size else request


def _one_of(args: argparse.Namespace, name: str, flag: str) -> Path:
    given: list[Path] = [path for path in (getattr(args, name), getattr(args, f"{name}_flag")) if path is not None]
    if not given and hasattr(args, f"default_{name}"):
        given.append(getattr(args, f"default_{name}"))
    if len(given) != 1:
        raise InvalidArgumentError(f"{name}: give it once, either by position or as {flag}")
    return given[0]


def _alpha(text: str) -> float:
    with suppress(ValueError):
        if 0 < (alpha := float(text)) < inf:
            return alpha
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")


def _size(text: str) -> int:
    """Returns a size in bytes. As in transformers, GB is a power of ten and GiB a power of two."""
    match = re.fullmatch(r"(\d+)\s*([KMG]I?B)?", text.strip().upper())
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB, 500MiB or 100000")
    return int(match[1]) * _UNITS[match[2] or ""]


def _show(report: MergeReport) -> None:
    console = result_console()
    how = "" if report.adapters is None else f", {_HOW[report.adapters]}"
    console.print(f"{report.target}: {report.model}, {str(report.dtype).removeprefix('torch.')}{how}")
    console.print(
        f"{size_text(report.nbytes)} in {report.files} files, {report.seconds:.1f} s "
        f"({rate_text(report.nbytes, report.seconds)})",
    )
    for each in report.left_out:
        console.print(f"  {each.text}")
    for different in report.other_model:
        console.print(f"  transformers computes something else: {different}")


def as_json(report: MergeReport) -> dict[str, Any]:
    return {
        "source": str(report.source),
        "target": str(report.target),
        "model": report.model,
        "dtype": str(report.dtype).removeprefix("torch."),
        "files": report.files,
        "bytes": report.nbytes,
        "multi_token_prediction": report.has_mtp,
        **({} if report.adapters is None else {"adapters": report.adapters}),
        "left_out": [each.as_json() for each in report.left_out],
        "other_model": list(report.other_model),
        "seconds": report.seconds,
    }
