"""Tests where a torch_dist checkpoint's parts are read from."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.formats.torch_dist.files import TorchDistFiles, WantedPart
from tests.support.torch_dist_folder import make_torch_dist


def test_the_file_of_old_versions_comes_first(tmp_path: Path) -> None:
    make_torch_dist(tmp_path / "saved")
    assert TorchDistFiles(tmp_path, [tmp_path / "saved"]).common == {"iteration": 3}


def test_the_object_of_new_versions_is_read_without_the_file(tmp_path: Path) -> None:
    make_torch_dist(tmp_path / "saved")
    (tmp_path / "saved" / "common.pt").unlink()
    assert TorchDistFiles(tmp_path, [tmp_path / "saved"]).common == {"iteration": 4}


def test_a_file_that_leads_nowhere_is_not_passed_over(tmp_path: Path) -> None:
    make_torch_dist(tmp_path / "saved")
    common = tmp_path / "saved" / "common.pt"
    common.unlink()
    common.symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointCorruptError, match=r"common\.pt"):
        TorchDistFiles(tmp_path, [tmp_path / "saved"])


def test_an_object_that_is_no_dict_is_refused(tmp_path: Path) -> None:
    make_torch_dist(tmp_path / "saved", common_object=[1])
    (tmp_path / "saved" / "common.pt").unlink()
    with pytest.raises(CheckpointCorruptError, match=r"object common_state/shard_0_1: contains no dict"):
        TorchDistFiles(tmp_path, [tmp_path / "saved"])


def test_the_configuration_may_have_fields_of_either_version(tmp_path: Path) -> None:
    make_torch_dist(tmp_path / "saved")
    config = tmp_path / "saved" / "metadata.json"
    fields = json.loads(config.read_bytes())
    config.write_text(json.dumps({**fields, "common_backend": "torch", "common_backend_version": 1}))
    assert TorchDistFiles(tmp_path, [tmp_path / "saved"]).names


def test_a_part_without_a_place_in_a_file_is_refused(tmp_path: Path) -> None:
    make_torch_dist(tmp_path / "saved")
    name, file = "decoder.layers.mlp.linear_fc2.weight", tmp_path / "saved" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    del metadata.storage_data[MetadataIndex(name, torch.Size((1, 0, 0)))]
    file.write_bytes(pickle.dumps(metadata))
    files = TorchDistFiles(tmp_path, [tmp_path / "saved"])
    with pytest.raises(CheckpointCorruptError, match=name):
        files.read(WantedPart(name, (2, 4, 3), (0, 0, 0), torch.empty(2, 4, 3)))
