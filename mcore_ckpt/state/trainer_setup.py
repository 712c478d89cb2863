"""Makes a `Trainer` from a training's objects.

Each rank reads its part of the objects. Then all ranks compare what they have read, and complete their trainers.

Objects that cannot be saved or loaded completely are refused here, on all ranks together, before any change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt.checkpoint import file_names
from mcore_ckpt.checkpoint.manifest import StageRecord
from mcore_ckpt.config import CheckpointConfig
from mcore_ckpt.errors import InvalidArgumentError, InvalidTypeError
from mcore_ckpt.ranks.rounds import Agreement, Record, decide, same_everywhere
from mcore_ckpt.ranks.topology import is_first_optimizer_instance, read_replicas, read_topology
from mcore_ckpt.state.adapter_settings import adapter_settings, own_adapters, own_trained
from mcore_ckpt.state.attached_parts import AttachedParts
from mcore_ckpt.state.live_facts import read_facts
from mcore_ckpt.state.megatron_versions import check_megatron
from mcore_ckpt.state.model import chunk_layers, model_shards, own_layers, process_groups_of, whole_layers
from mcore_ckpt.state.optimizers.chain import optimizer_parts
from mcore_ckpt.state.param_groups import group_keys
from mcore_ckpt.state.shards import LocalShard
from mcore_ckpt.state.thread_settings import gpu_of, settings_for_state
from mcore_ckpt.state.trainer import Trainer
from mcore_ckpt.state.unsupported import (
    refuse_missing_layers,
    refuse_names_of_two_stages,
    refuse_unsupported_experts,
    refuse_unsupported_model,
    refuse_unsupported_optimizer,
)


def read_trainer(
    agreement: Agreement,
    root: Path,
    role: str,
    chunks: tuple[torch.nn.Module, ...],
    config: CheckpointConfig,
    objects: dict[str, Any],
) -> Trainer:
    """Reads and checks this rank's own part of the trainer. The arguments are fields of `Trainer`.

    Raises InvalidArgumentError, InvalidStateError or UnsupportedError.
    """
    file_names.check_roles((role, *(config.roles or ())))
    for part in config.parts:
        file_names.check_part(part)
    if role not in (config.roles or (role,)):
        raise InvalidArgumentError(f"config.roles is {config.roles}, which does not have this manager's role {role!r}")
    if "hf_model" in config.save_contents and objects["hf_config"] is None:
        raise InvalidArgumentError(
            "save_contents has 'hf_model', but the manager has no hf_config: pass hf_config, or leave 'hf_model' out"
        )
    for name, value in objects.items():
        _check_object(name, value)
    check_megatron()
    groups = process_groups_of(chunks)
    coordinates, topology = read_topology(groups, len(chunks))
    gpu = gpu_of(chunks)
    with settings_for_state(gpu, config.timeout_s):
        model = read_facts(chunks)
    return Trainer(
        root=root,
        role=role,
        chunks=chunks,
        config=config,
        coordinates=coordinates,
        topology=topology,
        stages=tuple(_stage(coordinates.pp, vp, chunk) for vp, chunk in enumerate(chunks)),
        vocab_size=config.vocab_size or _vocab_size(objects["hf_config"]),
        first_instance=is_first_optimizer_instance(groups),
        replicas=read_replicas(groups),
        gpu=gpu,
        agreement=agreement,
        model=model,
        group_keys=group_keys(optimizer_parts(objects["optimizer"])),
        parts=AttachedParts(config.parts),
        **objects,
    )


# The methods that each of a trainer's objects must have, and how to get such an object.
_OBJECTS = {
    "lr_scheduler": (("state_dict", "load_state_dict"), "Megatron's OptimizerParamScheduler"),
    "hf_config": (("save_pretrained",), "a config of transformers, such as AutoConfig.from_pretrained(...)"),
    "processing_class": (("save_pretrained",), "a tokenizer or processor of transformers"),
}


def _check_object(name: str, value: Any) -> None:
    """Raises InvalidTypeError if an object lacks a method in `_OBJECTS`, because otherwise each save would fail."""
    can, known_as = _OBJECTS.get(name, ((), ""))
    if value is not None and not all(callable(getattr(value, each, None)) for each in can):
        raise InvalidTypeError(f"{name} is {value!r:.200}: pass {known_as}, or None")


def complete_together(
    trainer: Trainer, topic: str, remote_url: str | None, on_rank_0: Callable[[], None]
) -> tuple[Trainer, list[LocalShard]]:
    """Checks the model and the arguments on all ranks together.

    One pipeline stage may have something unsupported that the other stages do not have. All ranks must then refuse the
    model. Otherwise the other ranks would later wait for the rank that refused.

    Rank 0 calls `on_rank_0` in the same round, once all ranks are known to fit together. `topic` is for messages.

    Returns two things: the trainer, which now has the layers and the adapters of the whole model; and the shards of
    this rank's part of the model.
    """
    chunks, optimizer = trainer.chunks, trainer.optimizer
    shards: list[LocalShard] = []

    def work() -> Record:
        refuse_unsupported_model(chunks, trainer.replicas.groups)
        model = model_shards(chunks)
        refuse_unsupported_experts(trainer.topology, model)
        shards.extend(model)
        if optimizer is not None:
            refuse_unsupported_optimizer(optimizer, chunks)
        return {
            **_arguments(trainer, remote_url),
            "adapters": own_adapters(chunks),
            "trained": own_trained(model),
            **own_layers(model, trainer.coordinates),
        }

    def combine(records: Sequence[Record]) -> Record:
        layers = whole_layers(records)
        told = ("layers", "others", "adapters", "trained")
        arguments = [{name: value for name, value in record.items() if name not in told} for record in records]
        same_everywhere(arguments, "the arguments of CheckpointManager")
        refuse_missing_layers(chunks, layers)
        refuse_names_of_two_stages(record["others"] for record in records)
        on_rank_0()
        trained = [name for record in records for name in record["trained"]]
        adapters = adapter_settings((record["adapters"] for record in records), trained)
        return {"layers": list(layers.items()), "adapters": [] if adapters is None else [asdict(adapters)]}

    outcome = decide(trainer.agreement, topic, work, combine)
    told = outcome["adapters"]
    adapters = adapter_settings([told], told[0]["trained"] if told else None)
    known = replace(trainer, layers=whole_layers([outcome]), adapters=adapters)
    return known, shards


# The arguments of a CheckpointManager that must be the same on all ranks. Most of them are fields of CheckpointConfig.
_SAME = (
    *("root", "save_contents", "load_contents", "has_optimizer", "async_save", "async_mode", "skip_frozen", "strict"),
    *("strict_dtypes", "strict_model", "reset_moments", "assume_optimizer_step", "if_busy", "if_failed"),
    *("shared_writes", "verify_replicas", "vocab_size", "load_replicas", "remote", "shared_with_group", "prune_remote"),
)


def _arguments(trainer: Trainer, remote_url: str | None) -> Record:
    others = {
        "root": str(trainer.root),
        "has_optimizer": trainer.optimizer is not None,
        "vocab_size": trainer.vocab_size,
        "remote": remote_url,
    }
    return {name: others[name] if name in others else getattr(trainer.config, name) for name in _SAME}


def _vocab_size(hf_config: Any) -> int | None:
    # In a multimodal model's config, the vocabulary's size is in the part for the language model.
    text = getattr(hf_config, "text_config", hf_config)
    size = getattr(text, "vocab_size", None)
    return size if isinstance(size, int) else None


def _stage(pp: int, vp: int, chunk: Any) -> StageRecord:
    layers = chunk_layers(chunk)
    return StageRecord(pp, vp, layers.decoder, layers.mtp)
