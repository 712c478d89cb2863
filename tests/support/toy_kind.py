"""A kind of checkpoint that the package does not know: `toy.json` and a raw `.bin` file for each tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_ckpt.formats.checkpoint_kind import CheckpointKind

if TYPE_CHECKING:
    import torch

    from mcore_ckpt.formats.contract import CheckpointReader
    from mcore_ckpt.models.config_fields import HfConfig


class Toy(CheckpointKind):
    name = "toy"
    what = "a checkpoint of the toy trainer"

    def recognizes(self, folder: Path) -> bool:
        return (folder / "toy.json").is_file()

    def open(self, folder: Path, config: HfConfig | None = None) -> CheckpointReader:
        from mcore_ckpt.checkpoint.dtypes import torch_dtype
        from mcore_ckpt.formats.contract import TensorInfo
        from mcore_ckpt.formats.shard_reader import ShardReader
        from mcore_ckpt.sharding.plan import MODEL, ShardKey, StoredShard
        from mcore_ckpt.sharding.regions import Region

        infos, shards = {}, {}
        described: dict[str, dict[str, Any]] = json.loads((folder / "toy.json").read_text())
        for name, tensor in described.items():
            shape, dtype = tuple(tensor["shape"]), tensor["dtype"]
            file = (folder / tensor["file"]).absolute()
            infos[name] = TensorInfo(torch_dtype(dtype), shape)
            key, nbytes = ShardKey(name, MODEL), file.stat().st_size
            shards[name] = (StoredShard(key, Region.whole(shape), dtype, str(file), 0, nbytes, None),)
        return ShardReader(folder, infos, shards.__getitem__)


def save_toy(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """Writes tensors under the names of megatron's layer specs."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    described = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        file = f"{number:04d}.bin"
        described[name] = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), "file": file}
        (folder / file).write_bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    (folder / "toy.json").write_text(json.dumps(described))
    return folder
