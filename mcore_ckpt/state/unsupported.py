"""Refuses models and optimizers that can only be saved in part, before anything is written or changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import torch

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.ranks.process_groups import ProcessGroups, has_process_group
from mcore_ckpt.ranks.topology import Topology
from mcore_ckpt.sharding.counterparts import Layers, decoder_layers
from mcore_ckpt.sharding.names import expert_of
from mcore_ckpt.sharding.plan import MODEL
from mcore_ckpt.state.adapter_settings import is_peft_layer
from mcore_ckpt.state.model import language_model_of, unwrap
from mcore_ckpt.state.optimizers.chain import optimizer_parts
from mcore_ckpt.state.optimizers.optimizer_kinds import KINDS, find_kind
from mcore_ckpt.state.optimizers.part import OptimizerPart
from mcore_ckpt.state.quantized import has_quantized, is_quantized
from mcore_ckpt.state.shards import LocalShard

# Classes are recognized by name, because importing them needs packages that may be absent (transformer-engine,
# emerging-optimizers).
_MODULES = {
    "GroupedMLP": "legacy GroupedMLP (weights packed and transposed): use TEGroupedMLP or SequentialMLP",
    "FullyShardedDataParallel": "Megatron-FSDP: use DistributedDataParallel",
    "MegatronFSDP": "Megatron-FSDP: use DistributedDataParallel",
    "TorchFullyShardedDataParallel": "torch FSDP2 under megatron: use DistributedDataParallel",
    # This class has one weight (0.17) where other layer specs, HuggingFace and megatron's own checkpoints have two.
    "FusedMLASelfAttention": "fused down projections of latent attention: set mla_down_proj_fusion=False",
    # In the next two classes, transformer-engine may reorder the rows of gated linear units (0.18, 0.19).
    "FusedSharedExpertMLP": "FusedSharedExpertMLP: set use_grouped_gemm_for_shared_expert=False",
    "TEFusedMLPWithGroupedLinear": "TEFusedMLPWithGroupedLinear: set use_grouped_gemm_for_dense_mlp=False",
}
# With these fields of TransformerConfig (0.18, 0.19), rows of gate and up alternate in blocks, but `sharded_state_dict`
# still describes the first half as the gate. Under another ETP, in another kind of layer, or in HuggingFace, rows of
# gate and up would be mixed up.
_INTERLEAVED = ("moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size")
# The functions of parallel_state (0.19) that return more than 1 under generalized tensor parallelism.
_GTP_SIZES = ("get_gtp_weight_remat_world_size", "get_expert_gtp_weight_remat_world_size")
# The groups that all modules of a model must share. The context-parallel group is left out: it divides no tensor, and
# attention may use a different group for each batch.
_GROUPS = ("tp", "pp", "dp", "dp_cp", "ep", "expt_tp", "expt_dp")


def refuse_unsupported_model(chunks: Sequence[torch.nn.Module], groups: ProcessGroups | None = None) -> None:
    """Raises UnsupportedError if a chunk, bare or wrapped, contains something that can only be saved in part.

    `groups` are the process groups that the checkpoint's layout is read from.
    """
    for chunk in chunks:
        if getattr(getattr(chunk, "ddp_config", None), "use_megatron_fsdp", False):
            raise UnsupportedError(f"not supported: {_MODULES['MegatronFSDP']}")
        _refuse_sharded_weights(chunk)
        _refuse_interleaved_rows(chunk)
        for path, module in chunk.named_modules():
            name = next((cls.__name__ for cls in type(module).__mro__ if cls.__name__ in _MODULES), None)
            if name is not None:
                raise UnsupportedError(f"module {path or type(module).__name__} is not supported: {_MODULES[name]}")
            _refuse_inference_copies(chunk, path, module)
            _refuse_peft_layer(path, module)
            _refuse_shared_elements(path, module)
        for name, parameter in chunk.named_parameters():
            if hasattr(parameter, "_local_tensor"):
                raise UnsupportedError(f"parameter {name} is not supported: a DTensor; use DistributedDataParallel")
    _refuse_other_groups(chunks, groups)


def _refuse_sharded_weights(chunk: torch.nn.Module) -> None:
    """Refuses generalized tensor parallelism (0.19), which gives data-parallel ranks different rows of a weight.

    A save would take these ranks for replicas, and keep only the rows of one rank.
    """
    from megatron.core import parallel_state

    config, collection = getattr(chunk, "config", None), getattr(unwrap(chunk), "pg_collection", None)
    groups = (getattr(collection, name, None) for name in ("gtp_remat", "expt_gtp_remat"))
    sizes = {
        "config.gtp_weight_remat_size": getattr(config, "gtp_weight_remat_size", 1),
        "config.expert_gtp_weight_remat_size": getattr(config, "expert_gtp_weight_remat_size", 1),
        "a gtp_remat group of the model": max(1 if group is None else group.size() for group in groups),
        **{f"parallel_state.{name}()": getattr(parallel_state, name, lambda: 1)() for name in _GTP_SIZES},
    }
    found = [f"{name} is {size}" for name, size in sizes.items() if isinstance(size, int) and size > 1]
    found += [f"parameter {name}" for name, p in chunk.named_parameters() if getattr(p, "is_gtp_weight_remat", False)]
    if found:
        raise UnsupportedError(
            f"generalized tensor parallelism is not supported ({found[0]}): leave out "
            "tensor_parallel_num_weight_shards and expert_tensor_parallel_num_weight_shards"
        )


def _refuse_inference_copies(chunk: torch.nn.Module, path: str, module: torch.nn.Module) -> None:
    """Refuses InferenceGroupedMLP (0.17) in training, and after its first forward.

    The first forward makes one tensor of all experts' weights, and turns the parameters into parts of this tensor. So
    the model no longer computes with the buffers of DistributedDataParallel, into which the optimizer writes.
    """
    if type(module).__name__ != "InferenceGroupedMLP":
        return
    if hasattr(chunk, "ddp_config") or getattr(module, "_concatenated_weights_built", False):
        raise UnsupportedError(
            f"module {path} is not supported: InferenceGroupedMLP, whose weights leave DistributedDataParallel; train "
            "with TEGroupedMLP"
        )


def _refuse_peft_layer(path: str, module: Any) -> None:
    """Refuses a layer of PEFT that has several adapters, or that does not tell the places of its tensors."""
    if not is_peft_layer(module):
        return
    if len(module.lora_A) > 1:
        raise UnsupportedError(
            f"module {path} has the adapters {', '.join(module.lora_A)}: only a model with one adapter can be saved"
        )
    if not hasattr(module, "sharded_state_dict"):
        # Without this method, megatron assumes that each tensor is whole on every rank (sharded_state_dict_default).
        raise UnsupportedError(
            f"module {path} is a {type(module).__name__} without sharded_state_dict, so the places of its tensors are "
            "unknown: use the layers of ROLL's mcore_adapter (apply_megatron_lora), or Megatron-Bridge's adapters"
        )


def _refuse_shared_elements(path: str, module: torch.nn.Module) -> None:
    """Refuses tensors in which several elements share a place in memory, such as a parameter made by `expand`.

    torch cannot write into such tensors, so a load would fail after it has changed other tensors.
    """
    buffers = {name: each for name, each in module._buffers.items() if name not in module._non_persistent_buffers_set}
    for name, tensor in {**module._parameters, **buffers}.items():
        if tensor is not None and _shares_elements(tensor):
            raise UnsupportedError(
                f"tensor {path}.{name} of shape {list(tensor.shape)} has the strides {list(tensor.stride())}, so "
                "several of its elements have one place in memory, and a load could not set them: make the tensor with "
                ".clone() or .contiguous()"
            )


def _shares_elements(tensor: torch.Tensor) -> bool:
    """Returns True if elements may share a place in memory.

    The answer is exact for tensors made by expand, slices, transpose and unfold.
    """
    if tensor.layout is not torch.strided or not tensor.numel():
        return False
    reach = 0
    axes = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in axes if size > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _refuse_interleaved_rows(chunk: torch.nn.Module) -> None:
    config = getattr(unwrap(chunk), "config", None)
    for name in _INTERLEAVED:
        size = getattr(config, name, None)
        if isinstance(size, int):
            raise UnsupportedError(
                f"{name} is {size}, which is not supported: rows of gate and up would be mixed up under another layout "
                f"and in HuggingFace; leave {name} unset"
            )


def _refuse_other_groups(chunks: Iterable[torch.nn.Module], groups: ProcessGroups | None) -> None:
    """Refuses a model whose modules have different parallel layouts (MIMO), because a checkpoint has one layout."""
    if not has_process_group():
        return
    first: dict[str, tuple[str, list[int]]] = {}
    if groups is not None:
        ours = {"tp": groups.tp, "pp": groups.pp, "dp": groups.dp, "dp_cp": groups.dp_cp}
        get_ranks = torch.distributed.get_process_group_ranks
        first = {name: ("the whole model", get_ranks(group)) for name, group in ours.items()}
        sizes = [group.size() for group in (groups.tp, groups.pp, groups.dp_cp)]
        if prod(sizes) != torch.distributed.get_world_size():
            raise UnsupportedError(
                f"the model's process groups have {' x '.join(map(str, sizes))} ranks (tp, pp, dp_cp), but there are "
                f"{torch.distributed.get_world_size()} ranks: a model that only some ranks have is not supported"
            )
    for path, collection in (found for chunk in chunks for found in _collections(unwrap(chunk))):
        for name in _GROUPS:
            group = getattr(collection, name, None)
            if group is None:
                continue
            ranks = torch.distributed.get_process_group_ranks(group)
            other, wanted = first.setdefault(name, (f"module {path}", ranks))
            if ranks != wanted:
                raise UnsupportedError(
                    f"module {path} has the {name} group {ranks}, but {other} has {wanted}: several "
                    "process-group collections in one model are not supported; save each part as its own role, "
                    "with its own manager"
                )


def _collections(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields each collection of process groups once, with the path of the first module that has it."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        collection = getattr(module, "pg_collection", None)
        if collection is not None and id(collection) not in seen:
            seen.add(id(collection))
            yield path or type(model).__name__, collection


def refuse_unsupported_experts(topology: Topology, model: Sequence[LocalShard]) -> None:
    """Raises UnsupportedError for experts whose replicas drift apart, and for packed tensors of several experts.

    With EP = 1 and ETP ≠ TP, the replicas of an expert are not the ranks that replicate dense tensors. Up to 0.18,
    megatron marks experts by `allreduce = False` only if EP > 1 (`ColumnParallelLinear.__init__`). Without the mark,
    megatron reduces the gradients of experts over the wrong ranks, the replicas of dense tensors. So the replicas of
    experts drift apart (as seen in a test). A checkpoint has the values of only one replica, so a load could not
    restore the other replicas.
    """
    if topology.ep == 1 and topology.etp != topology.tp:
        for shard in model:
            if shard.expert and not shard.is_buffer and getattr(shard.tensor, "allreduce", True):
                raise UnsupportedError(
                    f"expert {shard.key} with EP=1 and ETP={topology.etp} ≠ TP={topology.tp} is not supported: this "
                    "megatron-core lets the replicas of experts drift apart; use ETP = TP, EP > 1, or megatron-core "
                    "0.19"
                )
    for shard in model if topology.ep > 1 else ():
        if shard.key.kind != MODEL or not shard.expert or shard.of_all_experts:
            continue
        if expert_of(shard.key.name) is None:
            raise UnsupportedError(
                f"tensor {shard.key} does not belong to one expert: with expert parallelism, each rank has a different "
                "tensor under this name; for adapters of grouped experts, use a Megatron-Bridge that keeps them alike "
                "(0.6), or share_expert_adapters=False, or EP = 1"
            )


def refuse_names_of_two_stages(by_rank: Iterable[Iterable[str]]) -> None:
    """Raises UnsupportedError if two pipeline stages have tensors of the same name that megatron does not tie.

    A load would give one stage's values to both stages. megatron ties the copies of the token embedding, but not the
    copies of learned positions, which a stage with multi-token prediction also has.

    `by_rank` has, for one rank of each stage, the names of the tensors in no numbered layer. The lists of the other
    ranks are empty.
    """
    seen: set[str] = set()
    for names in by_rank:
        mine = set(names)
        if twice := sorted(seen & mine):
            raise UnsupportedError(
                f"tensor {twice[0]} is on two pipeline stages, and megatron does not keep the two copies equal, so a "
                "checkpoint could bring back only one of them: use rotary positions, or one pipeline stage"
            )
        seen |= mine


def refuse_missing_layers(chunks: Sequence[torch.nn.Module], layers: Layers) -> None:
    """Raises UnsupportedError if no rank has some of the layers that a HybridModel's pattern names.

    HybridModel (0.18 and newer) builds the segment of `hybrid_layer_pattern` that belongs to its stage. If there are
    more segments than stages, HybridModel raises no error, and no rank has the surplus segments. `layers` are the
    layers of all ranks together.
    """
    pattern = getattr(language_model_of(unwrap(chunks[0])), "hybrid_layer_pattern", None)
    if not isinstance(pattern, str):
        return
    segments = pattern.partition("/")[0].split("|")
    wanted = sum(map(len, segments))
    found = len(decoder_layers(layers))
    if found != wanted:
        raise UnsupportedError(
            f"the model has {found} of the {wanted} layers in its hybrid_layer_pattern {pattern!r}: the pattern "
            f"needs as many segments as there are pipeline stages, and it has {len(segments)}"
        )


def refuse_unsupported_optimizer(optimizer: Any, chunks: Sequence[torch.nn.Module]) -> None:
    """Raises UnsupportedError unless this package can save the whole state of every part of a model's optimizer."""
    for part in optimizer_parts(optimizer):
        _refuse_part(part.megatron, part.is_of_owner)
    refuse_quantized_without_mains(optimizer, chunks)


