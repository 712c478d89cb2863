"""Writes the assets of a HuggingFace model: configuration, tokenizer, and the other files of its source."""

from __future__ import annotations

import copy
import json
import logging
import os
import stat
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_ckpt import field_checks, json_bounds
from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.formats.huggingface.hub import cached_folder
from mcore_ckpt.formats.huggingface.side_files import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    QUANTIZATION,
    Unwanted,
    find_side_files,
    side_files,
)
from mcore_ckpt.io.access import FOLDER_MODE, mode_in
from mcore_ckpt.io.files import make_folder, sync_file, write_file
from mcore_ckpt.models.mcore_config import config_of_weights
from mcore_ckpt.models.quantization import without_quantization

if TYPE_CHECKING:
    import torch

    from mcore_ckpt.models.architecture import HfModel

logger = logging.getLogger(__name__)

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_SPECIAL_TOKENS_FILE = "special_tokens_map.json"

TOKENIZER = Unwanted(
    (
        *("tokenizer.json", "vocab*", "merges*.txt", "*.tiktoken", "added_tokens.json", _SPECIAL_TOKENS_FILE),
        *("*.model", "*.model.v*", "tekken.json"),
    ),
    "These files are other forms of the tokenizer, without tokens that the trainer has added. They are left out if "
    "the trainer has added tokens.",
)

SourceFiles = MutableMapping[str, bytes]
"""The assets of the model that a training started from, by path. The first save fills the mapping, because the source
can be a checkpoint that retention deletes later."""


def save_assets(
    folder: Path, hf_config: Any, processing_class: Any, source: SourceFiles, is_export: bool = False
) -> list[Path]:
    """Writes the assets of a model.

    `config.json` and the files of the tokenizer or processor come from the given objects. All other files are copied
    from the folder that these objects were loaded from. `generation_config.json` is copied, too, unless `hf_config` has
    a `generation_config`. When this function returns, the files are durable, but their directory entries are not.

    Args:
        folder: the folder to write into, which is created if it is missing.
        hf_config: a transformers PretrainedConfig, or None.
        processing_class: a transformers tokenizer or processor, or None.
        source: the files of the source. If the mapping is empty, this function fills it.
        is_export: True if the same save also writes weights into `folder`, without quantizing them.

    Returns:
        The paths of all files written.
    """
    if hf_config is None and processing_class is None:
        return []
    make_folder(folder)
    if not source:
        _read_source(hf_config, processing_class, folder, source)
    # save_pretrained does not report all files that it writes, and other ranks write weights into `folder`. Therefore
    # save_pretrained writes into a temporary folder, in which every file is an asset.
    with tempfile.TemporaryDirectory(prefix=".assets-", dir=folder) as own:
        _save_objects(Path(own), hf_config, processing_class, source)
        tokenizer = Path(own, TOKENIZER_CONFIG_FILE)
        if tokenizer.exists():
            readable = _tokenizer_for_both_versions(json.loads(tokenizer.read_bytes()))
            tokenizer.write_text(json.dumps(readable, indent=2) + "\n")
        _add_source(Path(own), processing_class, source, is_export)
        return [_move(path, folder / path.relative_to(own)) for path in sorted(Path(own).rglob("*")) if path.is_file()]


def _save_objects(folder: Path, hf_config: Any, processing_class: Any, source: Mapping[str, bytes]) -> None:
    if hf_config is not None:
        _check_json(hf_config)
        _without_generation(hf_config).save_pretrained(folder)
        path = folder / CONFIG_FILE
        if path.exists() and (unknown := unknown_fields(hf_config, source)):
            config = {**json.loads(path.read_bytes()), **unknown}
            path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        if (generation := _generation_text(hf_config)) is not None:
            (folder / GENERATION_CONFIG_FILE).write_text(generation)
        elif (own := getattr(hf_config, "generation_config", None)) is not None:
            own.save_pretrained(folder)
    if processing_class is not None:
        processing_class.save_pretrained(folder)


