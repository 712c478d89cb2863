"""Makes emerging-optimizers (Muon and its kin) usable on Python 3.11 and with every version of megatron-core.

Its metadata asks for Python 3.12, only for `typing.override`. The registries have 0.3.0 alone, and megatron-core 0.16
and 0.17 call two arguments by the names of 0.1.0; 0.19 leaves out what AdaptiveMuon of 0.3.0 scales by. gloo cannot
gather tensors of different sizes, as NCCL can. Importing this module, before megatron-core, is enough.
"""

import sys
import typing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions

# Not on PYTHONPATH: a process that imports megatron-core 0.19, and not this module, fails if it finds the package.
_FOLDER = Path(__file__).parents[2] / ".venv" / "emerging"
INSTALLED = _FOLDER.is_dir() and find_spec("triton") is not None  # which it imports


def _enable() -> None:
    typing.override = typing_extensions.override  # type: ignore[attr-defined, unused-ignore]
    sys.path.append(str(_FOLDER))
    from emerging_optimizers.orthogonalized_optimizers import AdaptiveMuon, OrthogonalizedOptimizer, muon_utils

    made, orthogonalized = OrthogonalizedOptimizer.__init__, muon_utils.newton_schulz_tp

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        if "use_nesterov" in kwargs:
            kwargs["nesterov"] = kwargs.pop("use_nesterov")
        made(self, *args, **kwargs)

    def orthogonalize(*args: Any, **kwargs: Any) -> Any:
        if "mode" in kwargs:
            kwargs["tp_mode"] = kwargs.pop("mode")
        return orthogonalized(*args, **kwargs)

    OrthogonalizedOptimizer.__init__ = make
    muon_utils.newton_schulz_tp = orthogonalize
    AdaptiveMuon.scale_mode, AdaptiveMuon.extra_scale_factor = "spectral", 1.0
    dist.all_gather = _all_gather


_GATHER = dist.all_gather


def _all_gather(tensors: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, **more: Any) -> Any:
    if len({each.numel() for each in tensors}) == 1:
        return _GATHER(tensors, tensor, group, **more)
    tensors[dist.get_rank(group)].copy_(tensor)
    for rank, each in enumerate(tensors):
        dist.broadcast(each, dist.get_global_rank(group, rank), group)
    return None


if INSTALLED:
    _enable()