def refuse_quantized_without_mains(optimizer: Any, chunks: Sequence[torch.nn.Module]) -> None:
    """Raises UnsupportedError for quantized weights that cannot be made from main parameters, or cannot be loaded."""
    for part in optimizer_parts(optimizer) if has_quantized(chunks) else ():
        if any(is_quantized(each.parameter) for each in part.mains()):
            _refuse_quantized(part)


def _refuse_part(part: Any, is_of_owner: bool) -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    inner = getattr(part, "optimizer", None)
    if not isinstance(part, (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)):
        raise UnsupportedError(
            f"optimizer {type(part).__name__} is not supported: use DistributedOptimizer, "
            "Float16OptimizerWithFloat16Params or FP32Optimizer"
        )
    has_all = inner is not None and not (isinstance(part, DistributedOptimizer) or is_of_owner)
    if has_all and part.config.use_distributed_optimizer and find_kind(inner) is not None:
        # Megatron 0.19 builds this optimizer without a warning. DistributedDataParallel then reduces each gradient on
        # only one rank, but every rank updates all parameters.
        raise UnsupportedError(
            f"optimizer {type(part).__name__} with {type(inner).__name__} is not supported together with "
            "use_distributed_optimizer=True: its replicas drift apart; turn this option off, or use "
            "LayerWiseDistributedOptimizer"
        )
    offloaded = hasattr(inner, "param_to_inner_param")
    for each in getattr(inner, "sub_optimizers", [inner]):
        if each is not None and find_kind(each) is None:
            known = ", ".join(kind.name for kind in KINDS)
            raise UnsupportedError(
                f"optimizer {type(each).__name__} is not supported: use one of {known}, or one derived from it"
            )
    if offloaded and not isinstance(part, DistributedOptimizer):
        # Float16OptimizerWithFloat16Params puts its main parameters into the groups. HybridDeviceOptimizer does not
        # know these parameters, so its step raises KeyError (0.16 to 0.19).
        raise UnsupportedError(
            f"optimizer is not supported: HybridDeviceOptimizer in {type(part).__name__}; set "
            "use_distributed_optimizer=True, or turn the offload off"
        )
    if getattr(part.config, "optimizer_cuda_graph", False):
        # The graph's kernels read step and rate from tensors at fixed addresses, and a load would replace these
        # tensors.
        raise UnsupportedError("optimizer is not supported: optimizer_cuda_graph; turn this option off")
    fused = hasattr(inner, "name_to_dtype_map")
    if getattr(part.config, "use_precision_aware_optimizer", False) and not (offloaded or fused or inner is None):
        raise UnsupportedError(
            f"optimizer is not supported: use_precision_aware_optimizer with {type(inner).__name__}, whose form of "
            "state is not known; use transformer-engine's FusedAdam (1.13 or newer)"
        )


def _refuse_quantized(part: OptimizerPart) -> None:
    if not part.is_distributed:
        raise UnsupportedError(
            f"quantized weights are not supported in optimizer {type(part.megatron).__name__}: use DistributedOptimizer"
        )
    if part.has_model_ranges:
        # In this case only a step of the inner optimizer writes the bytes and scales of weights, so a load could not
        # make the weights from main parameters.
        config = part.megatron.config
        settings = ("fp8_recipe", "optimizer_cpu_offload", "main_params_dtype")
        given = ", ".join(f"{name}={getattr(config, name, None)}" for name in settings)
        raise UnsupportedError(
            "quantized weights are not supported where use_precision_aware_optimizer leaves their main parameters to "
            f"{type(part.inner).__name__} ({given}): turn this option off. Or use an fp8_recipe other than "
            "delayed, no offload, and main parameters of fp32; megatron then keeps the main parameters itself"
        )
