"""Says which files of a HuggingFace model's folder stand beside its weights, and copies them as they are.

Merges, conversions and saves take all files of the folder, in subfolders too, except those that the lists below name.
So a file of a kind that nobody has thought of is kept, and nothing is invented that the folder does not have.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import WrittenFile
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.io import limits
from mcore_ckpt.io.checksums import crc32
from mcore_ckpt.io.files import linked_file, make_folders, read_small, write_file

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"


@dataclass(frozen=True)
class Unwanted:
    """Files that are not taken. `names` are patterns of names in lower case, and `why` is the reason."""

    names: tuple[str, ...]
    why: str

    def has(self, name: str) -> bool:
        """Returns True if a file or folder of this name is left out."""
        return any(fnmatchcase(name.lower(), pattern) for pattern in self.names)


WEIGHTS = Unwanted(
    (
        *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.npz", "*.ot", "*.distcp"),
        *("*.gguf", "*.ggml", "*.llamafile", "*.onnx", "*.onnx_data*", "*.onnx.data", "*.tflite", "*.mlmodel"),
        *("*.mlpackage", "*.pte", "*.engine", "*.nemo", "openvino_model*"),
    ),
    "They are weights, or an optimizer's state: the new weights replace them. Those of other programs hold the old "
    "model, and can be larger than the new one.",
)
DESCRIPTIONS = Unwanted(
    ("*.index.json", "*.index.*.json", "adapter_config.json"),
    "They say in which files the old weights are. transformers would look for files that are not there.",
)
QUANTIZATION = Unwanted(
    ("hf_quant_config.json", "quant*_config.json", "quanto_qmap.json", "kv_cache_scales.json"),
    "They say how the old weights are quantized. Servers would read plain weights as quantized ones. They are kept if "
    "the new weights are quantized in the same way.",
)
BOOKKEEPING = Unwanted(
    (".*", "__pycache__", "*.pyc", "*.incomplete"),
    "They belong to git, to the hub's client, to Python or to an editor, not to the model.",
)
LEFT_OUT = (WEIGHTS, DESCRIPTIONS, BOOKKEEPING)
"""What is never taken. Exports of other weights also leave out `QUANTIZATION`."""

# Files of a checkpoint of megatron or of this package, which can have config.json and a tokenizer beside them.
_OF_CHECKPOINTS = (file_names.MANIFEST_FILE, "metadata.json", "run_config.yaml", "latest_*.txt")
_MEGATRON_STEP = re.compile(r"iter_[0-9]{7}|release")
_MOST_DEPTH = 8


def side_files(
    folder: Path, *, destination: Path, without: Collection[str] = (), is_strict: bool = True
) -> Iterator[tuple[str, bytes]]:
    """Yields the path of each file beside the weights, relative to the folder, and its bytes. It executes no code.

    Links into the hub's cache are followed. Folders that hold checkpoints are not entered, and neither are those that
    `destination` is in, because a model's folder can have a training's checkpoints below it.

    Args:
        folder: the folder of the model.
        destination: where the files will be written.
        without: the paths of files to leave out.
        is_strict: True to raise for a file that cannot be read; False to leave it out with a warning, as a save must,
            which would otherwise be lost.

    Raises:
        OSError: a file cannot be read, or a link leads out of the model.
    """
    total, seen = 0, set[str]()
    for name in _names(folder, "", Path(os.path.realpath(destination))):
        # A manifest must not list two paths that some file systems take for one.
        if name in without or name.casefold() in seen:
            continue
        try:
            data = _read(folder, name)
        except OSError as error:
            if is_strict:
                raise
            logger.warning("%s: is left out, because it cannot be read: %s", folder / name, error)
            continue
        total += len(data or b"")
        if len(seen) >= limits.HF_ASSETS or total > limits.HF_ASSETS_BYTES:
            logger.warning(
                "%s: has more than %d files or %d bytes beside its weights: %s and what follows it are left out; move "
                "what is not part of the model to another folder",
                *(folder, limits.HF_ASSETS, limits.HF_ASSETS_BYTES, name),
            )
            return
        if data is not None:
            seen.add(name.casefold())
            yield name, data


def copy_side_files(source: Path, folder: Path, without: Collection[str] = (), quantized: bool = True) -> list[Path]:
    """Copies the files beside the weights durably. Raises OSError as `side_files` does.

    Args:
        source: the folder of the model.
        folder: where to copy.
        without: the paths of files that the caller writes itself.
        quantized: False to leave out the files that say how the old weights are quantized.

    Returns:
        The paths of the files written.
    """
    written = []
    for name, data in side_files(source, destination=folder, without=without):
        if quantized or not QUANTIZATION.has(Path(name).name):
            make_folders(folder, name)
            write_file(folder / name, [data])
            written.append(folder / name)
    return written


def written_side_files(folder: Path, paths: Collection[Path]) -> list[WrittenFile]:
    """Returns the records for the manifest of files below a role's `huggingface/`."""
    written = []
    for path in sorted(set(paths)):
        data = path.read_bytes()
        name = f"{file_names.HUGGINGFACE_DIR}/{path.relative_to(folder).as_posix()}"
        written.append(WrittenFile(name, "huggingface", len(data), crc32(data)))
    return written


