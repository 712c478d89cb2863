"""`mcore-ckpt convert`: writes a HuggingFace model as a checkpoint to train from, or a checkpoint for another trainer.

The model is never all in memory.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_ckpt.amounts import moved_text
from mcore_ckpt.cli.arguments import (
    STAGE_FLAGS,
    add_force,
    add_ignore,
    add_ignored_flags,
    add_json,
    add_revision,
    add_stage_options,
    check_can_be_folder,
    check_is_folder_or_model,
    check_not_given,
    check_patterns,
    command_agreement,
    expanded_path,
    folder_or_model,
    stage_options,
    step_number,
    taken,
)
from mcore_ckpt.cli.progress import progress_of_bytes
from mcore_ckpt.cli.tables import result_console
from mcore_ckpt.config import CONVERT_TIMEOUT_S
from mcore_ckpt.errors import InvalidArgumentError

if TYPE_CHECKING:
    from mcore_ckpt.ranks import Agreement
    from mcore_ckpt.tools.convert.for_trainers.convert import TrainerConversionReport
    from mcore_ckpt.tools.convert.from_huggingface import ConversionReport

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DESCRIPTION = """\
Writes the weights of a HuggingFace model as a checkpoint. They are streamed, so no GPU is needed and the model need
not fit into memory. The format "native" is this package's own, divided for the given layout (it loads under any other
layout, too). The format "torch_dist" is megatron's, which needs no layout. Under torchrun the processes share the work.
The result appears once it is complete.

