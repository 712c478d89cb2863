"""Reads all that is in a folder with every reader there is, in a process of its own: test_outside.py watches it.

`read_everything.py FIRST FOLDER...` looks in all for root (ours), dist (torch_dist), hf (HuggingFace) and *.pt. Between
looking for BEGIN and END, which are nowhere, it is a FOLDER's turn: that is for who traces its system calls. Prints
what Python's audit hook saw meanwhile, of each FOLDER.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.checkpoint.dtypes import torch_dtype
from mcore_ckpt.checkpoint.plain_files import read_plain
from mcore_ckpt.checkpoint.reading import read_index, read_manifest
from mcore_ckpt.errors import CheckpointError
from mcore_ckpt.formats import kinds
from mcore_ckpt.formats.foreign_pickles import load_safely
from mcore_ckpt.formats.huggingface.reader import HuggingFaceReader, read_contents
from mcore_ckpt.formats.native.ranges import read_ranges
from mcore_ckpt.formats.torch_dist import reader as torch_dist_source
from mcore_ckpt.formats.torch_dist.files import TorchDistFiles, WantedPart
from mcore_ckpt.formats.torch_save_files import read_pt
from mcore_ckpt.models import mapping
from mcore_ckpt.models.registry import known_architectures
from mcore_ckpt.sharding.overlap import Rows
from mcore_ckpt.sharding.plan import ReadRange
from mcore_ckpt.steps import listing as steps
from mcore_ckpt.steps import tracker
from mcore_ckpt.tools.examine import find as sources
from mcore_ckpt.tools.examine.compare import open_folder

BEGIN, END = "/mcore_ckpt-begin", "/mcore_ckpt-end"
_TOLD = ("open", "os.", "subprocess.", "socket.", "shutil.", "ctypes.", "import")

refused: list[str] = []


def attempt(read: Callable[[], Any]) -> None:
    try:
        read()
    except (CheckpointError, ValueError) as error:
        if isinstance(error, ValueError) and not isinstance(error, sources.InvalidArgumentError):
            raise
        refused.append(str(error))


def read_ours(root: Path) -> None:
    tracker.read_tracker(root)
    for status in steps.list_steps(root):
        for role_dir in sorted(status.path.iterdir()):
            attempt(lambda role_dir=role_dir: read_role(role_dir))  # type: ignore[misc]


def read_role(role_dir: Path) -> None:
    manifest = read_manifest(role_dir)
    for file in manifest.files:
        attempt(lambda file=file: read_plain(role_dir, file) if file.index is None else read_tensors(role_dir, file))  # type: ignore[misc]


def read_tensors(role_dir: Path, file: Any) -> None:
    for shard in read_index(role_dir, file).shards:
        memory = torch.zeros(shard.region.numel, dtype=torch_dtype(shard.dtype))
        read_ranges(role_dir, {file.path: file}, [(ReadRange(shard, Rows(0, 0, shard.region.numel)), memory)])


def read_dist(folder: Path) -> None:
    kinds.kind_of(folder)
    attempt(lambda: torch_dist_source.open_torch_dist(folder))
    opened = TorchDistFiles(folder, [folder])
    attempt(lambda: opened.read_object("rng"))
    memory = torch.zeros(1, 4, 3)
    name = "decoder.layers.mlp.linear_fc2.weight"
    attempt(lambda: opened.read(WantedPart(name, (2, 4, 3), (0, 0, 0), memory)))


def read_hf(folder: Path) -> None:
    attempt(lambda: open_folder(folder))
    attempt(lambda: HuggingFaceReader(read_contents(folder)))


def read_all(folder: Path) -> None:
    attempt(lambda: read_ours(folder / "root"))
    attempt(lambda: read_dist(folder / "dist"))
    attempt(lambda: read_hf(folder / "hf"))
    for path in sorted(folder.glob("*.pt")):
        for reader in (read_pt, lambda p: load_safely(p, str(p)), lambda p: load_safely(p, str(p), mmap=True)):
            attempt(lambda path=path, reader=reader: reader(path))  # type: ignore[misc]


def main(warm_up: Path, folders: list[Path]) -> None:
    known_architectures()
    assert mapping
    read_all(warm_up)  # what Python and torch open at first use
    seen: list[tuple[str, str]] = []
    watching = [False]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if watching[0] and event.startswith(_TOLD):
            seen.append((event, os.fsdecode(args[0]) if args and isinstance(args[0], (str, bytes)) else ""))

    sys.addaudithook(hook)
    told = []
    for folder in folders:
        refused.clear()
        seen.clear()
        watching[0] = True
        os.path.exists(BEGIN)
        read_all(folder)
        os.path.exists(END)
        watching[0] = False
        told.append({"events": [*seen], "refused": [*refused]})
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(folder) for folder in sys.argv[2:]])
