"""`mcore-ckpt convert`: writes a HuggingFace model as a checkpoint to train from, or a checkpoint for another trainer.

The model is never in memory as a whole.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_ckpt.amounts import moved_text
from mcore_ckpt.cli import arguments
from mcore_ckpt.cli.progress import progress_in, progress_of_bytes
from mcore_ckpt.cli.results import result_console, show_result
from mcore_ckpt.config import CONVERT_TIMEOUT_S
from mcore_ckpt.errors import InvalidArgumentError

if TYPE_CHECKING:
    from mcore_ckpt.ranks import Agreement
    from mcore_ckpt.tools.convert.for_trainers.convert import TrainerConversionReport
    from mcore_ckpt.tools.convert.from_huggingface import ConversionReport

HELP = "make a checkpoint of a HuggingFace model"
DESCRIPTION = """\
Writes the weights of a HuggingFace model as a checkpoint. They are streamed, so no GPU is needed and the model need not
fit into memory. The format "native" is this package's own, divided for the given layout (it loads under any other
layout, too). The format "torch_dist" is megatron's; it needs no layout. Under torchrun the processes share the work.
The result appears once it is complete.

With CHECKPOINT and --format torch_dist, it converts a checkpoint of this package for another trainer: model, optimizer,
LR scheduler, random states and counters, in the folders of the trainer that --layout names. The trainer resumes from
--output_path, under any parallel layout. A model with experts loads only if both layouts have expert parallelism, or
neither has it: otherwise, run reshard first."""

EXAMPLES = (
    "convert --hf_model_path Qwen/Qwen3-0.6B --output_path checkpoints --tp 4 --pp 2",
    "convert --hf_model_path model --output_path torch_dist --format torch_dist --test",
    "convert checkpoints --format torch_dist --layout megatron --output_path back # for Megatron-LM",
)

_SIZES = ("tp", "pp", "vpp", "ep", "etp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options. Options with underscores have the names that verl's converter gives them."""
    text = "folder of a role, of a step, or of the steps, to convert for another trainer"
    parser.add_argument("checkpoint", type=arguments.expanded_path, nargs="?", metavar="CHECKPOINT", help=text)
    text = (
        "the HuggingFace folder to convert, or the name of a model on the hub (owner/name, owner/name@revision); "
        "with CHECKPOINT: the folder with the model's config.json and tokenizer (the checkpoint's own files if not "
        "given)"
    )
    parser.add_argument("--hf_model_path", type=arguments.folder_or_model, metavar="MODEL", help=text)
    arguments.add_revision(parser, "--hf_model_path")
    text = (
        "native: the folder of steps, in which global_steps_0 is made; torch_dist: the folder of the checkpoint; "
        "with CHECKPOINT: the other trainer's folder of all its checkpoints"
    )
    parser.add_argument("--output_path", type=arguments.expanded_path, required=True, metavar="DIR", help=text)
    parser.add_argument(
        "--format", choices=("native", "torch_dist"), default="native", help="format to write (native if not given)"
    )
    for name in _SIZES:
        text = f"{arguments.SIZES[name]} (1 if not given)"
        parser.add_argument(f"--{name}", f"--{name}_size", type=int, metavar="N", help=text)
    arguments.add_stage_options(parser)
    parser.add_argument(
        "--role", metavar="NAME", help="native: the role's name (actor if not given); with CHECKPOINT: role to convert"
    )
    parser.add_argument(
        "--layout",
        choices=("megatron", "bridge", "verl", "verl-0.8"),
        help="with CHECKPOINT: the trainer to convert for (megatron if not given; verl-0.8: verl 0.7.1 and 0.8)",
    )
    arguments.add_step(parser, "with CHECKPOINT: ")
    arguments.add_ignore(parser, "tensors of the HuggingFace model")
    text = "dtype of weights that are quantized in the folder (the dtype in its config.json if not given)"
    parser.add_argument("--dequantize-to", choices=("float32", "bfloat16", "float16"), metavar="DTYPE", help=text)
    parser.add_argument("--test", action="store_true", help="read the result back and compare it before it appears")
    arguments.add_force(
        parser,
        "a checkpoint of the same step in DIR, a torch_dist checkpoint in DIR, or a tracker that names another step,",
    )
    arguments.add_json(parser)
    arguments.add_ignored_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Converts a model or a checkpoint. Returns 0 when the result is in place."""
    source = _source(args)
    arguments.check_can_be_folder("--output_path", args.output_path)
    arguments.check_patterns("--ignore", args.ignore)
    with (
        arguments.command_agreement("convert", CONVERT_TIMEOUT_S) as agreement,
        progress_of_bytes(args.json or not agreement.is_coordinator) as bar,
    ):
        progress = progress_in(bar, Path(source).name)
        if args.checkpoint is not None:
            back = _convert_for_trainer(args, agreement, progress)
            if agreement.is_coordinator:
                show_result(back, _as_json_for_trainer, _show_for_trainer, args.json)
        else:
            report = _convert(args, source, agreement, progress)
            if agreement.is_coordinator:
                show_result(report, _as_json, _show, args.json)
    return 0


def _source(args: argparse.Namespace) -> str:
    """Returns what to convert: a checkpoint, a HuggingFace folder, or a model on the hub.

    Raises InvalidArgumentError if the arguments name nothing to convert, or have options that do not fit the source.
    """
    layout = (*(f"--{name}" for name in _SIZES), *arguments.STAGE_FLAGS)
    if args.checkpoint is None:
        arguments.check_not_given(args, ("--layout", "--step"), "because there is no CHECKPOINT")
        if args.format == "torch_dist":
            arguments.check_not_given(args, (*layout, "--role"), "because torch_dist loads under any layout")
        return _model(args)
    arguments.check_not_given(args, layout, "because the other trainer loads the checkpoint under any layout")
    args.checkpoint = arguments.taken(args.checkpoint, "convert")
    if args.hf_model_path is not None:
        arguments.taken(Path(args.hf_model_path), "convert CHECKPOINT --hf_model_path", "--hf_model_path")
    if args.format != "torch_dist":
        raise InvalidArgumentError(
            f"{args.checkpoint}: a checkpoint is converted for other trainers only, which needs --format torch_dist. "
            "Use mcore-ckpt reshard for another parallel layout, and mcore-ckpt merge for a HuggingFace model"
        )
    if args.ignore or args.dequantize_to or args.revision:
        raise InvalidArgumentError(
            "--ignore, --dequantize-to and --revision are for HuggingFace models: leave them out for a checkpoint, of "
            "which a trainer needs all tensors"
        )
    return str(args.checkpoint)


def _model(args: argparse.Namespace) -> str:
    from mcore_ckpt.formats import with_revision

    if args.hf_model_path is None:
        raise InvalidArgumentError("nothing to convert: give --hf_model_path, or the folder of a checkpoint")
    arguments.check_is_folder_or_model(args.hf_model_path, "--hf_model_path", "convert --hf_model_path")
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
        wanted = WantedLayout(**{name: getattr(args, name) for name in _SIZES}, **arguments.stage_options(args))
        return convert_to_native(source, args.output_path, wanted, agreement, args.role or "actor", *options)
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from None


def _show(report: ConversionReport) -> None:
    _show_lines(f"{report.path}: {report.model}", report, (each.text for each in report.left_out))


def _show_for_trainer(report: TrainerConversionReport) -> None:
    _show_lines(f"{report.path}: step {report.step} for {report.layout}", report, report.notes)


def _show_lines(title: str, report: ConversionReport | TrainerConversionReport, notes: Iterable[str]) -> None:
    console = result_console()
    console.print(title)
    console.print(moved_text(report.nbytes, report.seconds))
    for note in notes:
        console.print(f"  {note}")


def _as_json(report: ConversionReport) -> dict[str, Any]:
    left_out = [each.as_json() for each in report.left_out]
    return asdict(report) | {"source": str(report.source), "path": str(report.path), "left_out": left_out}


def _as_json_for_trainer(report: TrainerConversionReport) -> dict[str, Any]:
    return asdict(report) | {"source": [str(path) for path in report.source], "path": str(report.path)}
