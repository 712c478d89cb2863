"""Reads every kind of checkpoint through one contract (`contract.py`), and writes some of the kinds.

The kinds that can be written are native, HuggingFace and torch_dist.

Public names, for integrations and commands: `kind_of` detects which program wrote a folder; `torch_dist_folders` finds
the folders of a `torch_dist` checkpoint, and `TorchDistFiles` reads the names and the common state in them;
`load_safely` loads a `.pt` file of another program without executing code from it; `TensorInfo` is a tensor's dtype and
shape; `companions_of` finds the files that a trainer keeps in a step next to the roles, `what_is_missing` finds a file
of this sort that one step lacks and other steps have, and `first_cut` finds a truncated file; `HubModel` is a model on
the HuggingFace hub, and `with_revision` adds a revision to the model's name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mcore_ckpt.public_names import lazy_names

if TYPE_CHECKING:
    from mcore_ckpt.formats.companions import companions_of, first_cut, what_is_missing
    from mcore_ckpt.formats.contract import TensorInfo
    from mcore_ckpt.formats.foreign_pickles import load_safely
    from mcore_ckpt.formats.huggingface.hub_names import HubModel, with_revision
    from mcore_ckpt.formats.kinds import kind_of
    from mcore_ckpt.formats.torch_dist.files import TorchDistFiles
    from mcore_ckpt.formats.torch_dist.kind import torch_dist_folders

__all__ = [
    "HubModel",
    "TensorInfo",
    "TorchDistFiles",
    "companions_of",
    "first_cut",
    "kind_of",
    "load_safely",
    "torch_dist_folders",
    "what_is_missing",
    "with_revision",
]

__getattr__ = lazy_names(
    __name__,
    {
        "companions": ("companions_of", "first_cut", "what_is_missing"),
        "contract": ("TensorInfo",),
        "huggingface.hub_names": ("HubModel", "with_revision"),
        "kinds": ("kind_of",),
        "foreign_pickles": ("load_safely",),
        "torch_dist.files": ("TorchDistFiles",),
        "torch_dist.kind": ("torch_dist_folders",),
    },
)
