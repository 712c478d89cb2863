"""Reading a few rows of a tensor in a remote store."""

import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.formats.native.remote_folder import RemoteFolder
from mcore_ckpt.sharding.overlap import Rows
from mcore_ckpt.sharding.plan import ReadRange
from mcore_ckpt.steps.remote_steps import RemoteSteps
from tests.support.checkpoints import ROLE


def read_rows(remote: RemoteSteps, step: int, name: str, rows: slice) -> torch.Tensor:
    """Rows of one of the optimizer's tensors of a world of one."""
    folder = RemoteFolder(remote.store, file_names.remote_dir(step, ROLE, remote.step(step).found[ROLE].attempt))
    (file,) = folder.manifest().files_of("optimizer")
    shard = folder.index(file).of(name).shards[0]
    width = shard.region.global_shape[1]
    found = torch.full((rows.stop - rows.start, width), float("nan"))
    folder.fill({file.path: file}, [(ReadRange(shard, Rows(rows.start * width, 0, found.numel())), found)])
    return found
