"""Reads verl's note on the LoRA adapters of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from mcore_ckpt.checkpoint.manifest import AdapterSettings
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io import limits
from mcore_ckpt.io.files import read_small

# verl (0.5 to 0.9) writes alpha and the rank into this file. verl's checkpoint manager for FSDP puts the file next to
# the shards, and verl's SFT trainer puts the file into the step's folder.
_LORA_META = "lora_train_meta.json"


def read_lora_meta(folder: Path) -> AdapterSettings | None:
    """Returns the settings of the adapters in a folder that verl wrote.

    Returns None if there is no note, or the note's alpha is 0.

    Raises CheckpointCorruptError if the note cannot be read or has no alpha.
    """
    for path in (folder / _LORA_META, folder.parent / _LORA_META):
        try:
            alpha = fields.get_number(fields.parse(read_small(path, limits.HF_JSON_BYTES)), "lora_alpha")
            # verl's SFT trainer (0.9.1) writes 0 if its configuration sets no alpha, so 0 counts as no note.
            return AdapterSettings(alpha) if alpha > 0 else None
        except FileNotFoundError:
            continue
        except (OSError, fields.FieldError) as error:
            raise CheckpointCorruptError(
                f"{path}: cannot be read: {error}: give alpha with mcore-ckpt merge --lora-alpha"
            ) from None
    return None
