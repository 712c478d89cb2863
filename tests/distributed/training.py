"""Real megatron-core trainings, small enough for a CPU, in every layout that checkpoints have to survive."""

import contextlib
import dataclasses
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from tests.support import emerging  # noqa: F401, before megatron looks for emerging_optimizers
from tests.support.fused_adam import fused_adam

# Before megatron looks for mamba_ssm.
sys.path.append(str(Path(__file__).parents[1] / "support" / "stand_ins"))
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from mcore_ckpt.cli.demo.megatron_on_cpu import enable_cpu
from mcore_ckpt.cli.demo.text import Batch
from mcore_ckpt.cli.demo.tiny_trainer import connect, run_microbatches, tiny_config, tiny_scheduler
from tests.support.quantized import computing, quantize_linears
from tests.support.simulated_device import simulated_device

enable_cpu()

# Odd on purpose: with the hidden size below, neither parameters nor buckets end on the 64 and 128 elements
# that _ParamAndGradBuffer pads to.
VOCAB_SIZE = 131
HIDDEN_SIZE = 40
SEQUENCE_LENGTH = 16
MICRO_BATCH_SIZE = 2
# As few as two pipeline stages can interleave; most of the time of these tests goes into training.
NUM_MICROBATCHES = 2

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}


@dataclass(frozen=True)
class Layout:
    """What one training differs from another in. The data-parallel size is what the world leaves over."""

    world: int
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    """None: as tp."""

    hidden_size: int = HIDDEN_SIZE
    num_layers: int = 2
    first_stage_layers: int | None = None
    stages: str | None = None
    """pipeline_model_parallel_layout, as "Et|t*2|t|tL"."""
    pattern: str | None = None
    """hybrid_layer_pattern, for a HybridModel of megatron 0.18 and newer: "M*-|ME", "M*-|ME/*-" with mtp_layers=1."""
    tower: Literal["transformers", "megatron"] | None = None
    """A vision tower beside the decoder, on the first stage: of transformers' modules, or of megatron's."""
    tied_embeddings: bool = False
    mtp_layers: int | None = None
    experts: int | None = None
    expert_bias: bool = False
    frozen: str | None = None
    """Parameters whose local name this pattern finds do not train."""
    dropout: float = 0.1
    padded_vocab: int | None = None
    """None: padded for the tensor-parallel size."""
    global_batch: int | None = None
    """Sequences of a step, which the data-parallel ranks share; None: NUM_MICROBATCHES on every rank, each its own."""

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    fp32_norms: bool = False
    """In 16-bit training: parameters of two dtypes, in two buffers, in one parameter group."""
    distributed_optimizer: bool = True
    optimizer_instances: int = 1
    bucket_size: int | None = None
    overlap_grad_reduce: bool = False
    """DistributedDataParallel makes more than one bucket only with this."""
    overlap_param_gather: bool = False
    offload: float | None = None
    """The fraction of parameters that HybridDeviceOptimizer updates on the host. Needs a simulated device."""
    offload_overlap: bool = False
    precision_aware: bool = False
    """Without `offload`, the optimizer is a stand-in for transformer-engine's FusedAdam."""
    main_dtype: str = "fp32"
    moment_dtypes: tuple[str, str] = ("fp32", "fp32")
    remainders: bool = False
    quantized: str | None = None
    """The recipe by which weights are quantized: a stand-in for transformer-engine (tests/support/quantized.py)."""
    optimizer: str = "adam"
    scalar_optimizer: str = "adam"
    """Beside Muon and its kin, for embeddings, norms and biases."""
    moment2: str = "adamuon"
    """AdaptiveMuon's second moment."""
    layer_wise: Literal["owners", "layout"] | None = None
    """LayerWiseDistributedOptimizer; "layout": with buffers in which no owner's parameter is cut (0.18 and newer)."""

    @property
    def depth(self) -> int:
        """The number of decoder layers."""
        return self.num_layers if self.pattern is None else len(self.pattern.partition("/")[0].replace("|", ""))

    @property
    def dp(self) -> int:
        return self.world // (self.tp * self.pp * self.cp)

    @property
    def num_microbatches(self) -> int:
        if self.global_batch is None:
            return NUM_MICROBATCHES
        number, rest = divmod(self.global_batch, MICRO_BATCH_SIZE * self.dp)
        assert rest == 0, f"{self.dp} replicas cannot share {self.global_batch} sequences"
        return number

    @property
    def padded_vocab_size(self) -> int:
        """As megatron's trainer pads it: to a multiple that each tensor-parallel rank can cut."""
        if self.padded_vocab is not None:
            return self.padded_vocab
        multiple = 1 if self.tp == 1 else 4 * self.tp
        return -(-VOCAB_SIZE // multiple) * multiple


@dataclass(frozen=True)
class Training:
    layout: Layout
    model: list[DistributedDataParallel]
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler


@dataclass(frozen=True)
class Step:
    """What a step shows of itself: the losses (last pipeline stage only), the gradient norm, the rate."""

    losses: tuple[float, ...]
    grad_norm: float | None
    learning_rate: tuple[float, ...]


@contextlib.contextmanager
def parallel(layout: Layout, **more: Any) -> Iterator[None]:
    """The process groups of a layout, for as long as the block lasts. `more` is for `initialize_model_parallel`."""
    assert dist.get_world_size() == layout.world
    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        num_distributed_optimizer_instances=layout.optimizer_instances,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=1,
        **more,
    )
    try:
        yield
    finally:
        _forget_parallel_state()


