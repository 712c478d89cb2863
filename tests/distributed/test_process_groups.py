"""Checkpoints of models with process groups of their own, while megatron's parallel_state is uninitialized."""

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_mixer import MambaMixer

from mcore_ckpt import CheckpointManager
from mcore_ckpt.cli.demo.tiny_trainer import tiny_config
from mcore_ckpt.state.model import model_shards
from mcore_ckpt.state.optimizer import read_optimizer
from tests.distributed.agreement import everywhere
from tests.distributed.checkpointing import manager_of, save
from tests.distributed.layouts import HAS_HYBRID, LAYOUTS
from tests.distributed.snapshot import assert_same, poison, snapshot
from tests.distributed.tiers import marks
from tests.distributed.training import Layout, build, parallel, train

STEP = 2
# MambaMixer.sharded_state_dict of 0.18 forgets to pass on the group that its caller gives, so such a model is refused.
MAMBA_ASKS_PARALLEL_STATE = HAS_HYBRID and inspect.getsource(MambaMixer.sharded_state_dict).count("dp_cp_group=") < 2
IN_CI = {"tower-pp2-tied", "pp2-vpp2", "cp2", "ep2", "tp2"}


@contextmanager
def no_parallel_state() -> Iterator[None]:
    """Hides megatron's own groups. Whatever asks for one of them in the block fails."""
    hidden = {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name.isupper()}
    for name in hidden:
        setattr(parallel_state, name, None)
    assert not parallel_state.model_parallel_is_initialized()
    try:
        yield
    finally:
        for name, value in hidden.items():
            setattr(parallel_state, name, value)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=name, marks=marks(layout.world, name in IN_CI))
        for name, layout in LAYOUTS.items()
        # With a pipeline layout megatron's own sharded_state_dict asks parallel_state for the pipeline rank
        # (PipelineParallelLayerLayout.get_layer_offset, 0.19), so such a model is refused.
        if layout.stages is None and not (layout.pattern and MAMBA_ASKS_PARALLEL_STATE)
    ],
)
def test_a_checkpoint_needs_no_parallel_state(layout: Layout, shared_path: Path) -> None:
    with parallel(layout):
        first = build(layout, seed=1)
        train(first, 0, STEP)
        with no_parallel_state():
            save(first, shared_path, STEP)
        at_save = snapshot(first)
        reference = train(first, STEP, STEP + 2)

        second = build(layout, seed=2)
        poison(second)
        with no_parallel_state():
            manager = manager_of(second, shared_path, load_replicas="broadcast")
            result = manager.load()
            manager.close()
        loaded = snapshot(second)
        with everywhere():
            assert result.step == STEP
            assert_same(loaded, at_save)
        resumed = train(second, STEP, STEP + 2)
        with everywhere():
            assert resumed == reference


def groups_of_its_own() -> ProcessGroupCollection:
    """Data parallelism over all ranks, in groups that megatron's parallel_state never sees."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    everyone = dist.new_group(list(range(dist.get_world_size())))
    names = {field.name for field in fields(ProcessGroupCollection)}
    of_all = {"dp", "dp_cp", "tp_dp_cp", "intra_dp_cp", "expt_dp", "intra_expt_dp", "dp_cp_gtp_remat", "intra_dist_opt"}
    of_one = {"tp", "pp", "mp", "cp", "tp_cp", "embd", "pos_embd", "ep", "expt_tp", "tp_ep", "tp_ep_pp"}
    wanted = dict.fromkeys(of_all & names, everyone) | dict.fromkeys(of_one & names, alone)
    return ProcessGroupCollection(**wanted, inter_dist_opt=None, hcp=None)


class OwnTraining:
    """A GPTModel, DistributedDataParallel and an optimizer on groups of their own."""

    def __init__(self, groups: ProcessGroupCollection, seed: int) -> None:
        self.groups = groups
        # Without these, megatron asks parallel_state.
        ranks = {"tp_rank": 0, "ep_rank": 0, "etp_rank": 0}
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed, **ranks)
        if parallel_state._GLOBAL_MEMORY_BUFFER is None:
            parallel_state._set_global_memory_buffer()
        config = tiny_config(num_layers=2, hidden_size=40, num_attention_heads=4, ffn_hidden_size=80)
        specs = get_gpt_layer_local_spec(normalization="RMSNorm")
        model = GPTModel(
            config, specs, vocab_size=131, max_sequence_length=8, position_embedding_type="rope", pg_collection=groups
        )
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
        self.model = DistributedDataParallel(config, ddp, model, pg_collection=groups)
        options = OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=True, params_dtype=torch.float32)
        self.optimizer = get_megatron_optimizer(
            options, [self.model], use_gloo_process_groups=False, pg_collection=groups
        )

    def step(self, number: int) -> float:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
        tokens = torch.randint(0, 131, (2, 9), generator=generator)
        positions = torch.arange(8).expand(2, 8)
        mask = torch.ones(8, 8, dtype=torch.bool).triu(1)[None, None]
        # megatron's own loss asks parallel_state until 0.18 (vocab_parallel_cross_entropy).
        logits = self.model(tokens[:, :-1].contiguous(), positions, mask)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        finalize_model_grads([self.model], pg_collection=self.groups)
        self.optimizer.step()
        return float(loss)

    def state(self) -> dict[str, torch.Tensor]:
        return {
            f"{state.name} {kind}": tensor.clone()
            for states in read_optimizer(self.optimizer, model_shards([self.model]), first_instance=True)
            for state in states
            for kind, tensor in {"param": state.main, **state.moments}.items()
        } | {name: tensor.clone() for name, tensor in self.model.state_dict().items() if tensor is not None}


@pytest.mark.world(2)
def test_a_training_that_never_had_parallel_state(shared_path: Path) -> None:
    assert not parallel_state.model_parallel_is_initialized()
    groups = groups_of_its_own()
    first = OwnTraining(groups, seed=1)
    for number in range(2):
        first.step(number)
    manager = CheckpointManager(shared_path, first.model, first.optimizer)
    manager.save(2)
    manager.close()
    wanted = first.state()
    reference = [first.step(number) for number in range(2, 4)]

    second = OwnTraining(groups, seed=2)
    for tensor in second.model.parameters():
        tensor.data.fill_(math.nan)
    manager = CheckpointManager(shared_path, second.model, second.optimizer)
    manager.load()
    manager.close()
    found = second.state()
    resumed = [second.step(number) for number in range(2, 4)]
    parallel_state._GLOBAL_MEMORY_BUFFER = None
    with everywhere():
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert resumed == reference