With CHECKPOINT and --format torch_dist, it writes a checkpoint of this package for another trainer: model, optimizer,
LR scheduler, random states and counters, in the folders that --layout names. The trainer resumes from --output_path,
under any parallel layout. A model with experts needs the same chain of optimizers, so first run reshard to change
whether experts are divided."""

EXAMPLES = (
    "convert --hf_model_path Qwen/Qwen3-0.6B --output_path checkpoints --tp 4 --pp 2",
    "convert --hf_model_path model --output_path torch_dist --format torch_dist --test",
    "convert checkpoints --format torch_dist --layout megatron --output_path back # for Megatron-LM",
)

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
        "checkpoint",
        type=expanded_path,
        nargs="?",
        metavar="CHECKPOINT",
        help="folder of a role, of a step, or of the steps, to convert for another trainer",
    )
    parser.add_argument(
        "--hf_model_path",
        type=folder_or_model,
        metavar="MODEL",
        help="the HuggingFace folder to convert, or the name of a model on the hub (owner/name, owner/name@revision); "
        "with CHECKPOINT: folder with its config.json and tokenizer (the checkpoint's own if not given)",
    )
    add_revision(parser, "--hf_model_path")
    parser.add_argument(
        "--output_path",
        type=expanded_path,
        required=True,
        metavar="DIR",
        help="native: the folder of steps, in which global_steps_0 is made; torch_dist: the folder of the checkpoint; "
        "with CHECKPOINT: the other trainer's folder of all its checkpoints",
    )
    parser.add_argument(
        "--format", choices=("native", "torch_dist"), default="native", help="format to write (native if not given)"
    )
    for name, what in _SIZES:
        parser.add_argument(f"--{name}", f"--{name}_size", type=int, metavar="N", help=f"{what} (1 if not given)")
    add_stage_options(parser)
    parser.add_argument(
        "--role", metavar="NAME", help="native: the role's name (actor if not given); with CHECKPOINT: role to convert"
    )
    parser.add_argument(
        "--layout",
        choices=("megatron", "bridge", "verl", "verl-0.8"),
        help="with CHECKPOINT: trainer that goes on from it (megatron if not given; verl-0.8: verl 0.7.1 and 0.8)",
    )
    parser.add_argument(
        "--step",
        type=step_number,
        metavar="N",
        help="with CHECKPOINT: step in a folder of steps (the newest complete one if not given)",
    )
    add_ignore(parser, "tensors of the HuggingFace model")
    parser.add_argument(
        "--dequantize-to",
        choices=("float32", "bfloat16", "float16"),
        metavar="DTYPE",
        help="dtype of weights that are quantized in the folder (the one in its config.json if not given)",
    )
    parser.add_argument("--test", action="store_true", help="read the result back and compare it before it appears")
    add_force(parser, "a checkpoint in DIR of the same step, or in this format, or a tracker of another step,")
    add_json(parser)
    add_ignored_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Converts a model or a checkpoint. Returns 0 when the result is in place."""
    source = _source(args)
    check_can_be_folder("--output_path", args.output_path)
    check_patterns("--ignore", args.ignore)
    with (
        command_agreement("convert", CONVERT_TIMEOUT_S) as agreement,
        progress_of_bytes(args.json or not agreement.is_coordinator) as bar,
    ):
        task = bar.add_task(Path(source).name, total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        if args.checkpoint is not None:
            back = _convert_for_trainer(args, agreement, progress)
            if agreement.is_coordinator:
                _show_for_trainer(back, args.json)
        else:
            report = _convert(args, source, agreement, progress)
            if agreement.is_coordinator:
                _show(report, args.json)
    return 0


def _source(args: argparse.Namespace) -> str:
    """Returns what to convert: a checkpoint, a HuggingFace folder, or a model on the hub.

    Raises InvalidArgumentError if the arguments name none, or a wrong one.
    """
    layout = (*(f"--{name}" for name, _ in _SIZES), *STAGE_FLAGS)
    if args.checkpoint is None:
        check_not_given(args, ("--layout", "--step"), "because there is no CHECKPOINT")
        if args.format == "torch_dist":
            check_not_given(args, (*layout, "--role"), "because torch_dist loads under any layout")
        return _model(args)
    check_not_given(args, layout, "because the other trainer loads the checkpoint under any layout")
    args.checkpoint = taken(args.checkpoint, "convert")
    if args.hf_model_path is not None:
        taken(Path(args.hf_model_path), "convert CHECKPOINT --hf_model_path", "--hf_model_path")
    if args.format != "torch_dist":
        raise InvalidArgumentError(
            f"{args.checkpoint}: a checkpoint is converted for other trainers only, which needs --format torch_dist. "
            "Use mcore-ckpt reshard for another parallel layout, and mcore-ckpt merge for a HuggingFace model"
        )
    if args.ignore or args.dequantize_to or args.revision:
        raise InvalidArgumentError(
            "--ignore, --dequantize-to and --revision are for HuggingFace models: a trainer needs all tensors of a "
            "checkpoint"
        )
    return str(args.checkpoint)


def _model(args: argparse.Namespace) -> str:
    from mcore_ckpt.formats import with_revision

    if args.hf_model_path is None:
        raise InvalidArgumentError("nothing to convert: give --hf_model_path, or the folder of a checkpoint")
    check_is_folder_or_model(args.hf_model_path, "--hf_model_path", "convert --hf_model_path")
    return with_revision(args.hf_model_path, args.revision)


def _convert_for_trainer(args: argparse.Namespace, agreement: Agreement, progress: Any) -> TrainerConversionReport:
    from mcore_ckpt.tools.convert.for_trainers.convert import convert_for_trainer

    return convert_for_trainer(
        args.checkpoint,
        args.output_path,
        args.layout or "megatron",
        agreement,
        step=args.step,
        role=args.role,
        hf_model_path=None if args.hf_model_path is None else Path(args.hf_model_path),
        test=args.test,
        progress=progress,
        force=args.force,
    )


def _convert(args: argparse.Namespace, source: str, agreement: Agreement, progress: Any) -> ConversionReport:
    import torch

    dequantized = None if args.dequantize_to is None else getattr(torch, args.dequantize_to)
    options = (args.test, progress, args.ignore, dequantized, args.force)
    if args.format == "torch_dist":
        from mcore_ckpt.tools.convert.to_torch_dist import convert_to_torch_dist

        return convert_to_torch_dist(source, args.output_path, agreement, *options)
    from mcore_ckpt.tools.convert.reshard.target import WantedLayout
    from mcore_ckpt.tools.convert.to_native import convert_to_native

    try:
        wanted = WantedLayout(tp=args.tp, pp=args.pp, vpp=args.vpp, ep=args.ep, etp=args.etp, **stage_options(args))
        return convert_to_native(source, args.output_path, wanted, agreement, args.role or "actor", *options)
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from None


def _show(report: ConversionReport, as_json: bool) -> None:
    if as_json:
        plain = asdict(report)
        left_out = [each.as_json() for each in report.left_out]
        print(json.dumps({**plain, "source": str(report.source), "path": str(report.path), "left_out": left_out}))
        return
    console = result_console()
    console.print(f"{report.path}: {report.model}", markup=False)
    console.print(moved_text(report.nbytes, report.seconds), markup=False)
    for each in report.left_out:
        console.print(f"  {each.text}", markup=False)


def _show_for_trainer(report: TrainerConversionReport, as_json: bool) -> None:
    if as_json:
        plain = asdict(report) | {"source": [str(path) for path in report.source], "path": str(report.path)}
        print(json.dumps(plain))
        return
    console = result_console()
    console.print(f"{report.path}: step {report.step} for {report.layout}", markup=False)
    console.print(moved_text(report.nbytes, report.seconds), markup=False)
    for note in report.notes:
        console.print(f"  {note}", markup=False)