# The chunks that were built since the process groups were made.
_built: list[DistributedDataParallel] = []


def _forget_parallel_state() -> None:
    # Hooks on the nodes that accumulate gradients know it (0.16.1), in a ring that goes through C++: no collection of
    # garbage would free the model, nor the threads of the groups it knows, of which dozens of cases leave thousands.
    for chunk in _built:
        chunk.__dict__.clear()
    _built.clear()
    # destroy_model_parallel drops the groups without destroying them; dozens of cases run in one process,
    # and each gloo group holds threads and sockets.
    groups = parallel_state._global_process_group_list or []
    parallel_state.destroy_model_parallel()
    for group in groups:
        if isinstance(group, dist.ProcessGroup):
            dist.destroy_process_group(group)
    # Sized by the first model that logs, and kept (save_to_aux_losses_tracker, save_loss_to_tracker).
    if hasattr(moe_utils, "get_moe_metrics_tracker"):
        moe_utils.get_moe_metrics_tracker().metrics.clear()
    else:  # until 0.17
        moe_utils.get_moe_layer_wise_logging_tracker().clear()
    MTPLossLoggingHelper.tracker.clear()


def build(layout: Layout, seed: int) -> Training:
    """A new model, optimizer and scheduler. Call it within `parallel(layout)`."""
    with device(layout):
        return _build(layout, seed)


def device(layout: Layout) -> contextlib.AbstractContextManager[None]:
    """This package sees tensors as they are, on the CPU. Only megatron is to believe in a device."""
    return contextlib.nullcontext() if layout.offload is None else simulated_device()


def _build(layout: Layout, seed: int) -> Training:
    config, chunks = build_chunks(layout, seed)
    # Attention with context parallelism needs transformer-engine, which the model asks for when it is built.
    # Only the rotary embedding and the schedule read the size later.
    config.context_parallel_size = layout.cp
    model = [_wrap(layout, config, chunk, index) for index, chunk in enumerate(chunks)]
    with fused_adam() if layout.precision_aware and layout.offload is None else contextlib.nullcontext():
        optimizer = _build_optimizer(layout, model)
    _connect(layout, config, model, optimizer)
    # Replicas must begin with equal weights; from here on each rank draws its own numbers.
    seed_everything(seed + 10 * parallel_state.get_data_parallel_rank(with_context_parallel=True))
    return Training(layout, model, optimizer, _scheduler(optimizer))


def _build_optimizer(layout: Layout, model: list[DistributedDataParallel]) -> MegatronOptimizer:
    config = _optimizer_config(layout)
    if layout.optimizer not in ("adam", "sgd") and not hasattr(config, "use_layer_wise_distributed_optimizer"):
        from megatron.core.optimizer.muon import get_megatron_muon_optimizer  # until 0.17

        layer_wise = layout.layer_wise is not None
        return get_megatron_muon_optimizer(
            config, model, use_gloo_process_groups=False, layer_wise_distributed_optimizer=layer_wise
        )
    return get_megatron_optimizer(config, model, use_gloo_process_groups=False)


