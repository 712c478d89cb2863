"""What would be half-saved is refused by name."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.ranks.process_groups import ProcessGroups
from mcore_ckpt.ranks.topology import Topology
from mcore_ckpt.sharding.plan import ShardKey
from mcore_ckpt.sharding.regions import Region
from mcore_ckpt.state.shards import LocalShard
from mcore_ckpt.state.unsupported import (
    refuse_unsupported_experts,
    refuse_unsupported_model,
    refuse_unsupported_optimizer,
)


def bare(cls: type, *, module: bool = False, **fields: Any) -> Any:
    """A real object of a class whose constructor needs a GPU, process groups or absent packages."""
    made: Any = object.__new__(cls)
    if module:
        torch.nn.Module.__init__(made)
    vars(made).update(fields)
    return made


def adam() -> torch.optim.Optimizer:
    return torch.optim.Adam([torch.nn.Parameter(torch.zeros(3))])


def config(distributed: bool = True) -> OptimizerConfig:
    return OptimizerConfig(optimizer="adam", use_distributed_optimizer=distributed)


def precision_aware(masters_inside: bool) -> OptimizerConfig:
    """As its __post_init__ leaves it, which needs transformer-engine to get there."""
    made = config()
    made.use_precision_aware_optimizer = True
    made.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = masters_inside
    if not masters_inside:
        made.fp8_recipe = "blockwise"
        made.exp_avg_dtype = torch.uint8
    return made


def cuda_graph() -> OptimizerConfig:
    made = config()
    made.optimizer_cuda_graph = True
    return made


def part(cls: type = DistributedOptimizer, inner: Any = None, choices: OptimizerConfig | None = None) -> Any:
    return bare(cls, optimizer=inner or adam(), config=choices or config(cls is DistributedOptimizer))


def chained(*parts: Any, cls: type = ChainedOptimizer) -> Any:
    return bare(cls, chained_optimizers=list(parts))


@pytest.mark.parametrize("cls", [DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer])
def test_megatrons_own_optimizers_pass(cls: type) -> None:
    refuse_unsupported_optimizer(part(cls), [])
    refuse_unsupported_optimizer(chained(part(cls), part(cls)), [])
    refuse_unsupported_optimizer(bare(cls, optimizer=None, config=config()), [])  # a rank without parameters


Adagrad = type("Adagrad", (torch.optim.Optimizer,), {})


def offload(*inner: Any) -> Any:
    """A HybridDeviceOptimizer of these optimizers."""
    return bare(HybridDeviceOptimizer, cpu_optimizers=list(inner), gpu_optimizer=None, param_to_inner_param={})


def test_muon_and_its_kin_pass_where_each_rank_owns_whole_parameters() -> None:
    for name in ("TensorParallelMuon", "TensorParallelAdaptiveMuon", "SOAP", "Lion"):
        leaf = part(Float16OptimizerWithFloat16Params, bare(type(name, (torch.optim.Optimizer,), {})), config())
        owners = bare(LayerWiseDistributedOptimizer, chained_optimizers=[leaf], dp_cp_params_list=None)
        refuse_unsupported_optimizer(chained(owners, part()), [])


@pytest.mark.parametrize("cls", [Float16OptimizerWithFloat16Params, FP32Optimizer])
def test_an_optimizer_on_the_host_needs_the_distributed_one(cls: type) -> None:
    """megatron's own step fails otherwise: it puts other parameters into the groups."""
    with pytest.raises(UnsupportedError, match="use_distributed_optimizer=True"):
        refuse_unsupported_optimizer(part(cls, offload(adam())), [])


