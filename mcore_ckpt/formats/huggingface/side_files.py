"""Finds the assets to keep in a HuggingFace model's folder, and copies them unchanged.

Merges, conversions and saves copy all files of the folder and its subfolders, except files that the lists below name.
So unknown kinds of files are kept. The report of a merge or conversion names the files that are left out.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import WrittenFile
from mcore_ckpt.errors import CheckpointCorruptError
from mcore_ckpt.formats.huggingface.safetensors_files import INDEX_FILE, read_weight_map
from mcore_ckpt.io import limits
from mcore_ckpt.io.checksums import crc32
from mcore_ckpt.io.files import linked_file, make_folders, read_small, write_file
from mcore_ckpt.models import accounting

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"


@dataclass(frozen=True)
class Unwanted:
    """Files that are not copied.

    Attributes:
        names: patterns of names in lower case.
        why: the reason, for readers of this module.
        told: the words for these files in reports. Empty if nobody misses the files, because the new weights replace
            them or because they belong to no model.
        only_on_top: True if only files outside of subfolders are left out. In a subfolder, files of these names belong
            to another module, which is copied unchanged.
    """

    names: tuple[str, ...]
    why: str
    told: str = ""
    only_on_top: bool = False

    def has(self, name: str, is_on_top: bool = True) -> bool:
        """Returns True if a file or folder of this name is left out."""
        return (is_on_top or not self.only_on_top) and any(fnmatchcase(name.lower(), each) for each in self.names)


_SUFFIXES = ("safetensors", "bin", "pt", "pth", "ckpt", "h5", "msgpack", "ot")


def _with_suffixes(*stems: str) -> tuple[str, ...]:
    return tuple(f"{stem}.{suffix}" for stem in stems for suffix in _SUFFIXES)


WEIGHTS = Unwanted(
    _with_suffixes("model*", "pytorch_model*", "tf_model*", "flax_model*", "rust_model*", "consolidated*"),
    "These files are the old weights of the model, which the new weights replace.",
    only_on_top=True,
)
DESCRIPTIONS = Unwanted(
    ("*.index.json", "*.index.*.json"),
    "These files list the files of the old weights. transformers would look for the listed files, which are not there.",
    only_on_top=True,
)
NOT_LISTED = Unwanted(
    ("*.safetensors",),
    "Some programs read each such file beside the weights as a part of the model.",
    accounting.NOT_LISTED,
    only_on_top=True,
)
COPIES = Unwanted(
    (
        *_with_suffixes("consolidated*", "adapter_model*"),
        *("adapter_config.json", "*.gguf", "*.ggml", "*.llamafile", "*.onnx", "*.onnx_data*", "*.onnx.data"),
        *("*.tflite", "*.mlmodel", "*.mlpackage", "*.pte", "*.engine", "*.nemo", "*.distcp", "openvino_model*"),
    ),
    "These files hold the old weights for another program, or old adapters, and can be larger than the new weights.",
    "old weights in the form of another program or of an adapter",
)
OF_TRAINING = Unwanted(
    (*_with_suffixes("optimizer*", "scheduler*", "rng_state*"), file_names.TRACKER_FILE),
    "These files are the state of a training. Folders with a training's steps are left out, too.",
    "states and steps of a training",
)
QUANTIZATION = Unwanted(
    ("hf_quant_config.json", "quant*.json", "kv_cache_scales.json"),
    "These files say how the old weights are quantized. With them, servers would read plain weights as quantized "
    "weights. The files are kept if the new weights are quantized in the same way.",
    "descriptions of how the old weights were quantized",
)
BOOKKEEPING = Unwanted(
    (".*", "__pycache__", "*.pyc", "*.incomplete"),
    "These files belong to git, to the hub's client, to Python or to an editor, not to the model.",
)
LEFT_OUT = (BOOKKEEPING, WEIGHTS, DESCRIPTIONS, COPIES, OF_TRAINING, NOT_LISTED)
"""Files that are never copied. Exports whose weights are quantized in another way, or not at all, also leave out
`QUANTIZATION`.
"""

# The files that belong to a checkpoint of megatron or of this package. Other files in a checkpoint's folder, such as
# config.json and a tokenizer, can be assets.
_OF_CHECKPOINTS = (
    *(file_names.MANIFEST_FILE, "metadata.json", "run_config.yaml", "latest_*.txt", "*.distcp"),
    *_with_suffixes("*"),
)
_OF_RANKS = ("mp_rank_*", "*_world_size_*_rank_*.pt")
_MEGATRON_STEP = re.compile(r"iter_[0-9]{7}")
_MOST_DEPTH = 8
_SAME_NAMES = "files whose names differ from another file's only in upper and lower case"
_UNFIT = "files that cannot be copied"
_TOO_MUCH = "files beyond the limits on number and size"


@dataclass(frozen=True)
class SideFiles:
    """The assets of a model.

    Attributes:
        names: the paths of the files to copy, relative to the folder.
        left_out: the files that are not copied, by reason, except files that nobody misses.
        warnings: messages about files that are left out unexpectedly.
    """

    folder: Path
    names: tuple[str, ...]
    left_out: tuple[accounting.LeftOut, ...]
    warnings: tuple[str, ...]


def find_side_files(
    folder: Path, *, destination: Path, without: Collection[str] = (), quantized: bool = True
) -> SideFiles:
    """Finds a model's assets by their names and sizes. Opens no file except the index.

    Folders that hold checkpoints or contain `destination` are not entered, because a model's folder can have a
    training's checkpoints below it. Links to folders are not followed.

    Args:
        destination: where the files will be written.
        without: the paths of files that the caller writes itself.
        quantized: whether to keep the files that say how the old weights are quantized.

    Raises OSError: a folder cannot be listed.
    """
    kinds = LEFT_OUT if quantized else (*LEFT_OUT, QUANTIZATION)
    names: dict[str, str] = {}
    left_out: dict[str, list[str]] = {}
    warnings: list[str] = []
    total = 0
    known = {*without, *_listed(folder)}
    for name, kind in _entries(folder, "", Path(os.path.realpath(destination)), kinds):
        if name in known:
            continue
        if kind is not None:
            left_out.setdefault(kind.told, []).append(name)
        elif name.casefold() in names:  # a manifest must not list two paths that are one file on some file systems
            left_out.setdefault(_SAME_NAMES, []).append(name)
        elif problem := _problem(folder / name):
            left_out.setdefault(_UNFIT, []).append(name)
            shown = str(folder / name) if name.isprintable() else repr(str(folder / name))
            warnings.append(f"{shown}: is left out, because it {problem}")
        elif (total := total + _size(folder / name)) > limits.HF_ASSETS_BYTES or len(names) >= limits.HF_ASSETS:
            if _TOO_MUCH not in left_out:
                warnings.append(
                    f"{folder}: has more than {limits.HF_ASSETS} files or {limits.HF_ASSETS_BYTES} bytes beside its "
                    f"weights: {name} and all later files are left out: move the files that are not part of the model "
                    "to another folder"
                )
            left_out.setdefault(_TOO_MUCH, []).append(name)
        else:
            names[name.casefold()] = name
    found = tuple(accounting.LeftOut(told, tuple(which)) for told, which in left_out.items() if told)
    return SideFiles(folder, tuple(names.values()), found, tuple(warnings))


def side_files(
    folder: Path, *, destination: Path, without: Collection[str] = (), is_strict: bool = True, quantized: bool = True
) -> Iterator[tuple[str, bytes]]:
    """Yields the path and the bytes of each file that `find_side_files` finds. Executes no code.

    Links into the hub's cache are followed. If `is_strict` is False, a file that cannot be read is left out with a
    warning, so that a save is not lost.

    Raises OSError: a file cannot be read, or a link leads out of the model.
    """
    found = find_side_files(folder, destination=destination, without=without, quantized=quantized)
    for warning in found.warnings:
        logger.warning("%s", warning)
    for name in found.names:
        try:
            yield name, _read(folder, name)
        except OSError as error:
            if is_strict:
                raise
            logger.warning("%s: is left out, because it cannot be read: %s", folder / name, error)


def not_read(folder: Path, read: Container[str]) -> tuple[accounting.LeftOut, ...]:
    """Returns the safetensors files of a model's folder that were not read, but may belong to the model."""
    files = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in read and not path.is_dir())
    return (accounting.LeftOut(accounting.NOT_LISTED, tuple(files)),) if files else ()


