"""Keeps Megatron-Bridge's configuration in the checkpoint, for `mcore-ckpt convert` on the way back."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any


def as_yaml(cfg: Any) -> str:
    """Returns what Bridge's own checkpoints have as run_config.yaml. Only Bridge knows how to write it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run_config.yaml"
        cfg.to_yaml(str(path))
        return path.read_text()
