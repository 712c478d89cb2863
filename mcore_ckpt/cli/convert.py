"""`mcore-ckpt convert`: writes a HuggingFace model as a checkpoint to train from. The model is never all in memory."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mcore_ckpt.cli.arguments import (
    add_ignore,
    add_ignored_flags,
    add_json,
    check_is_folder,
    check_patterns,
    expanded_path,
    torchrun_variables,
)
from mcore_ckpt.cli.progress import progress_of_bytes
from mcore_ckpt.config import CONVERT_TIMEOUT_S
from mcore_ckpt.errors import InvalidArgumentError

if TYPE_CHECKING:
    from mcore_ckpt.ranks import Agreement
    from mcore_ckpt.tools.convert import ConversionReport

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DESCRIPTION = """\
Writes the weights of a HuggingFace folder as a checkpoint. They are streamed, so no GPU is needed and the model need
not fit into memory. The format "native" is this package's own, divided for the given layout (it loads under any other
layout, too). The format "torch_dist" is megatron's, which needs no layout. Under torchrun the processes share the work.
The result appears once it is complete."""

_SIZES = (
    ("tp", "tensor-parallel size"),
    ("pp", "pipeline-parallel size"),
    ("vpp", "virtual stages per pipeline rank"),
    ("ep", "expert-parallel size"),
    ("etp", "tensor-parallel size of experts"),
)


def add_to(subparsers: Subparsers) -> None:
    """Adds the parser of `convert`."""
    parser = subparsers.add_parser("convert", help="make a checkpoint of a HuggingFace model", description=DESCRIPTION)
    add_arguments(parser)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options. Those with underscores have the names that verl's converter gives them."""
    parser.add_argument(
        "--hf_model_path",
        "--hf-model-path",
        type=expanded_path,
        required=True,
        metavar="DIR",
        help="the HuggingFace folder",
    )
    parser.add_argument(
        "--output_path",
        "--output-path",
        type=expanded_path,
        required=True,
        metavar="DIR",
        help="native: the folder of steps, in which global_steps_0 is made; torch_dist: the folder of the checkpoint",
    )
    parser.add_argument(
        "--format", choices=("native", "torch_dist"), default="native", help="format to write (native if not given)"
    )
    for name, what in _SIZES:
        parser.add_argument(f"--{name}", f"--{name}_size", type=int, metavar="N", help=f"{what} (1 if not given)")
    parser.add_argument("--role", default="actor", help="native: the role's name (actor if not given)")
    add_ignore(parser, "tensors of the HuggingFace model")
    parser.add_argument("--test", action="store_true", help="read the result back and compare it before it appears")
    add_json(parser)
    add_ignored_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Converts a model. Returns 0 when the checkpoint is in place."""
    check_is_folder(args.hf_model_path, "--hf_model_path")
    if args.output_path.exists() and not args.output_path.is_dir():
        raise InvalidArgumentError(f"--output_path {args.output_path}: is a file, not a folder")
    if args.format == "torch_dist" and args.output_path.exists() and any(args.output_path.iterdir()):
        raise InvalidArgumentError(
            f"--output_path {args.output_path}: exists already and is not empty: name another folder"
        )
    check_patterns("--ignore", args.ignore)
    with _agreement() as agreement, progress_of_bytes(args.json or not agreement.is_coordinator) as bar:
        task = bar.add_task(args.hf_model_path.name, total=None)
        report = _convert(args, agreement, lambda done, total: bar.update(task, completed=done, total=total))
        if agreement.is_coordinator:
            _show(report, args.json)
    return 0


def _convert(args: argparse.Namespace, agreement: Agreement, progress: Any) -> ConversionReport:
    if args.format == "torch_dist":
        from mcore_ckpt.tools.convert_torch_dist import convert_to_torch_dist

        return convert_to_torch_dist(args.hf_model_path, args.output_path, agreement, args.test, progress, args.ignore)
    from mcore_ckpt.tools.convert_native import convert_to_native
    from mcore_ckpt.tools.reshard.target import WantedLayout

    try:
        wanted = WantedLayout(tp=args.tp, pp=args.pp, vpp=args.vpp, ep=args.ep, etp=args.etp)
        return convert_to_native(
            args.hf_model_path, args.output_path, wanted, agreement, args.role, args.test, progress, args.ignore
        )
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from None


@contextmanager
def _agreement() -> Iterator[Agreement]:
    """Yields the agreement of the processes that torchrun started, or of a single process."""
    import torch.distributed as dist

    from mcore_ckpt.ranks import rendezvous

    with torchrun_variables():
        under_torchrun = int(os.environ.get("WORLD_SIZE", "1")) > 1
        if under_torchrun:
            dist.init_process_group("gloo")
    try:
        yield rendezvous("convert", CONVERT_TIMEOUT_S)
    finally:
        if under_torchrun:
            dist.destroy_process_group()


def _show(report: ConversionReport, as_json: bool) -> None:
    if as_json:
        plain = asdict(report)
        print(json.dumps({**plain, "source": str(report.source), "path": str(report.path)}))
        return
    console = Console(highlight=False, soft_wrap=True)
    speed = report.nbytes / report.seconds / 1e9
    console.print(f"{report.path}: {report.model}", markup=False)
    console.print(f"{report.nbytes / 1e9:.2f} GB in {report.seconds:.1f} s ({speed:.2f} GB/s)", markup=False)
