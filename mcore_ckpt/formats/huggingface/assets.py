"""Writes, copies and checks the files beside the weights of a HuggingFace model: configuration, tokenizer, code."""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
from collections.abc import Collection, Iterable, Mapping
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

# The suffixes of files that belong to a tokenizer, to a processor or to a model's own code.
ASSETS = (".json", ".jinja", ".model", ".py", ".tiktoken", ".txt")
TEMPLATES = "additional_chat_templates"


def save_assets(folder: Path, hf_config: Any, processing_class: Any) -> list[Path]:
    """Writes config.json, the generation config if the config has one, and the tokenizer's or processor's files.

    The files are durable when this returns, but not their names.

    Args:
        folder: the folder to write into. It is created if it is missing.
        hf_config: a transformers PretrainedConfig, or None.
        processing_class: a transformers tokenizer or processor, or None.

    Returns:
        The paths of all files written.
    """
    if hf_config is None and processing_class is None:
        return []
    make_folder(folder)
    # save_pretrained does not report all files that it writes, and other ranks write weights into the same folder.
    # Therefore it writes into a temporary folder, in which every file is an asset.
    with tempfile.TemporaryDirectory(prefix=".assets-", dir=folder) as own:
        for source in (hf_config, _generation_config(hf_config), processing_class):
            if source is not None:
                source.save_pretrained(Path(own))
        return [_move(path, folder / path.relative_to(own)) for path in sorted(Path(own).rglob("*")) if path.is_file()]


def _move(path: Path, target: Path) -> Path:
    if path.name == TOKENIZER_CONFIG_FILE:
        path.write_text(json.dumps(_tokenizer_for_both_versions(json.loads(path.read_bytes())), indent=2) + "\n")
    # transformers creates files with all permissions that the umask allows, but no file of a checkpoint may be
    # world-writable.
    path.chmod(path.stat().st_mode & ~stat.S_IWOTH & 0o777)
    sync_file(path)
    make_folder(target.parent)
    os.replace(path, target)
    return target


def _tokenizer_for_both_versions(config: dict[str, Any]) -> dict[str, Any]:
    """Rewrites a `tokenizer_config.json` of transformers 5 so that transformers 4 can read it, too.

    A file of transformers 4 stays as it is, because transformers 5 can read it. AutoTokenizer of 4.57 fails on a file
    of transformers 5, because it has no class TokenizersBackend and expects extra_special_tokens to be a mapping. In
    transformers 5 PreTrainedTokenizerFast is another name of TokenizersBackend (tokenization_utils_tokenizers, 5.23),
    and the list of extra_special_tokens is also read from additional_special_tokens
    (PreTrainedTokenizerBase._from_pretrained).
    """
    readable = dict(config)
    if readable.get("tokenizer_class") == "TokenizersBackend":
        readable["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(readable.get("extra_special_tokens"), list):
        readable["additional_special_tokens"] = readable.pop("extra_special_tokens")
    return readable


def written_assets(folder: Path, paths: Iterable[Path]) -> list[WrittenFile]:
    """Returns the records for the manifest of files below a role's `huggingface/`."""
    written = []
    for path in sorted(set(paths)):
        data = path.read_bytes()
        name = f"{file_names.HUGGINGFACE_DIR}/{path.relative_to(folder).as_posix()}"
        written.append(WrittenFile(name, "huggingface", len(data), crc32(data)))
    return written


def copy_assets(source: Path, folder: Path, without: Collection[str] = ()) -> list[Path]:
    """Copies configuration, tokenizer, processor and a model's own code durably, but no weights. It executes no code.

    Args:
        source: the folder of the model.
        folder: where to copy.
        without: the names of files that the caller writes itself.

    Returns:
        The paths of the files written.

    Raises:
        OSError: a file cannot be read or written.
    """
    written = []
    for path in sorted((*source.iterdir(), *(source / TEMPLATES).glob("*.jinja"))):
        # is_file follows links, because the hub's cache consists of links.
        is_asset = path.suffix in ASSETS and not path.name.startswith(".") and not _is_index(path.name)
        if is_asset and path.name not in without and path.is_file():
            target = folder / path.relative_to(source)
            target.parent.mkdir(FOLDER_MODE, exist_ok=True)
            write_file(target, [_read(source, path)])
            written.append(target)
    return written


def check_code(folder: Path, config: Mapping[str, Any]) -> None:
    """Checks that the folder has the code that `config` names. Without this code nobody could load the exported model.

    Args:
        folder: the folder of the `config.json`.
        config: the parsed `config.json`.

    Raises:
        UnsupportedError: `auto_map` names code that is not in the folder.
    """
    named = config.get("auto_map") or {}
    for value in named.values() if isinstance(named, Mapping) else ():
        for name in value if isinstance(value, list) else [value]:
            # transformers loads "repository--module.Class" from that repository of the hub.
            if isinstance(name, str) and "--" not in name and not (folder / f"{name.partition('.')[0]}.py").exists():
                raise UnsupportedError(
                    f"{folder / 'config.json'}: auto_map names the code {name}, which is not in the folder, so nobody "
                    "could load the model (trust_remote_code): add the file, or remove auto_map if transformers knows "
                    "the architecture itself"
                )


def _read(source: Path, path: Path) -> bytes:
    """Reads a file that will be published. Raises OSError, also if a link leads to a file outside of the model."""
    try:
        return read_small(linked_file(source, str(path.relative_to(source))), limits.HF_ASSET_BYTES)
    except CheckpointCorruptError as error:
        raise OSError(errno.EINVAL, str(error), str(path)) from None


def _is_index(name: str) -> bool:
    """Returns True if the file is an index of weights, which lists the file of each tensor."""
    return name.endswith(".index.json")


def write_config(
    folder: Path, model: HfModel, dtype: torch.dtype, has_mtp: bool, quantization: Mapping[str, Any] | None = None
) -> Path:
    """Writes the `config.json` that belongs to the weights, durably. It replaces an existing one.

    See `config_of_weights` for the contents. `quantization` is the `quantization_config` of quantized weights.

    Raises:
        UnsupportedError: the model is a value model, and transformers has no such class for its architecture.
        OSError: the file cannot be written.
    """
    path = folder / CONFIG_FILE
    config = config_of_weights(model, dtype, has_mtp)
    if quantization is not None:
        config["quantization_config"] = dict(quantization)
    path.unlink(missing_ok=True)
    write_file(path, [json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"])
    return path


def config_of(hf_config: Any) -> dict[str, Any]:
    """Converts a transformers config to the contents of a `config.json`, with all defaults.

    Raises UnsupportedError if `hf_config` is not a transformers config.
    """
    to_json = getattr(hf_config, "to_json_string", None)
    if to_json is None:
        raise UnsupportedError(f"hf_config is a {type(hf_config).__name__}: pass a transformers config")
    config = json.loads(to_json(use_diff=False))
    assert isinstance(config, dict)
    return config


def _generation_config(hf_config: Any) -> Any:
    if hf_config is None or not hasattr(hf_config, "_get_generation_parameters"):
        return getattr(hf_config, "generation_config", None)
    from transformers import GenerationConfig

    return GenerationConfig.from_model_config(hf_config)
