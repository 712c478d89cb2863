"""Which program wrote a folder."""

import json
import zipfile
from pathlib import Path

import pytest

from mcore_ckpt.formats.kinds import kind_of
from mcore_ckpt.formats.step_folders import step_of
from mcore_ckpt.formats.torch_dist.kind import torch_dist_folders
from mcore_ckpt.formats.verl_ranks.kind import model_file, rank_dirs


def touch(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def torch_dist(folder: Path) -> None:
    touch(folder / "metadata.json", json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))


@pytest.mark.parametrize("name", ["model.pt", "model_states.pt"])
@pytest.mark.parametrize(
    ("folder", "numbers"),
    [("mp_rank_00", (0,)), ("mp_rank_01_002", (1, 2)), ("mp_rank_03_004_005", (3, 4, 5)), ("mp_rank_100", (100,))],
)
def test_verl_ranks(folder: str, numbers: tuple[int, ...], name: str, tmp_path: Path) -> None:
    touch(tmp_path / "model" / folder / name)
    assert kind_of(tmp_path) == "verl_ranks"
    assert rank_dirs(tmp_path) == {folder: numbers}
    assert model_file(tmp_path / "model" / folder) == tmp_path / "model" / folder / name


@pytest.mark.parametrize("path", ["model/mp_rank_0/model.pt", "model/mp_rank_00/other.pt", "mp_rank_00/model.pt"])
def test_not_verl_ranks(path: str, tmp_path: Path) -> None:
    touch(tmp_path / path)
    assert kind_of(tmp_path) is None


@pytest.mark.parametrize(
    "names", [(".",), ("dist_ckpt",), ("model/dist_ckpt", "optimizer/dist_ckpt"), ("extra/dist_ckpt",)]
)
def test_torch_dist(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        torch_dist(tmp_path / name)
    assert kind_of(tmp_path) == "torch_dist"
    assert torch_dist_folders(tmp_path) == [tmp_path / name for name in names]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"name": "a dataset"}', "\udcff"])
def test_a_metadata_json_of_something_else(text: str, tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_bytes(text.encode(errors="surrogateescape"))
    assert kind_of(tmp_path) is None


def test_ours_is_not_foreign(tmp_path: Path) -> None:
    touch(tmp_path / "model/mp_rank_00_000/model_states.pt")
    torch_dist(tmp_path)
    touch(tmp_path / "manifest.json")
    assert kind_of(tmp_path) is None


def test_ours_without_its_manifest_is_nobodys(tmp_path: Path) -> None:
    file = tmp_path / "model/mp_rank_00_000/model_states.pt"
    file.parent.mkdir(parents=True)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", "")
        archive.writestr("archive/.mcore_ckpt/index.json", "{}")
    assert kind_of(tmp_path) is None


def test_nothing(tmp_path: Path) -> None:
    assert kind_of(tmp_path) is None
    assert kind_of(tmp_path / "missing") is None


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("/a/global_step_12/actor", 12),
        ("/a/global_steps_7", 7),
        ("/a/iter_0000010", 10),
        ("/global_step_3/x/global_step_4/actor", 4),
        ("/a/step_5", 0),
        ("/a/global_step_x", 0),
    ],
)
def test_step_of(path: str, step: int) -> None:
    assert step_of(Path(path)) == step