def build_chunks(layout: Layout, seed: int) -> tuple[TransformerConfig, list[LanguageModule]]:
    """A model's configuration and its chunks, neither in 16 bits nor in DistributedDataParallel yet."""
    seed_everything(seed)
    config = _transformer_config(layout)
    return config, [_build_chunk(layout, config, stage) for stage in range(layout.vpp or 1)]


def seed_everything(seed: int) -> None:
    """As megatron's trainer does (_set_random_seed): one seed per pipeline stage."""
    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _transformer_config(layout: Layout) -> TransformerConfig:
    mixture: dict[str, Any] = {}
    if layout.experts:
        mixture = {
            "num_moe_experts": layout.experts,
            "moe_ffn_hidden_size": layout.hidden_size // 2,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": "allgather",
            "moe_layer_freq": 1 if layout.pattern else [index % 2 for index in range(layout.num_layers)],
            # MoELayer.forward refuses to train with TP > 1 otherwise.
            "sequence_parallel": layout.tp > 1,
            "moe_router_load_balancing_type": "none" if layout.expert_bias else "aux_loss",
            "moe_aux_loss_coeff": 0.0 if layout.expert_bias else 1e-2,
        }
    if layout.expert_bias:
        mixture |= {
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
            "moe_router_bias_update_rate": 0.05,
        }
    if layout.tower:
        mixture |= {"mrope_section": [1, 2, 2]}
    if layout.pattern:
        from tests.distributed.hybrid_model import MIXERS

        mixture |= {"is_hybrid_model": True, **MIXERS}
    return tiny_config(
        DTYPES[layout.precision],
        num_layers=layout.depth,
        hidden_size=layout.hidden_size,
        num_attention_heads=4,
        ffn_hidden_size=layout.hidden_size * 2,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        # With two stages each is the other's next and previous one: batched, what goes forward would be received as
        # what comes back (_batched_p2p_ops; megatron's trainer refuses it).
        overlap_p2p_comm=layout.vpp is not None,
        batch_p2p_comm=layout.vpp is None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        num_layers_in_first_pipeline_stage=layout.first_stage_layers,
        pipeline_model_parallel_layout=layout.stages,
        mtp_num_layers=layout.mtp_layers,
        hidden_dropout=layout.dropout,
        attention_dropout=layout.dropout,
        **mixture,
    )


