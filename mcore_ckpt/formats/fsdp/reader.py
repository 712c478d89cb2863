"""Reads FSDP shards as verl writes them: one file of DTensors per rank, under HuggingFace names.

The placements of a DTensor say which part of the tensor is in the file. `torch_save_files.py` reads the pickles without
torch's classes, because these classes need a process group. Only the wanted bytes are read, never a whole file.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError, CheckpointNotFoundError, UnsupportedError
from mcore_ckpt.formats.contract import CheckpointReader, TensorInfo, weights_of
from mcore_ckpt.formats.fsdp.adapters import (
    BASE_LAYER,
    ORIGINAL_MODULE,
    adapter_name_of,
    check_one_adapter,
    is_peft_adapter,
    other_adapters,
)
from mcore_ckpt.formats.fsdp.dtensors import DTensorPlacement, placement_of
from mcore_ckpt.formats.fsdp.kind import FSDP_FILE
from mcore_ckpt.formats.huggingface.reader import without_doubles
from mcore_ckpt.formats.locate import same_bytes
from mcore_ckpt.formats.shard_reader import ShardReader, stored_shard
from mcore_ckpt.formats.torch_save_files import PtDTensor, PtTensor, as_state_dict, as_tensor, read_pt
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io import limits
from mcore_ckpt.io.files import read_small
from mcore_ckpt.models.accounting import LeftOut
from mcore_ckpt.models.architecture import Architecture, HfModel, ModelFacts
from mcore_ckpt.models.architectures.common import facts_of
from mcore_ckpt.models.config_fields import HfConfig
from mcore_ckpt.models.low_rank import PEFT_PREFIX
from mcore_ckpt.models.mapping import HfTensor, check_names, hf_tensors_in, whole_tensor
from mcore_ckpt.models.quantization import quantization_of
from mcore_ckpt.models.registry import known_architectures, model_from_config
from mcore_ckpt.models.table import Table
from mcore_ckpt.sharding.plan import StoredShard
from mcore_ckpt.sharding.regions import Region, Shape

# The attribute in which nearly every transformers model holds the model without its head.
_ROOT = "model"
_CONFIG_FILE = "fsdp_config.json"
# The prefixes that wrappers add to the names of the model's modules: FSDP1, torch.compile, activation checkpointing.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)\.")
# Tensor names of adapters that are neither LoRA nor DoRA. These names show such an adapter even in a file without the
# base model's tensors.
_OTHER_ADAPTERS = re.compile(r".*\.(?:lora_|ia3_|modules_to_save\.).*")

_MOST_RANKS = 1_000_000
_MOST_LAYERS = 10_000
# The two weights that have a row for each token, by the names that nearly every transformers model uses.
_OF_TOKENS = (".embed_tokens.weight", ".lm_head.weight")


@dataclass(frozen=True)
class _Found:
    """A tensor in one rank's file. `placement` is None if the tensor is not cut. Only `local` differs between ranks."""

    dtype: torch.dtype
    shape: Shape
    placement: DTensorPlacement | None
    local: PtTensor = field(compare=False)


def open_fsdp(folder: Path) -> ShardReader:
    """Opens `model_world_size_{W}_rank_{r}.pt`.

    The reader lists tensors by HuggingFace names, in the order of rank 0's file.

    Raises:
        CheckpointNotFoundError: the folder has no FSDP shards.
        CheckpointCorruptError: a rank's file is missing or damaged, or the ranks' files do not fit together.
        UnsupportedError: the model has placements that cannot be read, unmerged adapters that are neither LoRA nor
            DoRA, or several sets of adapters.
    """
    paths = _rank_files(folder)
    first = _read(paths[0], 0)
    shards: dict[str, dict[Region, StoredShard]] = {name: {} for name in first}
    for rank, path in enumerate(paths):
        found = first if rank == 0 else _read(path, rank)
        _check_same(paths[0], first, path, found)
        for name, tensor in found.items():
            region = _region(path, name, tensor, rank)
            # Keep only the first replica of each region, and one empty shard of a tensor without elements.
            if region.numel or 0 in tensor.shape:
                shards[name].setdefault(region, stored_shard(name, tensor.local, region))
    held = {name: tuple(by_region.values()) for name, by_region in shards.items()}
    infos = {name: TensorInfo(tensor.dtype, tensor.shape) for name, tensor in first.items()}
    return ShardReader(folder, infos, held.__getitem__)


