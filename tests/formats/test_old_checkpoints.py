"""Checkpoints that the package wrote before its modules moved load with the same bits.

tests/data/before_rooms holds what commit f1a9219 wrote: two tensor-parallel ranks trained a bf16 GPT model of two
layers for two steps with a distributed optimizer, and rank 0 copied the checkpoint to a file:// store. expected.json
holds a SHA-256 of each tensor. The bytes come from the trainer's memory and from the safetensors library, not from a
reader of this package.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.dtypes import torch_dtype
from mcore_ckpt.checkpoint.reading import read_index
from mcore_ckpt.cli.main import main
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.formats.native.folder import Folder, LocalFolder
from mcore_ckpt.formats.native.remote_folder import RemoteFolder
from mcore_ckpt.io.store import Store
from mcore_ckpt.sharding.overlap import Rows
from mcore_ckpt.sharding.plan import MODEL, OPAQUE, ReadRange, ShardKey
from mcore_ckpt.steps.remote_steps import RemoteSteps
from mcore_ckpt.tools.examine.verify import verify
from tests.support.element_positions import positions

DATA = Path(__file__).parents[1] / "data" / "before_rooms"
STEP, ROLE, WORLD = 2, "actor", 2
ROLE_DIR = file_names.step_dir(DATA / "root", STEP) / ROLE
EXPECTED = json.loads((DATA / "expected.json").read_text())


def digest_of(tensor: torch.Tensor) -> dict[str, Any]:
    """A tensor as expected.json describes it."""
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(tensor.shape), "sha256": hashlib.sha256(data).hexdigest()}


def whole_tensors(folder: Folder) -> dict[ShardKey, torch.Tensor]:
    """All global tensors of a checkpoint, put together from its shards.

    Fails if an element is in no shard, or if two shards have different bits for it.
    """
    found: dict[ShardKey, torch.Tensor] = {}
    seen: dict[ShardKey, torch.Tensor] = {}
    manifest = folder.manifest()
    for file in manifest.files:
        index = folder.index(file) if file.index else None
        for shard in (shard for name in manifest.tensors for shard in (index.of(name).shards if index else ())):
            if shard.key.kind == OPAQUE:
                continue
            values = torch.empty(shard.region.numel, dtype=torch_dtype(shard.dtype))
            folder.fill({file.path: file}, [(ReadRange(shard, Rows(0, 0, values.numel())), values)])
            shape, at = shard.region.global_shape, positions(shard.region)
            whole = found.setdefault(shard.key, torch.zeros(shape, dtype=values.dtype)).view(-1)
            known = seen.setdefault(shard.key, torch.zeros(shape, dtype=torch.bool)).view(-1)
            assert torch.equal(whole[at][known[at]], values[known[at]]), f"replicas of {shard.key} differ"
            whole[at], known[at] = values, True
    assert not [key for key, known in seen.items() if not known.all()]
    return found


def assert_is_the_state(folder: Folder) -> None:
    """Model, optimizer and extra state are those that the trainer had."""
    manifest = folder.manifest()
    assert (manifest.step, manifest.role, manifest.topology.tp) == (STEP, ROLE, WORLD)
    assert not folder.verify(manifest.files)
    found = {f"{key.name} {'model' if key.kind == MODEL else key.kind}": t for key, t in whole_tensors(folder).items()}
    assert {name: digest_of(tensor) for name, tensor in found.items()} == EXPECTED["state"]
    extra = {file.rank: folder.plain(file) for file in manifest.files_of("extra")}
    assert sorted(extra) == list(range(WORLD))
    for rank, state in extra.items():
        assert state.pop("seen").tolist() == [0, 1]
        assert state == {"step": STEP, "rank": rank, "epoch": {"number": 1, "done": 0.25}}


def digests_of_folder(folder: Path) -> dict[str, dict[str, Any]]:
    """All tensors of a HuggingFace folder, read by the safetensors library."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as opened:
            found |= {name: digest_of(opened.get_tensor(name)) for name in opened.keys()}  # noqa: SIM118 (it is no dict)
    return found


def remote_folder(root: Path) -> RemoteFolder:
    """The newest attempt of the role in a store that is a folder."""
    remote = RemoteSteps(Store(f"file://{root}"))
    assert remote.read_tracker() == STEP
    (step,) = remote.steps()
    assert step.is_complete
    return RemoteFolder(remote.store, file_names.remote_dir(STEP, ROLE, step.found[ROLE].attempt))


def test_the_format_is_version_1() -> None:
    assert json.loads((ROLE_DIR / file_names.MANIFEST_FILE).read_text())["format_version"] == 1


def test_a_local_checkpoint_holds_the_state_that_was_saved() -> None:
    assert_is_the_state(LocalFolder(ROLE_DIR))


def test_a_remote_copy_holds_the_state_that_was_saved() -> None:
    assert_is_the_state(remote_folder(DATA / "remote"))


def flip_a_bit(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    """The tests above can fail."""
    role_dir = Path(shutil.copytree(ROLE_DIR, tmp_path / ROLE))
    folder = LocalFolder(role_dir)
    file = folder.manifest().files_of("model")[0]
    flip_a_bit(role_dir / file.path, read_index(role_dir, file).shards[0].offset)
    with pytest.raises(CheckpointCorruptError, match="wrong CRC"):
        whole_tensors(folder)
    export = role_dir / file_names.HUGGINGFACE_DIR
    flip_a_bit(export / "model.safetensors", -1)
    found = digests_of_folder(export)
    assert found.keys() == EXPECTED["huggingface"].keys()
    assert sum(found[name] != EXPECTED["huggingface"][name] for name in found) == 1


@pytest.mark.parametrize("deep", [False, True])
def test_verify_finds_no_damage(deep: bool, tmp_path: Path) -> None:
    # A copy, because verifying locks the checkpoint.
    report = verify(Path(shutil.copytree(DATA / "root", tmp_path / "root")), deep=deep)
    assert report.is_sound
    assert [verdict.path.name for verdict in report.roles] == [ROLE]


def test_merge_writes_the_exported_model(tmp_path: Path) -> None:
    root = shutil.copytree(DATA / "root", tmp_path / "root")
    assert main(["merge", str(root), str(tmp_path / "merged")]) == 0
    assert digests_of_folder(tmp_path / "merged") == EXPECTED["huggingface"]


def test_a_huggingface_export_converts_and_merges_back(tmp_path: Path) -> None:
    export = ROLE_DIR / file_names.HUGGINGFACE_DIR
    assert digests_of_folder(export) == EXPECTED["huggingface"]
    assert main(["convert", "--hf_model_path", str(export), "--output_path", str(tmp_path / "out")]) == 0
    assert main(["merge", str(tmp_path / "out"), str(tmp_path / "merged")]) == 0
    assert digests_of_folder(tmp_path / "merged") == EXPECTED["huggingface"]
