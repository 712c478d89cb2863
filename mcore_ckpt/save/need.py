"""Finds out, before a save, which files this rank will write and how large they will be at least."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePath

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.formats.huggingface.side_files import CONFIG_FILE
from mcore_ckpt.formats.native.file_plan import FilePlan
from mcore_ckpt.io.room import Need
from mcore_ckpt.save.hf_export import least_exported_bytes
from mcore_ckpt.state.trainer import Trainer


def need_of_rank(
    trainer: Trainer, plans: Iterable[FilePlan], small: Mapping[str, int], assets: Mapping[str, int]
) -> Need:
    """Returns the need of this rank. A file that several ranks write together is the need of its owner.

    Args:
        trainer: the objects to save.
        plans: the files that this rank writes parts of.
        small: the sizes of this rank's small files by path.
        assets: the sizes of the files beside the HuggingFace weights at the last save; empty at the first one.
    """
    owned = [plan for plan in plans if plan.share.owner == trainer.agreement.rank]
    files = {plan.path: plan.least_size for plan in owned} | dict(small)
    if trainer.agreement.is_coordinator:
        files |= assets or _least_assets(trainer)
    exported = least_exported_bytes(trainer, owned) if "hf_model" in trainer.config.save_contents else 0
    return Need.of(files.items()) + Need(loose=exported)


def _least_assets(trainer: Trainer) -> dict[str, int]:
    if trainer.hf_config is None and trainer.processing_class is None:
        return {}
    # Of the tokenizer's files nothing is known until they are written for the first time.
    return {str(PurePath(file_names.HUGGINGFACE_DIR, CONFIG_FILE)): 1}