def read_copied_model(config: HfConfig) -> HfModel:
    """Describes the model of a config, as `model_from_config` does, but accepts an architecture without a table.

    FSDP shards already are HuggingFace's tensors, so no table is needed to read them. For an architecture without a
    table, the facts come only from the config: whether the embeddings are tied, and of which kind the output is.

    Raises:
        UnsupportedError: the architecture has a table and the config cannot be read, or the config describes quantized
            weights, although FSDP shards are never quantized.
    """
    if quantization_of(config) is not None:
        raise UnsupportedError(
            "config.json: quantization_config is set, but FSDP shards are not quantized: remove the field if the model "
            "was dequantized before the training"
        )
    known = known_architectures().get(str(config.get("model_type")))
    try:
        return model_from_config(config)
    except UnsupportedError:
        if known is not None and known.table.layer:
            raise
        classes = tuple(str(name) for name in config.get("architectures") or ())
        vocabulary = config.get("vocab_size")
        sizes = {"vocab": vocabulary} if isinstance(vocabulary, int) else {}
        count = config.get("num_hidden_layers")
        layers = (frozenset[str](),) * (count if isinstance(count, int) and 0 < count <= _MOST_LAYERS else 0)
        facts = ModelFacts(sizes, frozenset(facts_of(config)), layers)
        architecture = Architecture(str(config.get("model_type")), classes, Table((), ()), lambda _: facts)
        return HfModel(architecture, config, facts, architecture.table.ignored)


def fsdp_tensors(reader: CheckpointReader, model: HfModel) -> tuple[list[HfTensor], tuple[LeftOut, ...]]:
    """Lists the tensors to export, in the reader's order, with unchanged values and the names that files use.

    The list contains neither ignored tensors nor a tied head nor adapters. The second result tells which weights are
    not in the list. If the architecture of `model` (from `read_copied_model`) has a table, the tensors must have the
    table's names and shapes.

    Raises:
        CheckpointMismatchError: a tensor is missing, is unknown or has another shape, or a tied head differs from the
            embedding.
    """
    infos = {name: info for name, info in weights_of(reader).items() if not is_peft_adapter(name)}
    table = model.architecture.table
    stored = without_doubles(lambda name: table.spelled(_name_in_files(name, table)), infos)
    head, embedding, copies = stored.get(table.hf_head), stored.get(table.hf_embedding), set[str]()
    if model.is_tied and head is not None and embedding is not None:
        _check_tied(reader, head, embedding, model.architecture.tied_field)
        copies.add(table.hf_head)
    written = [
        whole_tensor(name, own, infos[own].shape)
        for name, own in stored.items()
        if not model.ignores(name) and name not in copies
    ]
    if table.model or table.layer:
        return written, _check_table(model, {name: infos[own] for name, own in stored.items()}, copies)
    rows = model.sizes.get("vocab")
    for tensor in written:
        if rows is not None and f".{tensor.name}".endswith(_OF_TOKENS) and tensor.shape[0] != rows:
            raise CheckpointMismatchError(
                f"tensor {tensor.name}: has {tensor.shape[0]} rows, but vocab_size of config.json is {rows}: use the "
                "config.json of this model"
            )
    return written, check_names(model, written, stored, "the checkpoint", copies)


def _name_in_files(name: str, table: Table) -> str:
    """Returns the name that `save_pretrained` gives a tensor.

    The names of Nemotron-H's tensors begin with "backbone" in files, but with "model" in transformers 5 itself
    (`conversion_mapping.py`).
    """
    root = table.hf.partition(".")[0]
    return name if root == _ROOT or not name.startswith(f"{_ROOT}.") else f"{root}.{name.removeprefix(f'{_ROOT}.')}"


def _check_table(model: HfModel, infos: Mapping[str, TensorInfo], copies: Container[str]) -> tuple[LeftOut, ...]:
    wanted = hf_tensors_in(model, infos)
    left_out = check_names(model, wanted, infos, "the checkpoint", copies)
    for tensor in wanted:
        if infos[tensor.name].shape != tensor.shape:
            raise CheckpointMismatchError(
                f"tensor {tensor.name}: has shape {list(infos[tensor.name].shape)}, but config.json requires "
                f"{list(tensor.shape)}: use the config.json of this model"
            )
    return left_out


def _check_tied(reader: CheckpointReader, head: str, embedding: str, field: str) -> None:
    # A tied model's state dict has the embedding under both names. The export leaves out the head, so the head must
    # equal the embedding.
    if not same_bytes(reader, head, embedding):
        raise CheckpointMismatchError(
            f"config.json declares tied embeddings ({field}), but {head} differs from "
            f"{embedding}: set {field} to false in config.json"
        )