def _generation_text(hf_config: Any) -> str | None:
    """Returns `hf_config.generation_config` as text; None if there is no text.

    There is no text if the field is not set, or if only `save_pretrained` can write the field's value.

    Raises UnsupportedError if JSON cannot express the field.
    """
    where = "hf_config.generation_config"
    generation = getattr(hf_config, "generation_config", None)
    if generation is None:
        return None
    try:
        # Do not use save_pretrained here: it refuses values that generate() only warns about, and the whole save would
        # fail.
        if hasattr(generation, "to_json_string"):
            return str(generation.to_json_string())
        if hasattr(generation, "save_pretrained"):
            return None
        fields = field_checks.plain(generation, where)
        if not isinstance(fields, dict):
            raise UnsupportedError(f"{where} is {generation!r:.200}: set it to a GenerationConfig or a dict")
        if bad := [str(name) for name, value in fields.items() if not _is_json(value)]:
            raise UnsupportedError(
                f"{where}: {GENERATION_CONFIG_FILE} cannot hold the value of {', '.join(bad)}: set the field to a "
                "plain value"
            )
        return json.dumps(fields, indent=2) + "\n"
    except UnsupportedError:
        raise
    except (TypeError, ValueError) as error:
        raise UnsupportedError(f"{where}: {GENERATION_CONFIG_FILE} cannot hold this value: {error}") from None


def check_assets(hf_config: Any) -> None:
    """Checks in advance that `save_assets` can write a config, so that no save fails because of the config.

    `hf_config` can be None.

    Raises UnsupportedError, which names the field, if JSON cannot express a value.
    """
    if hf_config is not None:
        _check_json(hf_config)
        _generation_text(hf_config)


def unknown_fields(hf_config: Any, source: Mapping[str, bytes]) -> dict[str, Any]:
    """Returns the fields of the source's `config.json` that transformers has dropped.

    Fields that transformers keeps under another name are left out, because `hf_config` may have other values for them.
    """
    try:
        published = json_bounds.loads(source.get(CONFIG_FILE, b"{}"))
    except ValueError:
        return {}
    if not isinstance(published, dict) or published.get("model_type") != getattr(hf_config, "model_type", None):
        return {}
    return {
        name: value
        for name, value in without_quantization(published).items()
        if not hasattr(hf_config, name) and name not in _RENAMED
    }


# Fields that are not taken from the source. transformers 5 keeps the first four fields in `rope_parameters` and
# `dtype`. `auto_map` names files of code, which a trainer may leave out on purpose.
_RENAMED = ("rope_theta", "rope_scaling", "partial_rotary_factor", "torch_dtype", "transformers_version", "auto_map")


def _read_source(hf_config: Any, processing_class: Any, destination: Path, files: SourceFiles) -> None:
    folder = _source_folder(hf_config, processing_class)
    if folder is None:
        return
    try:
        files.update(side_files(folder, destination=destination, is_strict=False))
        for each in find_side_files(folder, destination=destination).left_out:
            logger.info("%s: %s", folder, each.text)
    except OSError as error:  # a folder that cannot be listed must not fail the save
        logger.warning("%s: saves leave out some of these files beside the weights: %s", folder, error)


def _source_folder(hf_config: Any, processing_class: Any) -> Path | None:
    """Returns the folder that the objects were loaded from.

    Returns None if the folder is gone, or the objects name no folder.
    """
    for loaded in (hf_config, processing_class, getattr(processing_class, "tokenizer", None)):
        name = getattr(loaded, "name_or_path", None)
        if not isinstance(name, str) or not name:
            continue
        commit = getattr(loaded, "_commit_hash", None) or getattr(loaded, "init_kwargs", {}).get("_commit_hash")
        path = Path(name)
        folder = path.parent if path.is_file() else path if path.is_dir() else cached_folder(name, commit)
        # The objects can name any folder, so check that the folder has a model's files.
        if folder is not None and any((folder / file).is_file() for file in (CONFIG_FILE, TOKENIZER_CONFIG_FILE)):
            return folder
    return None


def _add_source(own: Path, processing_class: Any, source: Mapping[str, bytes], is_export: bool) -> None:
    """Writes the source's files that the trainer's objects have not written."""
    written = {path.relative_to(own).as_posix().casefold() for path in own.rglob("*") if path.is_file()}
    others = {name: data for name, data in source.items() if name.casefold() not in written and name != CONFIG_FILE}
    has_changed = any(TOKENIZER.has(name) for name in others) and _has_new_tokens(processing_class, source)
    for name, data in others.items():
        is_stale = TOKENIZER.has(name) and (has_changed or not _same_special_tokens(name, data, processing_class))
        if not is_stale and not (is_export and QUANTIZATION.has(Path(name).name)):
            (own / name).parent.mkdir(parents=True, exist_ok=True)
            (own / name).write_bytes(data)


