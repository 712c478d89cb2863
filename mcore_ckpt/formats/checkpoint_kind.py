"""Defines how a kind of checkpoint is recognized and opened. `kinds.py` lists the kinds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    from mcore_ckpt.checkpoint.manifest import AdapterSettings
    from mcore_ckpt.checkpoint.model_facts import Facts
    from mcore_ckpt.formats.contract import CheckpointReader
    from mcore_ckpt.formats.foreign_state import ForeignState, LiveTraining
    from mcore_ckpt.models.config_fields import HfConfig

Backend = Literal["megatron", "fsdp"]


class CheckpointKind(Protocol):
    """A kind of checkpoint: how its folders are recognized, and how they are opened.

    Each kind is one class in `formats/<kind>/kind.py`, which derives from this class, and one object in `kinds.KINDS`.
    These modules import neither torch nor NumPy: `open`, `open_state` and `facts` import what they need when called.

    Attributes:
        name: the word for the kind in messages and in JSON.
        what: a description of a folder of this kind for people, such as "a folder of FSDP shards".
        backend: the name, in `merge --backend`, of the training framework that writes this kind. None if checkpoints of
            this kind are already HuggingFace models, which `merge` does not read.
        needs_writers: True if `open_state` needs `LiveTraining.writers`.
        has_hf_names: True if the kind's reader lists tensors by HuggingFace's names, so that a merge only copies them.
        may_permute_adapters: True if Megatron-Bridge can be the writer. Megatron-Bridge stores the rows of some
            adapters in another order than this package.
    """

    name: ClassVar[str]
    what: ClassVar[str]
    backend: ClassVar[Backend | None] = "megatron"
    needs_writers: ClassVar[bool] = False
    has_hf_names: ClassVar[bool] = False
    may_permute_adapters: ClassVar[bool] = False

    def recognizes(self, folder: Path) -> bool:
        """Returns True if a folder is a checkpoint of this kind.

        The method looks at names and small files. It never opens a pickle, because anybody may have written the folder.

        Raises:
            CheckpointError: this process has no permission to read the file that tells the kind.
        """

    def open(self, folder: Path, config: HfConfig | None = None) -> CheckpointReader:
        """Opens the reader of a checkpoint.

        Args:
            config: the `config.json` of the checkpoint's model; None if it is unknown.

        Raises:
            CheckpointError: the checkpoint is damaged, belongs to another model, or needs the `config`.
        """

    def open_state(self, folder: Path, training: LiveTraining) -> ForeignState | None:
        """Opens the state from which `training` can go on. Returns None if only weights can be loaded from this kind.

        Raises:
            CheckpointError: the checkpoint is damaged, or does not fit the training.
        """
        return None

    def adapter_settings(self, folder: Path) -> AdapterSettings | None:
        """Returns the settings of the checkpoint's low-rank adapters, or None if the checkpoint does not state them.

        Raises:
            CheckpointCorruptError: the file with the settings is damaged.
        """
        from mcore_ckpt.formats.lora_meta import read_lora_meta

        return read_lora_meta(folder)

    def facts(self, reader: CheckpointReader) -> Facts:
        """Returns the facts that a checkpoint, opened as `reader`, states about its model. The dict may be empty."""
        return {}
