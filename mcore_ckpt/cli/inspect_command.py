"""`mcore-ckpt inspect`: shows what a checkpoint holds, and which program saved it under which layout."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mcore_ckpt.amounts import size_text
from mcore_ckpt.cli.arguments import add_json, add_step, check_can_be_file, check_patterns, expanded_path, taken
from mcore_ckpt.cli.inspect_tables import (
    contents_text,
    metric_facts,
    model_facts,
    node_facts,
    origin_facts,
    part_rows,
    show_tables,
)
from mcore_ckpt.cli.list_command import node_files_as_json
from mcore_ckpt.cli.progress import progress_in, progress_of_bytes
from mcore_ckpt.cli.results import is_terminal, result_console
from mcore_ckpt.cli.tensor_view import read_tensor, show_tensor, tensor_as_json
from mcore_ckpt.errors import InvalidArgumentError

if TYPE_CHECKING:
    from mcore_ckpt.checkpoint import Manifest
    from mcore_ckpt.tools.examine.overview import Overview
    from mcore_ckpt.tools.examine.select import Selection

HELP = "show what a checkpoint holds"
DESCRIPTION = """\
Shows what a checkpoint holds: which program saved it under which layout, its files by kind, and with --tensors the
name, dtype, global shape and kinds of optimizer state of each tensor. With --html it writes a page that shows how each
tensor is cut and which rank has it, when each rank did what in the save, and with --diff what differs from another
checkpoint. Reads no tensor's bytes, except with --tensor and --diff."""

EXAMPLES = (
    "inspect checkpoints # the newest complete step",
    'inspect checkpoints --step 100 --role actor --tensors "layers.3."',
    "inspect checkpoints/global_steps_100 --tensor decoder.final_layernorm.weight",
    "inspect checkpoints --html page.html # for a browser",
    "inspect checkpoints --html page.html --diff checkpoints/global_steps_90 # also what has changed since then",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=expanded_path, metavar="PATH", help="folder of a role, of a step, or of the steps")
    add_step(parser)
    parser.add_argument("--role", metavar="NAME", help="show only this role of the step")
    text = "also list the tensors: all, or only tensors whose name contains a match of REGEX"
    parser.add_argument("--tensors", metavar="REGEX", nargs="?", const="", help=text)
    parser.add_argument(
        "--tensor",
        metavar="NAME",
        help="read this tensor, and show statistics of its values and which rank's file holds which part",
    )
    text = (
        "also write everything to FILE (*.html) as one page for a browser, which needs no network; FILE may exist "
        "only if it is such a page"
    )
    parser.add_argument("--html", type=expanded_path, metavar="FILE", help=text)
    text = (
        "with --html: also show on the page what differs from this checkpoint, as `mcore-ckpt diff PATH OTHER` does "
        "(folder of a role, of a step, or of the steps)"
    )
    parser.add_argument("--diff", type=expanded_path, metavar="OTHER", help=text)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Shows the checkpoint. Returns 0."""
    from mcore_ckpt.checkpoint import read_manifest
    from mcore_ckpt.cli.page.build import build_page
    from mcore_ckpt.io import replace_file
    from mcore_ckpt.tools.examine.select import Selection, select

    _check(args)
    is_read = args.tensors is not None or args.tensor is not None or args.html is not None
    selection = select(args.path, args.step, of_one_node=not is_read)
    other = None if args.diff is None else _other(args.diff, args.role)
    manifests = {folder: read_manifest(folder) for folder in selection.role_dirs}
    roles = [manifest.role for manifest in manifests.values()]
    if args.role is not None and args.role not in roles:
        raise InvalidArgumentError(f"{args.path}: has no role {args.role!r}: it has {', '.join(roles)}")
    chosen = {folder: manifest for folder, manifest in manifests.items() if args.role in (None, manifest.role)}
    details = {} if args.tensor is None else read_tensor(list(chosen), args.tensor, args.json)
    if args.html is not None:
        _check_may_write(args.html)
        overview = _overview(Selection(selection.step, tuple(chosen)), other, args.json)
        replace_file(args.html.resolve(), build_page(overview.to_json()))  # if FILE is a link, replace its target
    if args.json:
        shown = [
            _as_json(folder, manifest, args.tensors) | {"tensor": tensor_as_json(details.get(folder))}
            for folder, manifest in chosen.items()
        ]
        print(json.dumps({"step": selection.step, "roles": shown}))
        return 0
    console = result_console()
    for folder, tensor in details.items():
        show_tensor(console, folder, tensor)
    if not details:
        _show_roles(console, chosen, args.tensors)
    if args.html is not None:
        console.print(f"page: {args.html}")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Checks the arguments that can be checked without a checkpoint. Raises InvalidArgumentError."""
    check_patterns("--tensors", [] if args.tensors is None else [args.tensors])
    args.path = taken(args.path, "inspect")
    if args.html is not None:
        check_can_be_file("--html", args.html)
    if args.diff is not None:
        if args.html is None:
            raise InvalidArgumentError(
                f"--diff {args.diff}: the differences are shown on a page: name the page's file with --html, or use "
                f"`mcore-ckpt diff {args.path} {args.diff}`"
            )
        args.diff = taken(args.diff, "diff", "--diff")