def warn_of_missing_code(folder: Path, config: Mapping[str, Any], warn: Callable[..., None] = logger.warning) -> None:
    """Warns of code that `auto_map` of a `config.json` names, and that its folder does not have."""
    named = config.get("auto_map") or {}
    for value in named.values() if isinstance(named, Mapping) else ():
        for name in value if isinstance(value, list) else [value]:
            # transformers loads "repository--module.Class" from that repository of the hub.
            if isinstance(name, str) and "--" not in name and not (folder / f"{name.partition('.')[0]}.py").exists():
                warn(
                    "%s: auto_map names the code %s, which is not in the folder: transformers can load the model "
                    "without trust_remote_code if it has the architecture itself; otherwise add the file",
                    *(folder / CONFIG_FILE, name),
                )
                return


def _names(folder: Path, below: str, destination: Path) -> Iterator[str]:
    """Yields the paths of the files to take, those of subfolders last."""
    with os.scandir(folder / below) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    is_checkpoint = _has_checkpoint({entry.name for entry in entries})
    if below and is_checkpoint:
        return
    taken = [entry for entry in entries if not any(each.has(entry.name) for each in LEFT_OUT)]
    for entry in taken:
        if is_checkpoint and any(fnmatchcase(entry.name, pattern) for pattern in _OF_CHECKPOINTS):
            continue
        if not entry.is_dir(follow_symlinks=False):
            yield below + entry.name
    if is_checkpoint or below.count("/") >= _MOST_DEPTH:
        return
    for entry in taken:
        # A link to a folder can lead back to a folder above it.
        if entry.is_dir(follow_symlinks=False) and not destination.is_relative_to(os.path.realpath(entry.path)):
            yield from _names(folder, f"{below}{entry.name}/", destination)


def _has_checkpoint(names: set[str]) -> bool:
    """Returns True if a folder with these names in it is a checkpoint, or holds steps."""
    own = {file_names.HUGGINGFACE_DIR, file_names.OPTIMIZER_DIR, file_names.RNG_DIR}
    return (
        ".metadata" in names
        or file_names.TRACKER_FILE in names
        or (file_names.MANIFEST_FILE in names and not own.isdisjoint(names))
        or any(file_names.parse_step(name) is not None or _MEGATRON_STEP.fullmatch(name) for name in names)
    )


def _read(folder: Path, name: str) -> bytes | None:
    """Reads a file that will be published. Returns None for what is no file of a model, which it warns of.

    Raises OSError, also if a link leads to a file outside of the model.
    """
    path = folder / name
    if not path.is_file() or "\\" in name or not name.isprintable():
        logger.warning("%r: is left out, because it is no regular file with a plain name", str(path))
        return None
    size = path.stat().st_size
    if size > limits.HF_ASSET_BYTES:
        logger.warning(
            "%s: is left out, because it has %d bytes, more than the %d of a file beside weights: copy it by hand if "
            "it belongs to the model",
            *(path, size, limits.HF_ASSET_BYTES),
        )
        return None
    try:
        return read_small(linked_file(folder, name), limits.HF_ASSET_BYTES)
    except CheckpointCorruptError as error:
        raise OSError(errno.EINVAL, str(error), str(path)) from None