def _rank_files(folder: Path) -> list[Path]:
    """Returns the file of each rank."""
    found: dict[int, dict[int, Path]] = {}  # by world size and rank
    for path in sorted(folder.glob("model_world_size_*_rank_*.pt")):
        if match := FSDP_FILE.fullmatch(path.name):
            found.setdefault(int(match[1]), {})[int(match[2])] = path
    if not found:
        raise CheckpointNotFoundError(f"{folder}: has no model_world_size_*_rank_*.pt, so it is not an FSDP checkpoint")
    configured = _configured_world_size(folder / _CONFIG_FILE)
    if configured is None and len(found) > 1:
        raise CheckpointCorruptError(
            f"{folder}: has files of world sizes {sorted(found)}, but no {_CONFIG_FILE} that says which world size to "
            "read: move the older checkpoint's files to another folder"
        )
    world = configured if configured is not None else next(iter(found))
    ranks = found.get(world, {})
    missing = [rank for rank in range(world) if rank not in ranks]
    if missing:
        described = ", ".join(f"{len(each)} files of world size {size}" for size, each in sorted(found.items()))
        raise CheckpointCorruptError(
            f"{folder}: wanted model_world_size_{world}_rank_0.pt to ..._{world - 1}.pt, but the files of ranks "
            f"{missing[:8]} of {world} are missing; found {described}. If the missing files are on other nodes' disks, "
            "copy them here"
        )
    if max(ranks) >= world:
        raise CheckpointCorruptError(
            f"{folder}: has model_world_size_{world}_rank_{max(ranks)}.pt, but a world of {world} has no such "
            "rank: move the file to another folder"
        )
    return [ranks[rank] for rank in range(world)]


def _configured_world_size(path: Path) -> int | None:
    try:
        size: Any = fields.parse(read_small(path, limits.HF_JSON_BYTES))["world_size"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointCorruptError(f"{path}: cannot be read: {error!r}") from None
    if type(size) is not int or not 1 <= size <= _MOST_RANKS:
        raise CheckpointCorruptError(f"{path}: world_size is {fields.shown(size)}, not a positive number")
    return size


def _read(path: Path, rank: int) -> dict[str, _Found]:
    state = as_state_dict(read_pt(path), str(path))
    names = [_WRAPPERS.sub("", str(key)) for key in state]
    if others := other_adapters(names):
        raise _other_adapters(path, others[0])
    check_one_adapter(names, path, "delete the others (peft's delete_adapter()) and save again")
    found = {}
    for key, value in state.items():
        name = _bare(path, str(key))
        if name in found:
            raise CheckpointCorruptError(f"{path}: tensor {name}: is stored twice, once as {key}")
        if isinstance(value, PtDTensor):
            placement = placement_of(value, name)
            if rank not in placement.ranks:
                raise CheckpointCorruptError(
                    f"{path}: tensor {name}: the tensor's mesh has the ranks {placement.ranks}, but not rank {rank}, "
                    "which saved this file"
                )
            found[name] = _Found(value.local.dtype, value.shape, placement, value.local)
        else:
            tensor = as_tensor(value, f"{path}: {name}")
            found[name] = _Found(tensor.dtype, tensor.shape, None, tensor)
    return found


def _bare(path: Path, key: str) -> str:
    name = _WRAPPERS.sub("", key)
    if (adapter := adapter_name_of(name)) is not None:
        name, _ = adapter
    elif _OTHER_ADAPTERS.fullmatch(name):
        raise _other_adapters(path, name)
    return name.removeprefix(PEFT_PREFIX).replace(BASE_LAYER, ".").replace(ORIGINAL_MODULE, ".")


def _other_adapters(path: Path, name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{path}: tensor {name}: the model has unmerged adapters that are neither LoRA nor DoRA: merge them (peft's "
        "merge_and_unload()) and save the merged model"
    )


def _check_same(first_path: Path, first: Mapping[str, _Found], path: Path, found: Mapping[str, _Found]) -> None:
    for name in (*first, *found):
        here, there = found.get(name), first.get(name)
        if here is None or here != there:
            raise CheckpointCorruptError(
                f"{path}: tensor {name}: is {_describe_tensor(here)}, but in {first_path.name} it is "
                f"{_describe_tensor(there)}: are they files of different checkpoints?"
            )


def _describe_tensor(tensor: _Found | None) -> str:
    if tensor is None:
        return "missing"
    cut = "not cut" if tensor.placement is None else f"on mesh {tensor.placement.mesh} along {tensor.placement.axes}"
    return f"{list(tensor.shape)} {tensor.dtype} {cut}"


def _region(path: Path, name: str, tensor: _Found, rank: int) -> Region:
    if tensor.placement is None:
        return Region.whole(tensor.shape)
    region = tensor.placement.region(tensor.shape, rank)
    if region.local_shape != tensor.local.shape:
        raise CheckpointCorruptError(
            f"{path}: tensor {name}: rank {rank} has {list(tensor.local.shape)}, but the tensor's placement requires "
            f"{list(region.local_shape)} of {list(tensor.shape)}"
        )
    return region
