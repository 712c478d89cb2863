"""Recognizes HuggingFace models by the names of their files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mcore_ckpt.formats.checkpoint_kind import CheckpointKind
from mcore_ckpt.io.files import names_in

if TYPE_CHECKING:
    from mcore_ckpt.formats.contract import CheckpointReader
    from mcore_ckpt.models.config_fields import HfConfig


class HuggingFace(CheckpointKind):
    """The folder of a HuggingFace model."""

    name = "huggingface"
    what = "a HuggingFace model"
    backend = None

    def recognizes(self, folder: Path) -> bool:
        return is_hf_folder(folder) and "config.json" in names_in(folder)

    def open(self, folder: Path, config: HfConfig | None = None) -> CheckpointReader:
        from mcore_ckpt.formats.huggingface.reader import HuggingFaceReader, read_contents

        return HuggingFaceReader(read_contents(folder))


def is_hf_folder(path: Path) -> bool:
    """Returns True if a folder has the configuration and weights of a HuggingFace model or of a PEFT adapter."""
    names = names_in(path)
    has_weights = any(name.startswith("pytorch_model") or ".safetensors" in name for name in names)
    return has_weights and not names.isdisjoint(("config.json", "adapter_config.json"))
