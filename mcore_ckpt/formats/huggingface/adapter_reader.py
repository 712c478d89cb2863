"""Reads the folder of an adapter in PEFT's form as Megatron's tensors."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mcore_ckpt.errors import CheckpointCorruptError, CheckpointMismatchError, CheckpointNotFoundError, UnsupportedError
from mcore_ckpt.formats.fsdp.adapters import adapter_name_of, check_one_adapter
from mcore_ckpt.formats.huggingface.adapter_folder import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from mcore_ckpt.formats.huggingface.reader import FolderContents, HuggingFaceReader
from mcore_ckpt.formats.huggingface.safetensors_files import INDEX_FILE, SINGLE_FILE, HfStored, read_file
from mcore_ckpt.formats.huggingface.side_files import CONFIG_FILE
from mcore_ckpt.formats.huggingface.stored_weights import DequantizingReader
from mcore_ckpt.formats.locate import same_bytes
from mcore_ckpt.io import json_fields as fields
from mcore_ckpt.io import limits
from mcore_ckpt.io.files import read_small
from mcore_ckpt.models.accounting import IGNORED, account, matching, some_of
from mcore_ckpt.models.architecture import read_config
from mcore_ckpt.models.low_rank import PEFT_PREFIX
from mcore_ckpt.models.mapping import HfTensor, hf_tensors
from mcore_ckpt.models.peft_adapters import peft_tensors, with_adapters
from mcore_ckpt.models.quantization import without_quantization
from mcore_ckpt.sharding.regions import Shape

# The allowed values of fields in `adapter_config.json`. Other values would change what the adapter computes.
_ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "target_parameters": (None, []),
    "alpha_pattern": (None, {}),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    # Other initializations change the base model's weights: PiSSA and OLoRA, for example, subtract the initial adapter.
    "init_lora_weights": (None, True, False, "gaussian", "orthogonal", "eva"),
    **dict.fromkeys(
        (
            *("alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "velora_config"),
            *("monteclora_config", "kasa_config", "corda_config"),
        ),
        (None, False, [], {}),
    ),
}


def is_adapter_folder(folder: Path) -> bool:
    """Returns True if a folder has an adapter in PEFT's form, and no model."""
    return (folder / ADAPTER_CONFIG_FILE).is_file() and not any(
        (folder / name).exists() for name in (SINGLE_FILE, INDEX_FILE)
    )


def read_adapter_contents(folder: Path, base: Path | None = None) -> FolderContents:
    """Reads an adapter's configuration and header, and the configuration of the base model.

    Args:
        folder: the folder with `adapter_config.json` and `adapter_model.safetensors`.
        base: the folder with the `config.json` of the base model. None takes the adapter's folder if that folder has a
            `config.json`, otherwise the folder that `adapter_config.json` names as `base_model_name_or_path`.

    Raises:
        CheckpointNotFoundError: there is no `config.json` of the base model.
        CheckpointCorruptError: a file is missing or damaged.
        UnsupportedError: the adapter is not a LoRA or DoRA adapter of linear layers.
    """
    path = folder / ADAPTER_CONFIG_FILE
    try:
        adapter = fields.parse(read_small(path, limits.HF_JSON_BYTES))
    except (OSError, fields.FieldError) as error:
        raise CheckpointCorruptError(f"{path}: cannot be read: {error}") from None
    for name, allowed in _ALLOWED.items():
        if name in adapter and adapter[name] not in allowed:
            raise UnsupportedError(f"{path}: {name} is {fields.shown(adapter[name])}, but this value is not supported")
    tensors = read_file(folder / ADAPTER_FILE)
    names = (tensor.name for tensor in tensors)
    check_one_adapter(names, folder / ADAPTER_FILE, "save each set in its own folder")
    stored = {tensor.name: tensor for tensor in map(_with_plain_name, tensors)}
    size = (folder / ADAPTER_FILE).stat().st_size
    return FolderContents(folder, _base_config(folder, adapter, base), stored, {ADAPTER_FILE: size}, adapter)


def _with_plain_name(tensor: HfStored) -> HfStored:
    """Removes the adapter's name, such as "default", from a tensor's name.

    Other programs may write the adapter's name into the names of tensors.
    """
    found = adapter_name_of(tensor.name)
    return tensor if found is None else replace(tensor, name=found[0])


