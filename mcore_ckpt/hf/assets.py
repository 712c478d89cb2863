"""What a `huggingface/` folder holds beside the weights: configuration and tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def save_assets(folder: Path, hf_config: Any, processing_class: Any) -> list[Path]:
    """Writes config.json, the generation config if the config has one, and the tokenizer's or processor's files.

    Args:
        folder: made if needed.
        hf_config: a transformers PretrainedConfig, or None.
        processing_class: a transformers tokenizer or processor, or None.

    Returns:
        All files written.
    """
    if hf_config is None and processing_class is None:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    for source in (hf_config, _generation_config(hf_config), processing_class):
        if source is not None:
            source.save_pretrained(folder)
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _generation_config(hf_config: Any) -> Any:
    if hf_config is None or not hasattr(hf_config, "_get_generation_parameters"):
        return getattr(hf_config, "generation_config", None)
    from transformers import GenerationConfig

    return GenerationConfig.from_model_config(hf_config)