def copy_side_files(source: Path, folder: Path, without: Collection[str] = (), quantized: bool = True) -> list[Path]:
    """Copies the files that `side_files` yields, durably, and returns their new paths. Raises OSError."""
    written = []
    for name, data in side_files(source, destination=folder, without=without, quantized=quantized):
        make_folders(folder, name)
        write_file(folder / name, [data])
        written.append(folder / name)
    return written


def written_side_files(folder: Path, paths: Collection[Path]) -> list[WrittenFile]:
    """Returns the manifest's records of files below a role's `huggingface/`."""
    written = []
    for path in sorted(set(paths)):
        data = path.read_bytes()
        name = f"{file_names.HUGGINGFACE_DIR}/{path.relative_to(folder).as_posix()}"
        written.append(WrittenFile(name, "huggingface", len(data), crc32(data)))
    return written


def warn_of_missing_code(folder: Path, config: Mapping[str, Any], warn: Callable[..., None] = logger.warning) -> None:
    """Warns if a folder lacks code that `auto_map` of its `config.json` names."""
    named = config.get("auto_map") or {}
    for value in named.values() if isinstance(named, Mapping) else ():
        for name in value if isinstance(value, list) else [value]:
            # transformers loads "repository--module.Class" from that repository of the hub, so the folder need not have
            # this code.
            if isinstance(name, str) and "--" not in name and not (folder / f"{name.partition('.')[0]}.py").exists():
                warn(
                    "%s: auto_map names the code %s, which is not in the folder: if transformers itself has the "
                    "architecture, load the model without trust_remote_code; otherwise add the file",
                    *(folder / CONFIG_FILE, name),
                )
                return


