"""`mcore-ckpt test`: compares a merged model, or the model that a merge would make, with a reference."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mcore_ckpt.amounts import size_text
from mcore_ckpt.cli import arguments
from mcore_ckpt.cli.comparisons import NUMBERS, check_comparison, info_as_json, numbers_in_line, numbers_of
from mcore_ckpt.cli.progress import progress_in, progress_of_bytes
from mcore_ckpt.cli.results import is_terminal, result_console, show_result
from mcore_ckpt.cli.tables import table_of
from mcore_ckpt.errors import InvalidArgumentError

if TYPE_CHECKING:
    from mcore_ckpt.tools.examine.compare import ComparedTensor, Comparison, Weights

HELP = "compare a merged model with a reference"
DESCRIPTION = """\
Compares the folder of a HuggingFace model with a reference: missing tensors, extra tensors, shapes, dtypes and values.
With --local_dir it compares the model that a merge would make of a checkpoint. The exit status is 0 if the two are the
same, and 1 if not."""

EXAMPLES = (
    "test merged --reference Qwen/Qwen3-0.6B # bit for bit",
    "test merged --reference model --atol 1e-3 --any-dtype",
    "test --local_dir checkpoints --reference model # before a merge",
)

_DTYPES = ("float32", "bfloat16", "float16")
_OF_CHECKPOINTS = (
    "--backend",
    "--step",
    "--role",
    "--hf_model_path",
    "--dtype",
    "--lora-alpha",
    "--tie-word-embedding",
    "--is-value-model",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "folder of the model to check, or the name of a model on the hub"
    parser.add_argument("merged", type=arguments.folder_or_model, nargs="?", help=text)
    text = (
        "the model to compare with: a folder with one or several files of safetensors or pytorch_model.bin, or the "
        "name of a model on the hub (owner/name, owner/name@revision)"
    )
    parser.add_argument(
        "--reference", "--test_hf_dir", type=arguments.folder_or_model, metavar="MODEL", required=True, help=text
    )
    arguments.add_revision(parser, "--reference")
    text = "allowed absolute difference of a value (all bits must be equal if --atol and --rtol are 0, the default)"
    parser.add_argument("--atol", type=float, default=0.0, metavar="X", help=text)
    text = "allowed difference relative to the reference's value, in addition to --atol"
    parser.add_argument("--rtol", type=float, default=0.0, metavar="X", help=text)
    parser.add_argument("--any-dtype", action="store_true", help="compare only values, and accept other dtypes")
    arguments.add_ignore(parser)
    parser.add_argument("--most", type=int, default=10, metavar="N", help="show at most the N worst tensors (10)")
    arguments.add_json(parser)
    checkpoint = parser.add_argument_group("to compare a checkpoint instead of a merged model")
    checkpoint.add_argument(
        "--local_dir", type=arguments.expanded_path, metavar="DIR", help="folder of a role, of a step, or of the steps"
    )
    checkpoint.add_argument(
        "--backend", choices=("megatron", "fsdp"), help="framework that trained the model (megatron if not given)"
    )
    arguments.add_step(checkpoint)
    checkpoint.add_argument("--role", metavar="NAME", help="role to compare, if the step has several")
    text = "folder with config.json, or a model on the hub that has it (the checkpoint's own if not given)"
    checkpoint.add_argument("--hf_model_path", type=arguments.folder_or_model, metavar="MODEL", help=text)
    checkpoint.add_argument("--dtype", choices=_DTYPES, help="dtype to convert the weights to (as saved if not given)")
    checkpoint.add_argument(
        "--lora-alpha", type=float, metavar="X", help="alpha of the adapters, if the checkpoint does not have it"
    )
    checkpoint.add_argument("--tie-word-embedding", action="store_true", help="state that the embeddings are tied")
    checkpoint.add_argument("--is-value-model", action="store_true", help="state that the model is a critic")
    arguments.add_ignored_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Compares two models. Returns 0 if they are the same, otherwise 1."""
    _check(args)
    from mcore_ckpt.formats import with_revision
    from mcore_ckpt.tools.examine.compare import compare, open_folder
    from mcore_ckpt.tools.examine.differences import Tolerance

    if args.merged is not None:
        arguments.check_is_folder_or_model(args.merged, "", "test")
    arguments.check_is_folder_or_model(args.reference, "--reference", "test --reference")
    tolerance = Tolerance(args.atol, args.rtol, args.any_dtype)
    ours, reference = _ours(args), open_folder(with_revision(args.reference, args.revision))
    with progress_of_bytes(args.json) as bar:
        comparison = compare(ours, reference, tolerance, args.ignore, progress_in(bar, "compare"))
    show_result(comparison, as_json, partial(_show, most=args.most), args.json)
    return 0 if comparison.is_same else 1


