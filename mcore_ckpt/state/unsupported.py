"""Refuses, by name, models and optimizers that can only be saved in part, before anything is written or changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.ranks.topology import Topology
from mcore_ckpt.sharding.names import expert_of
from mcore_ckpt.sharding.plan import MODEL
from mcore_ckpt.state.shards import LocalShard

# Classes are recognized by name, because importing them needs packages that may be absent (transformer-engine,
# emerging-optimizers).
_MODULES = {
    "GroupedMLP": "legacy GroupedMLP (weights packed and transposed): use TEGroupedMLP or SequentialMLP",
    "FullyShardedDataParallel": "Megatron-FSDP: use DistributedDataParallel",
    "MegatronFSDP": "Megatron-FSDP: use DistributedDataParallel",
    "TorchFullyShardedDataParallel": "torch FSDP2 under megatron: use DistributedDataParallel",
}
_OPTIMIZERS = {
    "HybridDeviceOptimizer": "HybridDeviceOptimizer (optimizer_cpu_offload): turn the offload off",
    "LayerWiseDistributedOptimizer": "LayerWiseDistributedOptimizer: use DistributedOptimizer",
    "TensorParallelMuon": "Muon: use Adam",
    "Muon": "Muon: use Adam",
}
_FP8_PARAMETERS = ("Float8Tensor", "MXFP8Tensor", "Float8BlockwiseQTensor", "NVFP4Tensor", "QuantizedTensor")


def refuse_unsupported_model(chunks: Iterable[torch.nn.Module]) -> None:
    """Raises UnsupportedError if a chunk, bare or wrapped, contains something that can only be saved in part."""
    for chunk in chunks:
        if getattr(getattr(chunk, "ddp_config", None), "use_megatron_fsdp", False):
            raise UnsupportedError(f"not supported: {_MODULES['MegatronFSDP']}")
        for path, module in chunk.named_modules():
            _refuse(type(module), _MODULES, f"module {path or type(module).__name__}")
        for name, parameter in chunk.named_parameters():
            # TE's quantized tensors are subclasses of Tensor, and a Parameter made from such a tensor keeps its class.
            kinds = {cls.__name__ for tensor in (parameter, parameter.data) for cls in type(tensor).__mro__}
            if kinds & set(_FP8_PARAMETERS):
                raise UnsupportedError(
                    f"parameter {name} is not supported: FP8 parameters; keep the parameters in bf16"
                )
            if hasattr(parameter, "_local_tensor"):
                raise UnsupportedError(f"parameter {name} is not supported: a DTensor; use DistributedDataParallel")


def refuse_unsupported_experts(topology: Topology, model: Sequence[LocalShard]) -> None:
    """Raises UnsupportedError for experts with EP = 1 and ETP ≠ TP, and for packed tensors of several experts.

    megatron-core 0.16.1 marks experts as expert-parallel only if EP > 1 (`ColumnParallelLinear.__init__`). With EP = 1
    and ETP ≠ TP, the gradients of experts are not reduced over the tensor-parallel ranks that replicate the experts.
    The replicas drift apart, so a file of one replica could not restore the other replicas.
    """
    if topology.ep == 1 and topology.etp != topology.tp and any(shard.expert for shard in model):
        raise UnsupportedError(
            f"experts with EP=1 and ETP={topology.etp} ≠ TP={topology.tp} are not supported: megatron-core 0.16.1 lets "
            "their replicas drift apart; use ETP = TP, or EP > 1"
        )
    for shard in model if topology.ep > 1 else ():
        if shard.expert and shard.key.kind == MODEL and expert_of(shard.key.name) is None:
            raise UnsupportedError(
                f"tensor {shard.key} does not belong to one expert: with expert parallelism, each rank has a different "
                "tensor under this name; keep adapters out of grouped experts, or use EP = 1"
            )


def refuse_unsupported_optimizer(optimizer: Any) -> None:
    """Raises UnsupportedError unless this package can save the whole state of every part of the optimizer."""
    _refuse(type(optimizer), _OPTIMIZERS, "optimizer")
    for part in _parts(optimizer):
        _refuse_part(part)


def _parts(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _refuse_part(part: Any) -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    inner = getattr(part, "optimizer", None)
    _refuse(type(part), _OPTIMIZERS, "optimizer")
    _refuse(type(inner), _OPTIMIZERS, "optimizer")
    if not isinstance(part, (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)):
        raise UnsupportedError(
            f"optimizer {type(part).__name__} is not supported: use DistributedOptimizer, "
            "Float16OptimizerWithFloat16Params or FP32Optimizer"
        )
    if getattr(part.config, "use_precision_aware_optimizer", False):
        raise UnsupportedError(
            "optimizer is not supported: use_precision_aware_optimizer keeps main parameters, or scales of its "
            "moments, inside FusedAdam; turn this option off"
        )


def _refuse(cls: type, names: dict[str, str], what: str) -> None:
    for base in cls.__mro__:
        if base.__name__ in names:
            raise UnsupportedError(f"{what} is not supported: {names[base.__name__]}")
