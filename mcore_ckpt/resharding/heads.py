"""Whether attention heads can be divided, where the checkpoint's HuggingFace configuration says how many there are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mcore_ckpt import layout
from mcore_ckpt.errors import CheckpointMismatchError
from mcore_ckpt.resharding.survey import SavedTensor
from mcore_ckpt.topology import Topology


def check_heads(config: Mapping[str, Any], tensors: Iterable[SavedTensor], saved: Topology, new: Topology) -> None:
    """Rows may divide where heads do not. `config` is HuggingFace's of the model; what it does not say is not checked.

    megatron wants heads that the tensor-parallel size divides, and groups that it divides or that divide it
    (TransformerConfig, 0.16.1).

    Raises:
        CheckpointMismatchError: they cannot be divided.
    """
    qkv = next((tensor for tensor in tensors if tensor.name.endswith("linear_qkv.weight") and tensor.seen), None)
    if new.tp == saved.tp or qkv is None:
        return
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    for what, count in (("attention heads", heads), ("key-value heads", groups)):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            continue
        if count % new.tp and (what == "attention heads" or new.tp % count):
            raise CheckpointMismatchError(
                f"{qkv.file}: tensor {qkv.name} of shape {list(qkv.shape)}: its {count} {what} cannot be divided among "
                f"tp = {new.tp} ranks"
            )


def config_beside(role_dir: Path) -> dict[str, Any]:
    """The configuration beside a checkpoint; empty where there is none."""
    try:
        config = json.loads((role_dir / layout.HUGGINGFACE_DIR / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}  # it is beside the weights as a service: nothing here depends on it
    return config if isinstance(config, dict) else {}
