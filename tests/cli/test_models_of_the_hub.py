"""`mcore-ckpt convert`, `merge` and `test` with the name of a model on the hub in the place of a folder."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save

from mcore_ckpt.cli.main import main
from mcore_ckpt.ranks.rounds import Agreement
from mcore_ckpt.tools.convert.merge import MergeReport, MergeRequest, merge
from tests.support.hub_server import HubServer
from tests.support.mcore_checkpoints import make_checkpoint, weights
from tests.support.rank_threads import on_threads
from tests.support.tiny_models import make_hf_folder

pytestmark = pytest.mark.slow

NAME = "tiny/Qwen3-tiny"
TOKENIZER = b'{"of": "the tokenizer"}'


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_hf_folder(tmp_path_factory.mktemp("published"), "qwen3")
    (folder / "tokenizer.json").write_bytes(TOKENIZER)
    return folder


@pytest.fixture
def hub(published: Path, tmp_path: Path) -> Iterator[HubServer]:
    """A hub with the model, whose branch v1 has another weight, and an empty cache."""
    files = {path.name: path.read_bytes() for path in published.iterdir()}
    tensors = load_file(published / "model.safetensors")
    tensors["model.norm.weight"] += 1
    with HubServer() as server:
        server.add(NAME, {**files, "model.safetensors": save(tensors, {"format": "pt"})}, branch="v1")
        server.add(NAME, files)
        with server.used(tmp_path / "home"):
            yield server


@pytest.mark.parametrize("form", ["native", "torch_dist"])
def test_convert_and_compare(form: str, hub: HubServer, published: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["convert", "--hf_model_path", NAME, "--output_path", str(out), "--format", form, "--test"]) == 0
    assert sorted(hub.downloaded) == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    (tokenizer,) = out.rglob("huggingface/tokenizer.json")
    assert tokenizer.read_bytes() == TOKENIZER
    assert not tokenizer.is_symlink()
    hub.requests.clear()
    assert main(["test", "--local_dir", str(out), "--reference", NAME]) == 0
    assert hub.downloaded == []
    assert main(["test", "--local_dir", str(out), "--reference", str(published)]) == 0
    # Of a revision that was published with other weights.
    assert main(["test", "--local_dir", str(out), "--reference", NAME, "--revision", "v1"]) == 1
    assert main(["test", f"{NAME}@v1", "--reference", NAME]) == 1
    assert main(["test", f"{NAME}@v1", "--reference", NAME, "--revision", "v1"]) == 0


def test_convert_a_revision(hub: HubServer, tmp_path: Path) -> None:
    arguments = ["convert", "--hf_model_path", NAME, "--revision", "v1", "--output_path", str(tmp_path / "out")]
    assert main(arguments) == 0
    assert main(["test", "--local_dir", str(tmp_path / "out"), "--reference", f"{NAME}@v1"]) == 0


def test_merge_takes_the_configuration_and_no_weights(hub: HubServer, published: Path, tmp_path: Path) -> None:
    role_dir = make_checkpoint(tmp_path / "saved", published, 2)
    for path in (role_dir / "huggingface").iterdir():
        path.unlink()
    target = tmp_path / "merged"
    assert main(["merge", str(role_dir), str(target), "--hf_model_path", NAME, "--revision", "main"]) == 0
    assert hub.downloaded == ["config.json", "generation_config.json", "tokenizer.json"]
    assert (target / "tokenizer.json").read_bytes() == TOKENIZER
    found, wanted = weights(target), weights(published)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    hub.requests.clear()
    assert main(["test", "--local_dir", str(role_dir), "--hf_model_path", NAME, "--reference", str(published)]) == 0
    assert hub.downloaded == []


def test_ranks_that_share_a_merge_download_once(hub: HubServer, published: Path, tmp_path: Path) -> None:
    role_dir = make_checkpoint(tmp_path / "saved", published, 2)
    request = MergeRequest(role_dir, tmp_path / "merged", hf_model_path=NAME)
    store = dist.HashStore()  # type: ignore[attr-defined]
    parts = {rank: partial(merge, request, agreement=Agreement(store, rank, 3, "test", 60.0)) for rank in range(3)}
    assert {type(end) for end in on_threads(parts).values()} == {MergeReport}
    assert hub.downloaded == ["config.json", "generation_config.json", "tokenizer.json"]
    assert (tmp_path / "merged" / "tokenizer.json").read_bytes() == TOKENIZER


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--hf_model_path", "tiny/other"], 1, "tiny/other: there is no such folder, and http://127.0.0.1"),
        (["--hf_model_path", f"{NAME}@v9"], 1, "has no such revision"),
        (["--hf_model_path", NAME, "--revision", "v9"], 1, f"{NAME}@v9: http"),
        (["--hf_model_path", f"{NAME}@v1", "--revision", "v9"], 2, "names a revision already"),
        (["--hf_model_path", "FOLDER", "--revision", "v1"], 2, "is not the name of a model on the hub"),
        (["--hf_model_path", "nowhere"], 2, "--hf_model_path nowhere: there is no such folder, and models on the hub"),
        (["--hf_model_path", "./tiny/Qwen3-tiny"], 2, "there is no such folder"),
    ],
)
def test_exit_status(
    arguments: list[str],
    status: int,
    words: str,
    hub: HubServer,
    published: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [str(published) if argument == "FOLDER" else argument for argument in arguments]
    assert main(["convert", *arguments, "--output_path", str(tmp_path / "out")]) == status
    assert words in " ".join(capsys.readouterr().err.split("\n"))
    assert not (tmp_path / "out").exists()
    assert hub.downloaded == []


def test_a_revision_of_nothing(hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge", str(tmp_path), str(tmp_path / "out"), "--revision", "v1"]) == 2
    assert "give --hf_model_path, too" in capsys.readouterr().err


def test_standard_output_is_the_result_alone(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", "--hf_model_path", NAME, "--output_path", str(tmp_path / "out"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["source"] == str(next((tmp_path / "home").glob("hub/models--*/snapshots/*")))