def _check(args: argparse.Namespace) -> None:
    if (args.merged is None) == (args.local_dir is None):
        raise InvalidArgumentError("give either the folder of a merged model or, with --local_dir, a checkpoint")
    if args.local_dir is None:
        arguments.check_not_given(args, _OF_CHECKPOINTS, "because there is no checkpoint without --local_dir")
    check_comparison(args)


def _ours(args: argparse.Namespace) -> Weights:
    import torch

    from mcore_ckpt.tools.convert.merge import MergeRequest, find, prepare
    from mcore_ckpt.tools.examine.compare import open_folder

    if args.merged is not None:
        return open_folder(args.merged)
    request = MergeRequest(
        source=arguments.taken(args.local_dir, "test --local_dir", "--local_dir"),
        target=args.local_dir,
        step=args.step,
        role=args.role,
        backend=args.backend or "megatron",
        hf_model_path=args.hf_model_path,
        dtype=None if args.dtype is None else getattr(torch, args.dtype),
        tied=True if args.tie_word_embedding else None,
        value=True if args.is_value_model else None,
        lora_alpha=args.lora_alpha,
    )
    return prepare(request, find(request)).weights()


def _show(comparison: Comparison, most: int) -> None:
    console = result_console()
    worst = comparison.worst()
    _show_tensors(console, [_row(tensor) for tensor in worst[:most]])
    if len(worst) > most:
        console.print(f"and {len(worst) - most} more (--most)")
    wrong = sum(not tensor.is_same for tensor in comparison.tensors)
    verdict = "the same" if comparison.is_same else f"not the same: {wrong} differ"
    ignored = f", {len(comparison.ignored)} ignored" if comparison.ignored else ""
    console.print(
        f"{comparison.ours} and {comparison.reference}: {verdict}; {len(comparison.tensors)} tensors{ignored}, "
        f"{size_text(comparison.nbytes)} in {comparison.seconds:.1f} s",
    )


def _show_tensors(console: Console, rows: list[list[str]]) -> None:
    headings = ("tensor", "problem", "ours", "reference", *NUMBERS, "remark")
    if rows and is_terminal():
        console.print(table_of(console, headings, rows))
        return
    for name, problem, ours, reference, *numbers, remark in rows:
        words = f"{problem or 'the same'}  {name}  ours {ours}  reference {reference}{numbers_in_line(numbers)}"
        console.print(f"{words}  {remark}".rstrip())


def _row(tensor: ComparedTensor) -> list[str]:
    sides = ("-" if info is None else info.text for info in (tensor.ours, tensor.reference))
    numbers = numbers_of(str(tensor.differing or ""), tensor.max_abs, tensor.max_rel)
    return [tensor.name, tensor.problem, *sides, *numbers, tensor.remark]


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Returns the comparison as JSON values. JSON has no infinity, so infinity becomes null."""
    from mcore_ckpt.tools.examine.differences import finite_or_none

    return {
        "same": comparison.is_same,
        "ours": str(comparison.ours),
        "reference": str(comparison.reference),
        "tensors": len(comparison.tensors),
        "ignored": list(comparison.ignored),
        "bytes": comparison.nbytes,
        "seconds": comparison.seconds,
        "worst": [
            {
                "name": tensor.name,
                "problem": tensor.problem,
                "ours": info_as_json(tensor.ours),
                "reference": info_as_json(tensor.reference),
                "differing": tensor.differing,
                "max_abs": finite_or_none(tensor.max_abs),
                "max_rel": finite_or_none(tensor.max_rel),
                "remark": tensor.remark,
            }
            for tensor in comparison.worst()
        ],
    }
