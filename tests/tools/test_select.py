"""Which folders of a node of the fast tier can be selected."""

from pathlib import Path

import pytest

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.errors import CheckpointNotFoundError
from mcore_ckpt.tools.examine.select import select
from tests.support.node_folders import divide
from tests.support.small_model import STEP, make, tensors_of


def test_one_node_has_a_part_of_a_step(tmp_path: Path) -> None:
    folders = [tmp_path / "node0", tmp_path / "node1"]
    divide(make(tmp_path / "root", tensors_of(), tp=2), folders)
    for folder in folders:
        step_path = file_names.step_dir(folder, STEP)
        for path in (folder, step_path, step_path / "actor"):
            assert select(path, of_one_node=True).role_dirs == (step_path / "actor",)
            with pytest.raises(CheckpointNotFoundError, match="one node's part of a checkpoint"):
                select(path)