def _has_new_tokens(processing_class: Any, source: Mapping[str, bytes]) -> bool:
    """Returns True if the tokenizer has a token that no file of the source's tokenizer mentions."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    added: Mapping[str, int] = tokenizer.get_added_vocab() if hasattr(tokenizer, "get_added_vocab") else {}
    named = {name: data for name, data in source.items() if TOKENIZER.has(name) or name == TOKENIZER_CONFIG_FILE}
    texts = sorted(named.values(), key=len)
    forms = ((token.encode(), json.dumps(token).encode()) for token in added)
    return any(not any(form in text for text in texts for form in pair) for pair in forms)


def _same_special_tokens(name: str, data: bytes, processing_class: Any) -> bool:
    """Returns False for a file of special tokens if the tokenizer's special tokens have changed."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    live = getattr(tokenizer, "special_tokens_map", None)
    if name != _SPECIAL_TOKENS_FILE or not isinstance(live, Mapping):
        return True
    stored = json_bounds.loads(data)
    named = {role: token.get("content") if isinstance(token, dict) else token for role, token in stored.items()}
    return all(str(live.get(role)) == token for role, token in named.items() if isinstance(token, str))


def _move(path: Path, target: Path) -> Path:
    make_folder(target.parent)
    # transformers gives files all permissions that the umask allows. Keep only the permissions that the target's folder
    # gives.
    path.chmod(mode_in(target.parent, stat.S_IMODE(path.stat().st_mode) & FOLDER_MODE))
    sync_file(path)
    os.replace(path, target)
    return target


def _tokenizer_for_both_versions(config: dict[str, Any]) -> dict[str, Any]:
    """Rewrites a `tokenizer_config.json` of transformers 5 so that transformers 4 can read it, too.

    A file of transformers 4 stays unchanged, because transformers 5 can read it. AutoTokenizer of 4.57 fails on a file
    of transformers 5, because 4.57 has no class TokenizersBackend and expects extra_special_tokens to be a mapping.
    transformers 5 knows TokenizersBackend also as PreTrainedTokenizerFast (tokenization_utils_tokenizers, 5.23), and
    also reads the list of extra_special_tokens from additional_special_tokens
    (PreTrainedTokenizerBase._from_pretrained).
    """
    readable = dict(config)
    if readable.get("tokenizer_class") == "TokenizersBackend":
        readable["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(readable.get("extra_special_tokens"), list):
        readable["additional_special_tokens"] = readable.pop("extra_special_tokens")
    return readable


def write_config(
    folder: Path,
    model: HfModel,
    dtype: torch.dtype,
    has_mtp: bool,
    quantization: Mapping[str, Any] | None = None,
    more: Mapping[str, Any] | None = None,
) -> Path:
    """Durably writes the `config.json` that belongs to the weights. An existing file is replaced.

    See `config_of_weights` for the contents. `quantization` is the `quantization_config` of quantized weights, and
    `more` are fields to add.

    Raises:
        UnsupportedError: the model is a value model, and transformers has no class of value models for its
            architecture.
        OSError: the file cannot be written.
    """
    path = folder / CONFIG_FILE
    config = {**(more or {}), **config_of_weights(model, dtype, has_mtp)}
    if quantization is not None:
        config["quantization_config"] = dict(quantization)
    path.unlink(missing_ok=True)
    write_file(path, [json.dumps(config, indent=2, sort_keys=True).encode() + b"\n"])
    return path


def config_of(hf_config: Any) -> dict[str, Any]:
    """Converts a transformers config to the contents of a `config.json`, with all defaults.

    Raises UnsupportedError if `hf_config` is not a transformers config, or has a value that JSON cannot express.
    """
    if not hasattr(hf_config, "to_json_string"):
        raise UnsupportedError(f"hf_config is a {type(hf_config).__name__}: pass a transformers config")
    _check_json(hf_config)
    config = json.loads(_without_generation(hf_config).to_json_string(use_diff=False))
    assert isinstance(config, dict)
    return config


def _without_generation(hf_config: Any) -> Any:
    """Returns the config without the field `generation_config`.

    Frameworks add this field, but the field's value belongs in another file (GENERATION_CONFIG_FILE).
    """
    if getattr(hf_config, "generation_config", None) is None:
        return hf_config
    plain = copy.copy(hf_config)
    plain.__dict__.pop("generation_config", None)
    return plain


def _check_json(hf_config: Any) -> None:
    """Raises UnsupportedError, which names the field, if JSON cannot express a value of the config."""
    plain = _without_generation(hf_config)
    try:
        plain.to_json_string(use_diff=False) if hasattr(plain, "to_json_string") else None
    except TypeError as error:
        fields = [name for name, value in plain.to_dict().items() if not _is_json(value)]
        raise UnsupportedError(
            f"hf_config: config.json cannot hold the value of {', '.join(fields) or '?'} ({error}): delete the field "
            "from hf_config, or set it to plain values"
        ) from None


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