def test_an_optimizer_on_the_host_passes() -> None:
    refuse_unsupported_optimizer(chained(part(inner=offload(adam())), part(inner=offload())), [])
    refuse_unsupported_optimizer(part(inner=offload(adam()), choices=precision_aware(True)), [])


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        pytest.param(
            chained(part(), part(inner=offload(adam(), bare(Adagrad)))), "Adagrad is not supported", id="offload"
        ),
        pytest.param(part(choices=precision_aware(True)), "use_precision_aware_optimizer", id="precision-aware"),
        pytest.param(
            chained(part(), part(choices=precision_aware(True))), "use_precision_aware_optimizer", id="one-of-two"
        ),
        pytest.param(part(FP32Optimizer, bare(Adagrad)), "Adagrad is not supported: use one of Adam", id="adagrad"),
        pytest.param(
            chained(part(), chained(part(FP32Optimizer, bare(Adagrad)))), "Adagrad is not supported", id="nested"
        ),
        pytest.param(part(choices=cuda_graph()), "optimizer_cuda_graph; turn this option off", id="cuda-graph"),
        pytest.param(part(FP32Optimizer, choices=config()), "its replicas drift apart", id="replicas-drift"),
        pytest.param(adam(), "Adam is not supported: use DistributedOptimizer", id="torch-adam"),
        pytest.param(chained(part(), SimpleNamespace(config=config())), "SimpleNamespace", id="unknown-part"),
    ],
)
def test_an_optimizer_whose_state_is_not_known_is_refused(optimizer: Any, name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        refuse_unsupported_optimizer(optimizer, [])


def test_moments_with_scales_of_their_own_are_refused() -> None:
    """With an FP8 recipe main parameters are outside FusedAdam, but low-precision moments still need its scales,
    which are no part of its state.
    """
    with pytest.raises(UnsupportedError, match="use_precision_aware_optimizer"):
        refuse_unsupported_optimizer(part(choices=precision_aware(False)), [])


def test_quantized_weights_need_an_optimizer_that_keeps_main_parameters_for_them() -> None:
    quantized = torch.nn.Parameter(torch.zeros(3).as_subclass(type("MXFP8Tensor", (torch.Tensor,), {})))
    groups = {"float16_groups": [[quantized]], "fp32_from_float16_groups": [[torch.zeros(3)]]}
    replicated = part(Float16OptimizerWithFloat16Params)
    vars(replicated).update(groups, fp32_from_fp32_groups=[])
    refuse_unsupported_optimizer(replicated, [Plain()])
    with pytest.raises(UnsupportedError, match="quantized weights are not supported in optimizer Float16"):
        refuse_unsupported_optimizer(replicated, [with_parameter(quantized)])


class Plain(torch.nn.Module):
    def __init__(self, child: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))
        if child is not None:
            self.child = child


def module_named(name: str) -> torch.nn.Module:
    return type(name, (torch.nn.Module,), {})()


def with_parameter(parameter: torch.nn.Parameter) -> torch.nn.Module:
    model = Plain()
    model.weight = parameter
    return model


def d_tensor() -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter._local_tensor = torch.zeros(3)  # type: ignore[attr-defined]
    return parameter


@pytest.mark.parametrize(
    ("chunk", "name"),
    [
        # megatron has this class until 0.16.
        pytest.param(
            Plain(module_named("FusedMLASelfAttention")), "module child .* mla_down_proj_fusion=False", id="fused-mla"
        ),
        pytest.param(
            Plain(module_named("FusedSharedExpertMLP")), "use_grouped_gemm_for_shared_expert=False", id="fused-shared"
        ),
        pytest.param(
            Plain(module_named("TEFusedMLPWithGroupedLinear")), "use_grouped_gemm_for_dense_mlp=False", id="fused-mlp"
        ),
        pytest.param(Plain(module_named("GroupedMLP")), "module child .* legacy GroupedMLP", id="grouped-mlp"),
        pytest.param(bare(FullyShardedDataParallel, module=True), "Megatron-FSDP", id="megatron-fsdp"),
        pytest.param(Plain(module_named("MegatronFSDP")), "Megatron-FSDP", id="megatron-fsdp-inside"),
        pytest.param(module_named("TorchFullyShardedDataParallel"), "torch FSDP2", id="fsdp2"),
        pytest.param(with_parameter(d_tensor()), "parameter weight .* DTensor", id="dtensor"),
    ],
)
def test_a_model_that_would_be_half_saved_is_refused(chunk: torch.nn.Module, name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        refuse_unsupported_model([Plain(), chunk])


@pytest.mark.parametrize("field", ["moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size"])
def test_rows_in_an_order_that_nothing_records_are_refused(field: str) -> None:
    model = Plain()
    model.config = SimpleNamespace(**{field: None})  # type: ignore[assignment]
    refuse_unsupported_model([model])
    model.config = SimpleNamespace(**{field: 32})  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match=f"{field} is 32"):
        refuse_unsupported_model([model])


