"""What a `huggingface/` folder holds beside the weights: configuration and tokenizer."""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import WrittenFile
from mcore_ckpt.errors import CheckpointCorruptError, UnsupportedError
from mcore_ckpt.io import limits
from mcore_ckpt.io.checksums import crc32
from mcore_ckpt.io.files import FOLDER_MODE, linked_file, make_folder, read_small, sync_file, write_file
from mcore_ckpt.models.mcore_config import config_of_weights

if TYPE_CHECKING:
    import torch

    from mcore_ckpt.models.architecture import HfModel

CONFIG_FILE = "config.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"

# What a tokenizer, a processor or a model's own code may consist of.
_ASSETS = (".json", ".jinja", ".model", ".py", ".tiktoken", ".txt")
_TEMPLATES = "additional_chat_templates"


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
    make_folder(folder)
    # Which files these write only they know, and other ranks are writing weights into the folder: in one of its own
    # there is nothing else.
    with tempfile.TemporaryDirectory(prefix=".assets-", dir=folder) as own:
        for source in (hf_config, _generation_config(hf_config), processing_class):
            if source is not None:
                source.save_pretrained(Path(own))
        return [_move(path, folder / path.relative_to(own)) for path in sorted(Path(own).rglob("*")) if path.is_file()]


def _move(path: Path, target: Path) -> Path:
    if path.name == TOKENIZER_CONFIG_FILE:
        path.write_text(json.dumps(_tokenizer_for_both_versions(json.loads(path.read_bytes())), indent=2) + "\n")
    make_folder(target.parent)
    os.replace(path, target)
    return target


def _tokenizer_for_both_versions(config: dict[str, Any]) -> dict[str, Any]:
    """A `tokenizer_config.json` of transformers 5 in words that 4 knows too; of 4 as it is, which 5 reads.

    With 5's words AutoTokenizer of 4.57 fails: it has no class TokenizersBackend, and its extra_special_tokens is a
    mapping. PreTrainedTokenizerFast is TokenizersBackend in 5 (tokenization_utils_tokenizers, 5.23), which also takes
    additional_special_tokens for its own list (PreTrainedTokenizerBase._from_pretrained).
    """
    spelled = dict(config)
    if spelled.get("tokenizer_class") == "TokenizersBackend":
        spelled["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(spelled.get("extra_special_tokens"), list):
        spelled["additional_special_tokens"] = spelled.pop("extra_special_tokens")
    return spelled


def written_assets(folder: Path, paths: Iterable[Path]) -> list[WrittenFile]:
    """Files that somebody else wrote below a role's `huggingface/`, made durable, for the manifest."""
    written = []
    for path in sorted(set(paths)):
        # transformers makes files with all permissions that the umask leaves.
        path.chmod(path.stat().st_mode & ~stat.S_IWOTH & 0o777)
        sync_file(path)
        data = path.read_bytes()
        name = f"{file_names.HUGGINGFACE_DIR}/{path.relative_to(folder).as_posix()}"
        written.append(WrittenFile(name, "huggingface", len(data), crc32(data)))
    return written


def copy_assets(source: Path, folder: Path) -> list[Path]:
    """Copies configuration, tokenizer, processor and a model's own code, durably; never weights. Code is not run.

    Returns:
        The files written.

    Raises:
        OSError: a file cannot be read or written.
    """
    written = []
    for path in sorted((*source.iterdir(), *(source / _TEMPLATES).glob("*.jinja"))):
        # The hub's cache is made of links.
        if path.suffix in _ASSETS and path.is_file() and not path.name.startswith(".") and not _is_index(path.name):
            target = folder / path.relative_to(source)
            target.parent.mkdir(FOLDER_MODE, exist_ok=True)
            write_file(target, [_read(source, path)])
            written.append(target)
    return written


def check_code(folder: Path, config: Mapping[str, Any]) -> None:
    """Code of a model's own is copied, never run. What names code that is not there could not be loaded.

    Raises:
        UnsupportedError: `config`, of a `config.json` in this folder, does.
    """
    named = config.get("auto_map") or {}
    for value in named.values() if isinstance(named, Mapping) else ():
        for name in value if isinstance(value, list) else [value]:
            # "repository--module.Class" is loaded from there.
            if isinstance(name, str) and "--" not in name and not (folder / f"{name.partition('.')[0]}.py").exists():
                raise UnsupportedError(
                    f"{folder / 'config.json'}: auto_map names code, {name}, that is not beside it, so that nobody "
                    "could load the model (trust_remote_code): add the file, or remove auto_map if transformers knows "
                    "the architecture itself"
                )


def _read(source: Path, path: Path) -> bytes:
    """A file that becomes part of what others get: nothing that a link fetches from elsewhere. Raises OSError."""
    try:
        return read_small(linked_file(source, str(path.relative_to(source))), limits.HF_ASSET_BYTES)
    except CheckpointCorruptError as error:
        raise OSError(errno.EINVAL, str(error), str(path)) from None


def _is_index(name: str) -> bool:
    """Whether a file says which file has which weights."""
    return name.endswith(".index.json")


def write_config(folder: Path, model: HfModel, dtype: torch.dtype, has_mtp: bool) -> Path:
    """Writes `config.json` as it must be beside weights, durably, in place of what is there. See `config_of_weights`.

    Raises:
        UnsupportedError: it is a value model, and transformers has no class for that.
        OSError: it cannot be written.
    """
    path = folder / CONFIG_FILE
    config = config_of_weights(model, dtype, has_mtp)
    path.unlink(missing_ok=True)
    write_file(path, [json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"])
    return path


def config_of(hf_config: Any) -> dict[str, Any]:
    """A transformers config as the object of a `config.json`, defaults included. Raises UnsupportedError."""
    to_json = getattr(hf_config, "to_json_string", None)
    if to_json is None:
        raise UnsupportedError(f"hf_config is a {type(hf_config).__name__}: hand over a transformers config")
    config = json.loads(to_json(use_diff=False))
    assert isinstance(config, dict)
    return config


def _generation_config(hf_config: Any) -> Any:
    if hf_config is None or not hasattr(hf_config, "_get_generation_parameters"):
        return getattr(hf_config, "generation_config", None)
    from transformers import GenerationConfig

    return GenerationConfig.from_model_config(hf_config)