def _listed(folder: Path) -> Collection[str]:
    """Returns the files of weights that the model's index lists."""
    try:
        return read_weight_map(folder / INDEX_FILE).values()
    except (OSError, CheckpointCorruptError):  # no weights are read here, so the index may be missing or damaged
        return ()


def _entries(
    folder: Path, below: str, destination: Path, kinds: Sequence[Unwanted]
) -> Iterator[tuple[str, Unwanted | None]]:
    """Yields the path of each file, with the `Unwanted` that leaves the file out, or None if the file is kept.

    Files in subfolders come last. For a folder that an `Unwanted` leaves out, only the folder's path is yielded.
    """
    with os.scandir(folder / below) as found:
        entries = sorted(found, key=lambda entry: (entry.is_dir(follow_symlinks=False), entry.name))
    names = {entry.name for entry in entries}
    is_checkpoint = _is_checkpoint(names)
    if below and (is_checkpoint or file_names.TRACKER_FILE in names):
        yield below, OF_TRAINING
        return
    for entry in entries:
        path, is_folder = below + entry.name, entry.is_dir(follow_symlinks=False)
        kind = next((each for each in kinds if each.has(entry.name, not below)), None)
        if is_checkpoint and (is_folder or any(fnmatchcase(entry.name, each) for each in _OF_CHECKPOINTS)):
            continue
        if is_folder and destination.is_relative_to(os.path.realpath(entry.path)):
            continue
        if is_folder and kind is None and _is_step(entry.name):
            kind = OF_TRAINING
        if is_folder and kind is None and below.count("/") < _MOST_DEPTH:
            yield from _entries(folder, f"{path}/", destination, kinds)
        elif kind is not None or not is_folder:
            yield path, kind


def _is_step(name: str) -> bool:
    return file_names.parse_step(name) is not None or _MEGATRON_STEP.fullmatch(name) is not None


def _is_checkpoint(names: Collection[str]) -> bool:
    """Returns True if a folder with these names in it is a checkpoint."""
    own = {file_names.HUGGINGFACE_DIR, file_names.OPTIMIZER_DIR, file_names.RNG_DIR}
    return (
        ".metadata" in names
        or (file_names.MANIFEST_FILE in names and not own.isdisjoint(names))
        or any(fnmatchcase(name, each) for name in names for each in _OF_RANKS)
    )


def _problem(path: Path) -> str | None:
    """Returns why a file cannot be published; None if it can be published."""
    if "\\" in path.name or not str(path).isprintable():
        return "has a name with a backslash or with unprintable characters"
    if path.is_symlink() and not path.exists():
        return f"is a link to {os.readlink(path)}, which does not exist"
    if path.is_dir():
        return "is a link to a folder"
    if not path.is_file():
        return "is not a regular file"
    if (size := _size(path)) > limits.HF_ASSET_BYTES:
        return (
            f"has {size} bytes, more than the limit of {limits.HF_ASSET_BYTES} for a file beside weights: copy the "
            "file by hand if it belongs to the model"
        )
    return None


def _size(path: Path) -> int:
    return path.stat().st_size


def _read(folder: Path, name: str) -> bytes:
    """Reads a file that will be published.

    Raises OSError if the file cannot be read, or a link leads out of the model.
    """
    try:
        return read_small(linked_file(folder, name), limits.HF_ASSET_BYTES)
    except CheckpointCorruptError as error:
        raise OSError(errno.EINVAL, str(error), str(folder / name)) from None