class RMSNorm(torch.nn.RMSNorm):
    """megatron's WrappedTorchNorm refuses sequence parallelism; the mark is all that finalize_model_grads needs."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.to(self.weight.dtype)).to(hidden.dtype)


def _block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
    block.layer_norm = RMSNorm
    for layer in block.layer_specs:
        layer.submodules.input_layernorm = RMSNorm
        layer.submodules.pre_mlp_layernorm = RMSNorm
    return block


def _build_chunk(layout: Layout, config: TransformerConfig, stage: int) -> LanguageModule:
    where = {"vp_stage": stage if layout.vpp else None}
    arguments: dict[str, Any] = {
        "vocab_size": layout.padded_vocab_size,
        "max_sequence_length": SEQUENCE_LENGTH,
        "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, **where),
        "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, **where),
        "position_embedding_type": "rope" if layout.tower is None else "mrope",
        "share_embeddings_and_output_weights": layout.tied_embeddings,
        **where,
    }
    if layout.tower:
        # The image's features take the place of embeddings before the sequence is cut.
        arguments["scatter_embedding_sequence_parallel"] = False
    if layout.pattern:
        from tests.distributed.hybrid_model import build_hybrid

        return build_hybrid(config, RMSNorm, layout.pattern, **arguments)
    block = _block_spec(config, **where)
    mtp_block = None
    if layout.mtp_layers:
        mtp_block = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False, **where)
    model = GPTModel(config, block, mtp_block_spec=mtp_block, **arguments)
    return model if layout.tower is None else _with_tower(layout, config, model)


def _with_tower(layout: Layout, config: TransformerConfig, model: GPTModel) -> torch.nn.Module:
    from tests.support.vision_language import TOWER_2_5, TOWER_3, TOWER_NAMES, VisionLanguageModel, tower_of

    assert layout.tower is not None
    model_type, vision = ("qwen3_vl", TOWER_3) if layout.tower == "megatron" else ("qwen2_5_vl", TOWER_2_5)
    vision = {**vision, "out_hidden_size": layout.hidden_size}
    tower = tower_of(layout.tower, model_type, vision, config, RMSNorm) if model.pre_process else None
    whole = VisionLanguageModel(config, model, tower, TOWER_NAMES[layout.tower])
    whole.makes_images = True
    return whole


def _wrap(layout: Layout, config: TransformerConfig, chunk: LanguageModule, index: int) -> DistributedDataParallel:
    """In the order of megatron's trainer (get_model): freeze, move, 16-bit, DDP."""
    for name, parameter in chunk.named_parameters():
        parameter.requires_grad_(not (layout.frozen and re.search(layout.frozen, name)))
    module: torch.nn.Module = chunk.cuda()
    if layout.precision != "fp32":
        module = Float16Module(config, chunk)
        # Float16Module makes bfloat16 of the buffer too, and the router goes back to float32 when it first
        # runs; get_model does it at once.
        for submodule in chunk.modules():
            if hasattr(submodule, "_maintain_float32_expert_bias"):
                submodule._maintain_float32_expert_bias()
            if layout.fp32_norms and isinstance(submodule, RMSNorm):
                submodule.float()
    if layout.quantized:
        quantize_linears(chunk, layout.quantized)
    gathers = "fp4_param_gather" if layout.quantized == "nvfp4" else "fp8_param_gather"
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=layout.distributed_optimizer or layout.layer_wise == "layout",
        num_distributed_optimizer_instances=layout.optimizer_instances,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=layout.overlap_grad_reduce,
        overlap_param_gather=layout.overlap_param_gather,
        bucket_size=layout.bucket_size,
        reuse_grad_buf_for_mxfp8_param_ag=layout.quantized == "mxfp8",
        **({gathers: True} if layout.quantized else {}),
    )
    more = {"full_param_layout": _param_layout(module, ddp_config)} if layout.layer_wise == "layout" else {}
    wrapped = DistributedDataParallel(config, ddp_config, module, disable_bucketing=index > 0, **more)
    _built.append(wrapped)
    return wrapped


def _param_layout(module: torch.nn.Module, ddp_config: DistributedDataParallelConfig) -> Any:
    """As megatron's trainer does (wrap_model_chunks_with_ddp, 0.19)."""
    from megatron.core.optimizer.layer_wise_optimizer import (
        LayerWiseDistributedOptimizer,
        tag_params_for_buffer_routing,
    )

    tag_params_for_buffer_routing([module])
    return LayerWiseDistributedOptimizer.compute_full_param_layout(
        [parameter for parameter in module.parameters() if parameter.requires_grad],
        ddp_config.bucket_size,
        parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        ddp_config,
        expert_data_parallel_world_size=parallel_state.get_expert_data_parallel_world_size(),
    )


def _optimizer_config(layout: Layout) -> OptimizerConfig:
    new: dict[str, Any] = {
        "muon_scalar_optimizer": layout.scalar_optimizer,
        "adaptive_muon_moment2_method": layout.moment2,
        "use_layer_wise_distributed_optimizer": layout.layer_wise is not None,
    }
    known = {field.name for field in dataclasses.fields(OptimizerConfig)}
    return OptimizerConfig(
        **{name: value for name, value in new.items() if name in known},
        optimizer=layout.optimizer,
        lr=1e-2,
        min_lr=1e-4,
        weight_decay=0.1,
        clip_grad=1.0,
        bf16=layout.precision == "bf16",
        fp16=layout.precision == "fp16",
        params_dtype=DTYPES[layout.precision],
        use_distributed_optimizer=layout.distributed_optimizer,
        overlap_param_gather=layout.overlap_param_gather,
        # High enough to overflow, with a window short enough to grow again: the scaler's state moves.
        initial_loss_scale=2.0**18,
        loss_scale_window=2,
        hysteresis=1,
        optimizer_cpu_offload=layout.offload is not None,
        optimizer_offload_fraction=layout.offload or 0.0,
        overlap_cpu_optimizer_d2h_h2d=layout.offload_overlap,
        use_precision_aware_optimizer=layout.precision_aware,
        main_params_dtype=DTYPES[layout.main_dtype],
        exp_avg_dtype=DTYPES[layout.moment_dtypes[0]],
        exp_avg_sq_dtype=DTYPES[layout.moment_dtypes[1]],
        store_param_remainders=layout.remainders,
        fp8_recipe=layout.quantized if layout.quantized != "nvfp4" else None,
        reuse_grad_buf_for_mxfp8_param_ag=layout.quantized == "mxfp8",
    )


