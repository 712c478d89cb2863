"""Which checkpoints with adapters cannot be merged."""

from pathlib import Path

import pytest
import torch

from mcore_ckpt.checkpoint.manifest import AdapterSettings
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError, UnsupportedError
from mcore_ckpt.formats.contract import TensorInfo
from mcore_ckpt.formats.huggingface.export_plan import ExportOptions
from mcore_ckpt.formats.shard_reader import ShardReader
from mcore_ckpt.models.registry import model_from_config
from mcore_ckpt.sharding.plan import MODEL, ShardKey, StoredShard
from mcore_ckpt.sharding.regions import Region, Shape
from mcore_ckpt.tools.convert.merge_adapters import AdapterMerge, adapter_settings
from mcore_ckpt.tools.convert.merge_plan import OpenCheckpoint
from mcore_ckpt.tools.examine.find import FoundCheckpoint
from tests.support.tiny_models import make_config, make_hf_folder

FC1 = "decoder.layers.0.mlp.linear_fc1.adapter."
LORA = {f"{FC1}linear_in.weight": (4, 64), f"{FC1}linear_out.weight": (192, 4)}
DORA = {**LORA, f"{FC1}weight_magnitude": (192,)}
CANONICAL = {f"{FC1}adapter_gate.linear_in.weight": (4, 64), f"{FC1}adapter_gate.linear_out.weight": (96, 4)}


@pytest.mark.parametrize(
    ("adapters", "pieces", "is_refused"),
    [
        (LORA, 4, False),
        (DORA, 1, False),
        (DORA, 2, True),
        (CANONICAL, 2, False),
        (CANONICAL, 4, True),
    ],
)
def test_rows_that_bridge_permutes_are_refused(adapters: dict[str, Shape], pieces: int, is_refused: bool) -> None:
    """In Bridge's own checkpoint they are in another order if it was saved under more than one tensor-parallel rank."""
    infos = {name: TensorInfo(torch.float32, shape) for name, shape in adapters.items()}

    def shards(name: str) -> list[StoredShard]:
        region = Region.whole(infos[name].shape)
        return [StoredShard(ShardKey(name, MODEL), region, "float32", "f", 0, 0, None)] * pieces

    found = FoundCheckpoint(Path("ckpt"), "torch_dist")
    options: ExportOptions = {"dtype": None, "max_shard_bytes": 10**9, "least_files": 1, "blocks": None}
    reader, model = ShardReader(Path("ckpt"), infos, shards), model_from_config(make_config("qwen3"))
    job = AdapterMerge(OpenCheckpoint(found, model, reader, infos), "only", AdapterSettings(8), Path(), options)
    if is_refused:
        with pytest.raises(UnsupportedError, match="order that depends on the tensor-parallel size"):
            job.plan()
    else:
        assert job.plan().adapter is not None


def test_a_base_model_of_another_size_is_refused(tmp_path: Path) -> None:
    base = make_hf_folder(tmp_path / "base", "qwen3", intermediate_size=32)
    infos = {name: TensorInfo(torch.float32, shape) for name, shape in LORA.items()}
    found, model = FoundCheckpoint(Path("ckpt"), "torch_dist"), model_from_config(make_config("qwen3"))
    reader = ShardReader(Path("ckpt"), infos, lambda name: [])
    options: ExportOptions = {"dtype": None, "max_shard_bytes": 10**9, "least_files": 1, "blocks": None}
    job = AdapterMerge(OpenCheckpoint(found, model, reader, infos), "merge", AdapterSettings(8), base, options)
    words = r"layers\.0\.mlp\.down_proj\.weight: has shape \[64, 32\] in the base model, but .* requires \[64, 96\]"
    with pytest.raises(CheckpointMismatchError, match=words):
        job.plan()


def test_alpha_of_other_programs(tmp_path: Path) -> None:
    folder = tmp_path / "actor"
    folder.mkdir()
    found = FoundCheckpoint(folder, "fsdp")
    with pytest.raises(CheckpointMismatchError, match="--lora-alpha"):
        adapter_settings(found, None)
    assert adapter_settings(found, 3.0).alpha == 3
    (tmp_path / "lora_train_meta.json").write_text('{"r": 4, "lora_alpha": 16}')  # as verl's SFT trainer has it
    assert adapter_settings(found, None).alpha == 16
    (folder / "lora_train_meta.json").write_text('{"r": 4}')
    with pytest.raises(CheckpointCorruptError, match="lora_alpha"):
        adapter_settings(found, None)