def test_experts_for_inference_are_refused_in_training_and_once_they_have_run() -> None:
    model = Plain(module_named("InferenceGroupedMLP"))
    refuse_unsupported_model([model])  # as load_hf fills it, before the first forward
    model.ddp_config = SimpleNamespace(use_megatron_fsdp=False)  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match=r"module child .* TEGroupedMLP"):
        refuse_unsupported_model([model])
    del model.ddp_config
    model.child._concatenated_weights_built = True  # type: ignore[union-attr, assignment]
    with pytest.raises(UnsupportedError, match=r"module child .* TEGroupedMLP"):
        refuse_unsupported_model([model])


def test_a_wrapper_configured_for_fsdp_is_refused_and_plain_modules_pass() -> None:
    refuse_unsupported_model([Plain(Plain()), module_named("TEGroupedMLP"), module_named("SequentialMLP")])
    wrapper = Plain()
    wrapper.ddp_config = SimpleNamespace(use_megatron_fsdp=True)  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match="Megatron-FSDP"):
        refuse_unsupported_model([wrapper])


@pytest.mark.parametrize(
    ("topology", "expert", "allreduce", "refused"),
    [
        (Topology(tp=2, etp=1, ep=1), True, True, True),
        (Topology(tp=2, etp=1, ep=1), True, None, True),
        (Topology(tp=2, etp=1, ep=1), True, False, False),  # megatron 0.19 reduces them over their own replicas
        (Topology(tp=2, etp=1, ep=1), False, True, False),
        (Topology(tp=2, etp=2, ep=1), True, True, False),
        (Topology(tp=2, etp=1, ep=2), True, True, False),
    ],
)
def test_experts_that_drift_apart_are_refused(
    topology: Topology, expert: bool, allreduce: bool | None, refused: bool
) -> None:
    name = "decoder.layers.0.mlp.experts.linear_fc1.weight0"
    parameter = torch.nn.Parameter(torch.zeros(3))
    if allreduce is not None:
        parameter.allreduce = allreduce  # type: ignore[attr-defined]
    shard = LocalShard(ShardKey(name, "model"), Region.whole((3,)), parameter, expert=expert)
    if refused:
        with pytest.raises(UnsupportedError, match="EP=1 and ETP=1 ≠ TP=2"):
            refuse_unsupported_experts(topology, [shard])
    else:
        refuse_unsupported_experts(topology, [shard])


def test_a_tensor_that_all_experts_of_a_rank_share_is_refused() -> None:
    """As adapters on grouped experts: each expert-parallel rank has another one under the same name."""
    name = "decoder.layers.0.mlp.experts.linear_fc1.adapter.weight"
    shard = LocalShard(ShardKey(name, "model"), Region.whole((3,)), torch.zeros(3), expert=True)
    refuse_unsupported_experts(Topology(), [shard])
    with pytest.raises(UnsupportedError, match=r"adapter\.weight does not belong to one expert"):
        refuse_unsupported_experts(Topology(ep=2), [shard])


# -- process groups ----------------------------------------------------------------------------------------