def _scheduler(optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    # Rate and weight decay differ at every step, so that a step miscounted is seen.
    return tiny_scheduler(
        optimizer,
        max_lr=1e-2,
        min_lr=1e-4,
        lr_warmup_steps=2,
        lr_decay_steps=40,
        end_wd=0.1,
        wd_incr_steps=40,
        wd_incr_style="linear",
    )


def _connect(
    layout: Layout, config: TransformerConfig, model: list[DistributedDataParallel], optimizer: MegatronOptimizer
) -> None:
    """What megatron's trainer hands to the schedules (train() in training.py)."""
    connect(config, optimizer)
    if layout.overlap_grad_reduce:
        no_sync: list[Callable[[], Any]] = [chunk.no_sync for chunk in model]
        config.no_sync_func = no_sync if len(model) > 1 else no_sync[0]


def train(training: Training, first_step: int, last_step: int) -> list[Step]:
    """Train the steps first_step, ..., last_step - 1."""
    with device(training.layout):
        return [_train_step(training, step) for step in range(first_step, last_step)]


def _train_step(training: Training, step: int) -> Step:
    model = training.model
    for chunk in model:
        chunk.zero_grad_buffer()
    training.optimizer.zero_grad()
    if training.layout.quantized == "mxfp8" and training.layout.overlap_param_gather:
        for part in training.optimizer.chained_optimizers:
            part._copy_main_params_to_param_buffer()
    with computing(model) if training.layout.quantized else contextlib.nullcontext():
        losses = run_microbatches(
            model,
            [_batches(training.layout, step) for _ in model],
            num_microbatches=training.layout.num_microbatches,
            micro_batch_size=MICRO_BATCH_SIZE,
            seq_length=SEQUENCE_LENGTH,
        )
    updated, grad_norm, _ = training.optimizer.step()
    if updated:
        training.scheduler.step(1)
    return Step(
        losses=tuple(map(float, losses)),
        grad_norm=None if grad_norm is None else float(grad_norm),
        learning_rate=tuple(group["lr"] for group in training.optimizer.param_groups),
    )


def _batches(layout: Layout, step: int) -> Iterator[Batch]:
    """Tokens that follow from step and rank, moved by a draw from each generator that a checkpoint restores."""
    if layout.global_batch is not None:
        yield from _share_of_global_batch(layout, step)
        return
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    for microbatch in range(NUM_MICROBATCHES):
        generator = torch.Generator().manual_seed((step * NUM_MICROBATCHES + microbatch) * layout.world + replica)
        shape = (MICRO_BATCH_SIZE, SEQUENCE_LENGTH // layout.cp + 1)
        drawn = random.randrange(VOCAB_SIZE) + int(np.random.randint(VOCAB_SIZE)) + int(torch.randint(VOCAB_SIZE, ()))
        tokens = (torch.randint(0, VOCAB_SIZE, shape, generator=generator) + drawn) % VOCAB_SIZE
        yield tokens[:, :-1].contiguous().cuda(), tokens[:, 1:].contiguous().cuda()


def _share_of_global_batch(layout: Layout, step: int) -> Iterator[Batch]:
    """Of the same sequences under every layout, this rank's."""
    first = parallel_state.get_data_parallel_rank()
    for number in range(first, layout.num_microbatches * layout.dp, layout.dp):
        generator = torch.Generator().manual_seed(1000 * step + number)
        tokens = torch.randint(0, VOCAB_SIZE, (MICRO_BATCH_SIZE, SEQUENCE_LENGTH + 1), generator=generator)
        own = slice(parallel_state.get_context_parallel_rank(), None, layout.cp)
        yield tokens[:, :-1][:, own].contiguous().cuda(), tokens[:, 1:][:, own].contiguous().cuda()
