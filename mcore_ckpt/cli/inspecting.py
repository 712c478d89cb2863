"""`mcore-ckpt inspect`: what one checkpoint holds, and of whom."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mcore_ckpt.cli import UsageError, check_patterns

if TYPE_CHECKING:
    from mcore_ckpt.checkpoint.manifest import Manifest
    from mcore_ckpt.formats.native.reader import NativeReader

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

DESCRIPTION = """\
Shows what a checkpoint holds: who saved it under which layout, its files by kind, and with --tensors each tensor's
name, dtype, global shape, and the parts of the optimizer's state that are there. No tensor's bytes are read."""


def add_to(subparsers: Subparsers) -> None:
    """Add the parser of `inspect`."""
    parser = subparsers.add_parser("inspect", help="show what a checkpoint holds", description=DESCRIPTION)
    parser.add_argument("path", type=Path, metavar="PATH", help="folder of a role, of a step, or of the steps")
    parser.add_argument("--step", type=int, metavar="N", help="of a folder of steps; else the newest complete one")
    parser.add_argument("--role", metavar="NAME", help="of a step with several roles, this one alone")
    parser.add_argument(
        "--tensors",
        metavar="REGEX",
        nargs="?",
        const="",
        help="list tensors, too: all, or those whose name has this in it",
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object, and nothing else")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Inspect; 0 when it is shown."""
    from mcore_ckpt.errors import InvalidArgumentError
    from mcore_ckpt.formats.native.reader import NativeReader
    from mcore_ckpt.tools.find import select

    check_patterns("--tensors", [] if args.tensors is None else [args.tensors])
    if not args.path.is_dir():
        raise UsageError(f"{args.path}: there is no such folder")
    try:
        selection = select(args.path, args.step)
    except InvalidArgumentError as error:
        raise UsageError(str(error)) from None
    readers = [NativeReader.open(folder) for folder in selection.role_dirs]
    roles = [reader.manifest.role for reader in readers]
    if args.role is not None and args.role not in roles:
        raise UsageError(f"{args.path}: has no role {args.role!r}: it has {', '.join(roles)}")
    chosen = [reader for reader in readers if args.role in (None, reader.manifest.role)]
    if args.json:
        print(json.dumps({"step": selection.step, "roles": [_as_json(reader, args.tensors) for reader in chosen]}))
        return 0
    console = Console(highlight=False, soft_wrap=True)
    for reader in chosen:
        _show(console, reader, args.tensors)
    return 0


def _show(console: Console, reader: NativeReader, wanted: str | None) -> None:
    manifest = reader.manifest
    console.print(f"{reader.place}: step {manifest.step} of {manifest.role}", style="bold", markup=False)
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    lines = (
        f"saved {manifest.created} with {versions}",
        f"by {manifest.topology}",
        f"holds {', '.join(manifest.contents) or 'files of its program'}; the step is of {', '.join(manifest.roles)}",
        *(f"{kind}: {count} files, {nbytes / 1e9:.3f} GB" for kind, (count, nbytes) in _kinds(manifest).items()),
        f"{len(manifest.tensors)} tensors",
    )
    for line in lines:
        console.print(f"  {line}", markup=False)
    for tensor in _tensors(reader, wanted):
        state = f"  {', '.join(tensor['optimizer'])}" if tensor["optimizer"] else ""
        console.print(f"  {tensor['name']}  {tensor['dtype']} {tensor['shape']}{state}", markup=False)


def _kinds(manifest: Manifest) -> dict[str, tuple[int, int]]:
    """Of each kind of file how many there are, and their bytes."""
    kinds = dict.fromkeys(file.kind for file in manifest.files)
    files = {kind: manifest.files_of(kind) for kind in kinds}
    return {kind: (len(found), sum(file.size for file in found)) for kind, found in files.items()}


def _tensors(reader: NativeReader, wanted: str | None) -> Iterator[dict[str, Any]]:
    from mcore_ckpt.sharding.names import natural_order
    from mcore_ckpt.sharding.plan import MODEL, OPAQUE, ShardKey

    if wanted is None:
        return
    for name in sorted((name for name in reader.manifest.tensors if re.search(wanted, name)), key=natural_order):
        optimizer = reader.files(ShardKey(name, "optimizer"))
        kinds = [kind for kind in reader.kinds_in(name, optimizer) if kind not in (MODEL, OPAQUE)]
        keys = [ShardKey(name, kind) for kind in (MODEL, OPAQUE, *kinds)]
        shard = next((shard for key in keys for shard in reader.shards(key, reader.files(key)[:1])), None)
        yield {
            "name": name,
            "dtype": None if shard is None else shard.dtype,
            "shape": None if shard is None else list(shard.region.global_shape),
            "optimizer": kinds,
        }


def _as_json(reader: NativeReader, wanted: str | None) -> dict[str, Any]:
    """What a program may want to know."""
    manifest = reader.manifest
    return {
        "path": str(reader.place),
        "role": manifest.role,
        "roles": list(manifest.roles),
        "created": manifest.created,
        "versions": dict(manifest.versions),
        "contents": list(manifest.contents),
        "topology": asdict(manifest.topology),
        "bytes": manifest.nbytes,
        "files": [
            {"path": file.path, "kind": file.kind, "rank": file.rank, "bytes": file.size} for file in manifest.files
        ],
        "tensors": None if wanted is None else list(_tensors(reader, wanted)),
    }
