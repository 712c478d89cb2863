"""What a `huggingface/` folder holds beside the weights: configuration and tokenizer."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_ckpt import layout
from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.storage.files import sync_file
from mcore_ckpt.storage.requests import WrittenFile

if TYPE_CHECKING:
    import torch

    from mcore_ckpt.hf.architecture import HfModel

CONFIG_FILE = "config.json"


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
    before = set(folder.rglob("*"))
    for source in (hf_config, _generation_config(hf_config), processing_class):
        if source is not None:
            source.save_pretrained(folder)
    return sorted(path for path in folder.rglob("*") if path.is_file() and path not in before)


def written_assets(folder: Path, paths: Iterable[Path]) -> list[WrittenFile]:
    """Files that somebody else wrote below a role's `huggingface/`, made durable, for the manifest."""
    written = []
    for path in sorted(set(paths)):
        sync_file(path)
        data = path.read_bytes()
        name = f"{layout.HUGGINGFACE_DIR}/{path.relative_to(folder).as_posix()}"
        written.append(WrittenFile(name, "huggingface", len(data), zlib.crc32(data)))
    return written


def copy_assets(source: Path, folder: Path) -> list[Path]:
    """Copies what lies beside the weights of a HuggingFace model: everything but weights and their indexes.

    Links are followed, as the hub's cache is made of them. Returns the files written.
    """
    written = []
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.startswith(".") and not _is_weights(path.name):
            target = folder / path.name
            shutil.copyfile(path, target)
            written.append(target)
    return written


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json"))


def write_config(folder: Path, model: HfModel, dtype: torch.dtype, has_mtp: bool) -> Path:
    """Writes `config.json` as it must be beside the weights of `model`; whatever else it says stays as it was.

    Args:
        folder: of the weights.
        model: what they are; its `config` is what was known before.
        dtype: of the weights.
        has_mtp: whether multi-token prediction was written.
    """
    config = dict(model.config)
    # transformers took up "dtype" in 4.56; it reads the older name still.
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    config["architectures"] = [_class_of(model)]
    config["tie_word_embeddings"] = model.is_tied
    if model.is_value:
        # How many values a head gives is not in the file but as the number of labels.
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    if not has_mtp and config.get("num_nextn_predict_layers"):
        config["num_nextn_predict_layers"] = 0
    path = folder / CONFIG_FILE
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return path


def config_of(hf_config: Any) -> dict[str, Any]:
    """A transformers config as the object of a `config.json`, defaults included. Raises UnsupportedError."""
    to_json = getattr(hf_config, "to_json_string", None)
    if to_json is None:
        raise UnsupportedError(f"hf_config is a {type(hf_config).__name__}: hand over a transformers config")
    config = json.loads(to_json(use_diff=False))
    assert isinstance(config, dict)
    return config


def as_value_model(config: dict[str, Any], classes: Iterable[str]) -> dict[str, Any]:
    """The config of a language model, as that of a model with a head of one value per token.

    Args:
        config: the object in its `config.json`.
        classes: of the architecture.

    Raises:
        UnsupportedError: transformers has no such class.
    """
    of_tokens = next((name for name in classes if name.endswith("ForTokenClassification")), None)
    if of_tokens is None:
        raise UnsupportedError(
            f"config.json: transformers has no class of {config.get('model_type')} with a value head; leave 'hf_model' "
            "out of save_contents"
        )
    return {**config, "architectures": [of_tokens]}


def _class_of(model: HfModel) -> str:
    """The transformers class to load the weights with: the config's if it fits, else the architecture's."""
    kinds = ("ForTokenClassification", "ForSequenceClassification") if model.is_value else ("ForCausalLM",)
    named = [*(model.config.get("architectures") or ()), *model.architecture.classes]
    return next(name for name in named if name.endswith(kinds))


def _generation_config(hf_config: Any) -> Any:
    if hf_config is None or not hasattr(hf_config, "_get_generation_parameters"):
        return getattr(hf_config, "generation_config", None)
    from transformers import GenerationConfig

    return GenerationConfig.from_model_config(hf_config)