def _check_may_write(file: Path) -> None:
    """Raises InvalidArgumentError if a file is within a checkpoint, or exists and is not a page of this command."""
    from mcore_ckpt.checkpoint import MANIFEST_FILE
    from mcore_ckpt.cli.page.build import is_page

    where = file.resolve()
    for folder in where.parents:
        if (folder / MANIFEST_FILE).exists():
            raise InvalidArgumentError(f"--html {file}: is within the checkpoint {folder}: name a file outside of it")
    if where.suffix != ".html":
        raise InvalidArgumentError(f"--html {file}: does not end in .html, as a page must: name another file")
    if where.exists() and not is_page(where):
        raise InvalidArgumentError(f"--html {file}: exists and is not a page of this command: name another file")


def _other(path: Path, role: str | None) -> Selection:
    """Selects the checkpoint to compare with: only the chosen `role`, if the checkpoint has it."""
    from mcore_ckpt.tools.examine.select import Selection, select

    found = select(path)
    of_role = tuple(folder for folder in found.role_dirs if folder.name == role)
    return Selection(found.step, of_role) if of_role else found


def _overview(selection: Selection, other: Selection | None, quiet: bool) -> Overview:
    """Gathers what the page shows, with a progress bar unless `quiet`."""
    from mcore_ckpt.tools.examine.diff import diff
    from mcore_ckpt.tools.examine.overview import Overview, overview_of_role

    with progress_of_bytes(quiet) as bar:
        roles = tuple(
            overview_of_role(folder, progress_in(bar, f"indexes of {folder.name}")) for folder in selection.role_dirs
        )
        if other is None:
            return Overview(selection.step, roles)
        found = diff(selection, other, progress=progress_in(bar, "diff"))
    return Overview(
        selection.step,
        roles,
        compared_with=str(other.role_dirs[0].parent),
        diffs={diff.left: diff for diff in found.roles},
        only_in_other=found.only_right,
    )


def _show_roles(console: Console, manifests: Mapping[Path, Manifest], pattern: str | None) -> None:
    for folder, manifest in manifests.items():
        if is_terminal():
            show_tables(console, folder, manifest, _kinds(manifest), _tensors(folder, pattern))
        else:
            _show(console, folder, manifest, pattern)


def _show(console: Console, role_dir: Path, manifest: Manifest, pattern: str | None) -> None:
    console.print(f"{role_dir}: step {manifest.step} of {manifest.role}", style="bold")
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    lines = (
        f"saved {manifest.created} with {versions}",
        f"by {manifest.topology}",
        f"holds {contents_text(manifest)}",
        f"roles of the step: {', '.join(manifest.roles)}",
        *(f"{kind}: {count} files, {size_text(nbytes)}" for kind, (count, nbytes) in _kinds(manifest).items()),
        *(f"part {name}: {count} files, {size_text(size)}, of {by}" for name, count, size, by in part_rows(manifest)),
        f"{len(manifest.tensors)} tensors",
        *(f"{what}: {fact}" for what, fact in metric_facts(role_dir, manifest)),
        *(f"{what}: {fact}" for what, fact in model_facts(manifest)),
        *(f"{what}: {fact}" for what, fact in origin_facts(manifest)),
        *(f"{what}: {fact}" for what, fact in node_facts(role_dir, manifest)),
    )
    for line in lines:
        console.print(f"  {line}")
    for tensor in _tensors(role_dir, pattern):
        state = f"  {', '.join(tensor['optimizer'])}" if tensor["optimizer"] else ""
        console.print(f"  {tensor['name']}  {tensor['dtype']} {list(tensor['shape'] or ())}{state}")


def _kinds(manifest: Manifest) -> dict[str, tuple[int, int]]:
    """Returns the number and the size in bytes of the files of each kind."""
    kinds = dict.fromkeys(file.kind for file in manifest.files)
    files = {kind: manifest.files_of(kind) for kind in kinds}
    return {kind: (len(found), sum(file.size for file in found)) for kind, found in files.items()}


def _tensors(role_dir: Path, pattern: str | None) -> list[dict[str, Any]]:
    """Returns the tensors to show as JSON values; an empty list without `--tensors`."""
    from mcore_ckpt.tools.examine.contents import list_tensors

    return [] if pattern is None else [asdict(tensor) for tensor in list_tensors(role_dir, pattern)]


def _as_json(role_dir: Path, manifest: Manifest, pattern: str | None) -> dict[str, Any]:
    from mcore_ckpt.steps import files_of_node, metrics_of

    held = files_of_node(role_dir, manifest)
    return {
        "path": str(role_dir),
        "role": manifest.role,
        "roles": list(manifest.roles),
        "created": manifest.created,
        "run": None if manifest.run is None else asdict(manifest.run),
        "commit": None if manifest.commit is None else asdict(manifest.commit),
        "versions": dict(manifest.versions),
        "contents": list(manifest.contents),
        "dropped": list(manifest.dropped),
        "metrics": metrics_of(role_dir, manifest),
        "model": None if manifest.model is None else dict(manifest.model),
        "topology": asdict(manifest.topology),
        "bytes": manifest.nbytes,
        "files": [
            {"path": file.path, "kind": file.kind, "rank": file.rank, "bytes": file.size} for file in manifest.files
        ],
        "parts": [
            {"name": name, "ranks": [list(run) for run in manifest.parts[name]], "files": count, "bytes": nbytes}
            for name, (count, nbytes) in manifest.part_sizes().items()
        ],
        "nodes": None if held is None else node_files_as_json(held),
        "tensors": None if pattern is None else _tensors(role_dir, pattern),
    }
