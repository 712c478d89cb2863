"""Reads the settings of low-rank adapters from the modules of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from mcore_ckpt.checkpoint.manifest import AdapterSettings
from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.ranks.rounds import Record
from mcore_ckpt.sharding.adapter_names import is_adapter
from mcore_ckpt.sharding.plan import MODEL
from mcore_ckpt.state.shards import LocalShard


def own_adapters(chunks: Sequence[torch.nn.Module]) -> list[Record]:
    """Returns the settings of this rank's adapters as JSON values, without duplicates.

    A pipeline stage may have no adapters. `adapter_settings` joins the settings of all ranks.
    """
    found = {settings: None for chunk in chunks for settings in _read(chunk)}
    return [asdict(settings) for settings in found]


def own_trained(shards: Sequence[LocalShard]) -> list[str]:
    """Returns the names of this rank's trained parameters that are not in adapters.

    The list is empty if this rank has neither adapters nor frozen parameters.
    """
    parameters = [s for s in shards if s.key.kind == MODEL and not s.is_buffer and not is_adapter(s.key.name)]
    trained = [shard.key.name for shard in parameters if not shard.is_frozen]
    # A model that has no adapters and no frozen parameters needs no list, because the list would have every parameter.
    is_adapted = any(is_adapter(shard.key.name) for shard in shards)
    return trained if is_adapted or len(trained) < len(parameters) else []


def adapter_settings(
    records: Iterable[Sequence[Record]], trained: Iterable[str] | None = None
) -> AdapterSettings | None:
    """Joins the settings that each rank has read with `own_adapters`. Returns None if no rank has adapters.

    `trained` has the names of the parameters that are trained in addition to the adapters.

    Raises UnsupportedError: adapters have different settings.
    """
    found = {replace(AdapterSettings(**item), trained=None): None for record in records for item in record}
    if len(found) > 1:
        first, second, *_ = found
        raise UnsupportedError(
            f"the model has adapters of alpha {first.alpha:g} (dropout {first.dropout:g}) and others of alpha "
            f"{second.alpha:g} (dropout {second.dropout:g}), but a checkpoint can have only one alpha and one "
            "dropout: give all adapters the same alpha and dropout"
        )
    settings = next(iter(found), None)
    return settings if settings is None or trained is None else replace(settings, trained=tuple(sorted({*trained})))


def _read(chunk: torch.nn.Module) -> Iterator[AdapterSettings]:
    """Yields the settings of each adapter in the wrappers of Megatron-Bridge (`AdapterWrapper`) or of PEFT."""
    for module in chunk.modules():
        if is_peft_layer(module):
            yield from _read_peft(module)
            continue
        adapter = getattr(module, "adapter", None)
        if isinstance(adapter, torch.nn.Module) and hasattr(module, "to_wrap"):
            # CanonicalLoRA has a ModuleDict of adapters.
            for part in adapter.values() if isinstance(adapter, torch.nn.ModuleDict) else (adapter,):
                if (alpha := getattr(part, "alpha", None)) is not None:
                    yield AdapterSettings(float(alpha), float(getattr(getattr(part, "dropout", None), "p", 0.0)))


def is_peft_layer(module: torch.nn.Module) -> bool:
    """Returns True for a layer that HuggingFace's PEFT has wrapped (`LoraLayer`)."""
    return isinstance(getattr(module, "lora_A", None), torch.nn.ModuleDict) and hasattr(module, "base_layer")


def _read_peft(module: Any) -> Iterator[AdapterSettings]:
    for name in module.lora_A:
        alpha, rank, scale = module.lora_alpha[name], module.r[name], module.scaling[name]
        # With use_rslora the scale is alpha / sqrt(rank). Then return scale * rank as alpha, so that alpha / rank is
        # this scale.
        alpha = alpha if scale == alpha / rank else scale * rank
        yield AdapterSettings(float(alpha), float(getattr(module.lora_dropout[name], "p", 0.0)))
