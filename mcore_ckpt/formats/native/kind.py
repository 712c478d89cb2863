"""Recognizes the checkpoints of this package by their manifest."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.reading import read_manifest
from mcore_ckpt.formats.checkpoint_kind import CheckpointKind

if TYPE_CHECKING:
    from mcore_ckpt.checkpoint.manifest import AdapterSettings
    from mcore_ckpt.checkpoint.model_facts import Facts
    from mcore_ckpt.formats.contract import CheckpointReader
    from mcore_ckpt.formats.native.reader import NativeReader
    from mcore_ckpt.models.config_fields import HfConfig


class Native(CheckpointKind):
    """A role's folder of this package."""

    name = "native"
    what = "the folder of a role"

    def recognizes(self, folder: Path) -> bool:
        return os.path.exists(folder / file_names.MANIFEST_FILE)

    def open(self, folder: Path, config: HfConfig | None = None) -> NativeReader:
        from mcore_ckpt.formats.native.reader import NativeReader

        return NativeReader.open(folder)

    def adapter_settings(self, folder: Path) -> AdapterSettings | None:
        return read_manifest(folder).adapters

    def facts(self, reader: CheckpointReader) -> Facts:
        from mcore_ckpt.formats.native.reader import NativeReader

        assert isinstance(reader, NativeReader)
        return reader.manifest.model or {}