def _base_config(folder: Path, adapter: Mapping[str, Any], base: Path | None) -> dict[str, Any]:
    named = adapter.get("base_model_name_or_path")
    if base is None and not (folder / CONFIG_FILE).is_file() and isinstance(named, str) and named:
        # A model on the hub is downloaded only if the caller names the model, because a folder's contents must not
        # cause a download.
        base = Path(named)
    found = folder if base is None else base
    if not (found / CONFIG_FILE).is_file():
        raise CheckpointNotFoundError(
            f"{found / CONFIG_FILE}: is missing, so the architecture of the adapter's base model is not known: set "
            "base= to a folder that has this file, or to the name of a model on the hub"
        )
    return without_quantization(read_config(found))  # adapters are not quantized


def effective_alpha(adapter: Mapping[str, Any], path: Path) -> float:
    """Returns the number alpha for which alpha / r is the scale of an adapter of rank r.

    Raises:
        CheckpointCorruptError: `adapter_config.json` lacks the alpha or the rank.
        UnsupportedError: `use_rslora` is set together with `rank_pattern`.
    """
    try:
        alpha, rank = fields.get_number(adapter, "lora_alpha"), fields.get_int(adapter, "r")
    except fields.FieldError as error:
        raise CheckpointCorruptError(f"{path / ADAPTER_CONFIG_FILE}: {error}") from None
    if not adapter.get("use_rslora"):
        return alpha
    if adapter.get("rank_pattern"):
        raise UnsupportedError(
            f"{path / ADAPTER_CONFIG_FILE}: has use_rslora and a rank_pattern, but these are not supported together"
        )
    return alpha * math.sqrt(rank)


class AdapterReader(HuggingFaceReader):
    """Reads an adapter in PEFT's form under the names of Megatron-Bridge's adapters.

    Megatron's adapter of a fused layer has one A for several HuggingFace layers. The folder has a copy of A for each of
    these layers.

    Args:
        adapters: the global shapes of all tensors of the model's adapters, by name.

    Raises:
        CheckpointMismatchError: the folder lacks an adapter, has an unknown adapter, or has an adapter of another
            shape.
        UnsupportedError: the architecture is not supported, or PEFT has no names for the model's adapters.
    """

    def __init__(self, contents: FolderContents, adapters: Mapping[str, Shape], ignore: Sequence[str] = ()) -> None:
        self._adapters = adapters
        self._names: dict[tuple[str, Any], list[str]] = defaultdict(list)
        super().__init__(contents, ignore)

    def _list_tensors(self) -> list[HfTensor]:
        assert self.contents.adapter is not None
        self.alpha = effective_alpha(self.contents.adapter, self.contents.folder)
        tensors = peft_tensors(with_adapters(self.model, hf_tensors(self.model), self._adapters, self.alpha))
        for tensor in tensors:
            for slab in tensor.slabs:
                self._names[slab.mcore, slab.region].append(tensor.name)
        found, wanted = self.contents.tensors.keys(), {tensor.name for tensor in tensors}
        if missing := sorted(wanted - found):
            raise self._other_layers("lacks", missing)
        # Modules that PEFT trained as a whole (modules_to_save) have the model's own names.
        own = {PEFT_PREFIX + tensor.name: tensor for tensor in hf_tensors(self.model) if not tensor.is_copy}
        beside = [replace(own[name], name=name) for name in found if name in own and not self.model.ignores(name)]
        written = wanted | {tensor.name for tensor in beside}
        reasons = [matching(IGNORED, self.model.ignored)]
        unknown = partial(self._other_layers, "has adapters that the model lacks:")
        self._left_out = account(sorted(found), written, reasons, unknown)
        return [*tensors, *beside]

    def _other_layers(self, problem: str, names: Sequence[str]) -> CheckpointMismatchError:
        return CheckpointMismatchError(
            f"{self.contents.folder / ADAPTER_FILE}: {problem} {some_of(names, 5)}: give the model adapters of the "
            "same layers"
        )

    def check_left_out(self) -> None:
        """Checks that all copies of a Megatron tensor are equal, and that tensors without a place in Megatron are zero.

        Raises CheckpointMismatchError: copies differ or a tensor is not zero, so the model cannot hold the values.
        """
        self._check_zeros()
        stored = DequantizingReader(self.place, self.contents.config, self.contents.tensors)
        for (name, _), (first, *copies) in self._names.items():
            for copy in copies:
                if not same_bytes(stored, first, copy):
                    raise CheckpointMismatchError(
                        f"{self.place / ADAPTER_FILE}: {first} and {copy} differ, but the model has only one tensor "
                        f"{name} for both: wrap the model with CanonicalLoRA"
                    )