@pytest.fixture
def groups() -> Iterator[dict[str, dist.ProcessGroup]]:
    """Groups of a world of four, of which this process is rank 0: the others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    ranks = {"alone": [0], "two": [0, 1], "others": [0, 2], "everyone": [0, 1, 2, 3]}
    yield {name: dist.new_group(members) for name, members in ranks.items()}
    dist.destroy_process_group()


def with_groups(child: dict[str, Any] | None = None, **own: Any) -> torch.nn.Module:
    model = Plain(Plain())
    model.pg_collection = SimpleNamespace(**own)  # type: ignore[assignment]
    if child is not None:
        model.child.pg_collection = SimpleNamespace(**child)  # type: ignore[union-attr, assignment]
    return model


def test_modules_with_other_groups_than_their_model_are_refused(groups: dict[str, dist.ProcessGroup]) -> None:
    two, others = groups["two"], groups["others"]
    refuse_unsupported_model([with_groups(tp=two, pp=groups["alone"])])
    refuse_unsupported_model([with_groups({"tp": two, "ep": others}, tp=two, pp=groups["alone"])])
    with pytest.raises(
        UnsupportedError, match=r"module child has the tp group \[0, 2\], but module Plain has \[0, 1\]"
    ):
        refuse_unsupported_model([with_groups({"tp": others}, tp=two)])
    with pytest.raises(
        UnsupportedError, match=r"module Plain has the pp group \[0, 2\], but module Plain has \[0, 1\]"
    ):
        refuse_unsupported_model([with_groups(pp=two), with_groups(pp=others)])


def test_modules_are_compared_with_the_groups_of_the_layout(groups: dict[str, dist.ProcessGroup]) -> None:
    """A model without a collection of its own may have a part with one."""
    alone, two, others, everyone = (groups[name] for name in ("alone", "two", "others", "everyone"))
    layout = ProcessGroups(tp=alone, pp=alone, cp=alone, dp=everyone, dp_cp=everyone)
    model = Plain(with_groups(tp=alone))
    refuse_unsupported_model([model], layout)
    model.child.pg_collection = SimpleNamespace(tp=others)  # type: ignore[union-attr, assignment]
    with pytest.raises(UnsupportedError, match=r"child has the tp group \[0, 2\], but the whole model has \[0\]"):
        refuse_unsupported_model([model], layout)
    part = ProcessGroups(tp=alone, pp=alone, cp=alone, dp=two, dp_cp=two)
    with pytest.raises(UnsupportedError, match=r"have 1 x 1 x 2 ranks .* but there are 4 ranks"):
        refuse_unsupported_model([Plain()], part)


def test_sharded_weights_are_refused_by_their_groups(groups: dict[str, dist.ProcessGroup]) -> None:
    refuse_unsupported_model([with_groups(gtp_remat=groups["alone"], expt_gtp_remat=None)])
    for name in ("gtp_remat", "expt_gtp_remat"):
        with pytest.raises(UnsupportedError, match="generalized tensor parallelism"):
            refuse_unsupported_model([with_groups(**{name: groups["two"]})])


@pytest.mark.parametrize("field", ["gtp_weight_remat_size", "expert_gtp_weight_remat_size"])
def test_sharded_weights_are_refused_by_their_configuration(field: str) -> None:
    model = Plain()
    model.config = SimpleNamespace(**{field: 1})  # type: ignore[assignment]
    refuse_unsupported_model([model])
    model.config = SimpleNamespace(**{field: 2})  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match=f"generalized tensor parallelism .*{field} is 2"):
        refuse_unsupported_model([model])


@pytest.mark.parametrize("name", ["get_gtp_weight_remat_world_size", "get_expert_gtp_weight_remat_world_size"])
def test_sharded_weights_are_refused_by_megatrons_state(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, name, lambda: 2, raising=False)
    with pytest.raises(UnsupportedError, match=f"generalized tensor parallelism .*{name}"):
        refuse_unsupported_model([Plain()])


def test_sharded_weights_are_refused_by_a_parameter() -> None:
    model = Plain()
    model.weight.is_gtp_weight_remat = True  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match=r"generalized tensor parallelism .*parameter weight"):
        refuse_unsupported_model([model])


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_tensors_whose_elements_share_memory_are_refused(kind: str) -> None:
    def with_tensor(tensor: torch.Tensor) -> torch.nn.Module:
        model = Plain(torch.nn.Module())
        if kind == "parameter":
            model.child.register_parameter("scale", torch.nn.Parameter(tensor, requires_grad=False))  # type: ignore[union-attr]
        else:
            model.child.register_buffer("scale", tensor)  # type: ignore[union-attr]
        return model

    sound = torch.zeros(4, 6)
    for tensor in (sound, sound.t(), sound[::2, 1:5], sound[:1].expand(1, 6), torch.zeros(0, 3).expand(2, 0, 3)):
        refuse_unsupported_model([with_tensor(tensor)])
    for tensor in (torch.zeros(1).expand(4), torch.zeros(3).expand(2, 3), torch.zeros(8).unfold(0, 4, 2)):
        with pytest.raises(UnsupportedError, match=r"tensor child\.scale of shape .* one place in memory"):
            refuse_unsupported_model([with_tensor(tensor)])
