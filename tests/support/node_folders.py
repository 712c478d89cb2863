"""Folders of several nodes of the fast tier, made by dividing an ordinary checkpoint among them."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import encode_manifest
from mcore_ckpt.checkpoint.placement import Placement
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.io.files import make_folders


def divide(role_dir: Path, folders: Sequence[Path], replicas: int = 0) -> None:
    """Divides a checkpoint: each file goes to the node of its rank, and to so many next nodes.

    Node n is called "node<n>".
    """
    manifest = read_manifest(role_dir)
    count = len(folders)
    by_file = tuple(
        tuple((file.rank + step) % count for step in range(replicas + 1))  # one rank on each node
        for file in manifest.files
    )
    names = tuple(f"node{number}" for number in range(count))
    data = encode_manifest(replace(manifest, placement=Placement(names, by_file, 1)))
    for number, folder in enumerate(folders):
        target = file_names.step_dir(folder, manifest.step) / manifest.role
        target.mkdir(parents=True)
        (target / file_names.MANIFEST_FILE).write_bytes(data)
        for file, nodes in zip(manifest.files, by_file, strict=True):
            if number in nodes:
                make_folders(target, file.path)
                shutil.copy(role_dir / file.path, target / file.path)
