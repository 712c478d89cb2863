"""Checks that the new tensor-parallel size divides the attention heads, if their number is known."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.model_facts import Facts
from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io import limits
from mcore_ckpt.io.files import inside, read_small
from mcore_ckpt.ranks.topology import Topology
from mcore_ckpt.tools.convert.reshard.saved_tensors import SavedTensor

# The kinds of heads of each weight that tensor parallelism cuts. Each kind maps to the fact and the field of
# config.json that state the number of heads.
_HEADS = {
    "linear_qkv.weight": {
        "attention heads": ("num_attention_heads", "num_attention_heads"),
        "key-value heads": ("num_query_groups", "num_key_value_heads"),
    },
    "mixer.in_proj.weight": {
        "Mamba heads": ("mamba_num_heads", "mamba_num_heads"),
        "Mamba groups": ("mamba_num_groups", "n_groups"),
    },
    "self_attention.in_proj.weight": {
        "key heads": ("linear_num_key_heads", "linear_num_key_heads"),
        "value heads": ("linear_num_value_heads", "linear_num_value_heads"),
    },
}


def check_heads(
    facts: Facts, config: Mapping[str, Any], tensors: Collection[SavedTensor], saved: Topology, new: Topology
) -> None:
    """Checks that the new tensor-parallel size divides the attention heads.

    A size that divides the rows of a weight does not always divide its heads. megatron requires that the size divides
    the number of attention heads, and that it divides the number of key-value heads or is a multiple of that number. In
    linear attention, the size must divide the numbers of key heads and of value heads (TransformerConfig, 0.16.1). In a
    Mamba mixer, the size must divide the numbers of heads and of groups (MambaMixer, 0.18).

    The numbers come from the checkpoint's `facts`, or else from the HuggingFace `config`. A number that both lack is
    not checked.

    Raises CheckpointMismatchError: the heads cannot be divided.
    """
    if new.tp == saved.tp:
        return
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config
    first = {kind: next((t for t in tensors if t.name.endswith(kind) and t.seen), None) for kind in _HEADS}
    for kind, counted in _HEADS.items():
        for what, (fact, field) in counted.items():
            tensor, count = first[kind], facts.get(fact) or config.get(field)
            if tensor is None or not isinstance(count, int) or isinstance(count, bool) or count < 1:
                continue
            if count % new.tp and (field != "num_key_value_heads" or new.tp % count):
                raise CheckpointMismatchError(
                    f"{tensor.file}: tensor {tensor.name} of shape {list(tensor.shape)}: the {count} {what} of this "
                    f"tensor cannot be divided among tp = {new.tp} ranks: choose another tensor-parallel size"
                )


def config_of_checkpoint(role_dir: Path) -> dict[str, Any]:
    """Reads the HuggingFace configuration in a checkpoint's folder. Returns an empty dict if it cannot be read."""
    try:
        path = inside(role_dir, f"{file_names.HUGGINGFACE_DIR}/config.json")
        return fields.parse(read_small(path, limits.HF_JSON_BYTES))
    except (OSError, CheckpointCorruptError, fields.FieldError):
        return {}  # the configuration is optional, so a reshard goes on if it is missing or damaged
