"""HuggingFace <-> mcore."""

from mcore_ckpt.hf.architecture import (
    Architecture,
    HfModel,
    ModelFacts,
    known_architectures,
    read_config,
    read_model,
    register_architecture,
)
from mcore_ckpt.hf.mapping import HfTensor, Slab, hf_tensors
from mcore_ckpt.hf.table import Block, Row, Table

__all__ = [
    "Architecture",
    "Block",
    "HfModel",
    "HfTensor",
    "ModelFacts",
    "Row",
    "Slab",
    "Table",
    "hf_tensors",
    "known_architectures",
    "read_config",
    "read_model",
    "register_architecture",
]
