"""The plan of a save is made once, and anew as soon as anything it names is another."""

import copy
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.save.plan import SavePlan, SavePlanner
from mcore_ckpt.state.model import model_shards
from tests.support.unsharded_model import sharded_state_dict, trainer_of


class Tiny(torch.nn.Module):
    """All kinds of things a megatron module keeps, one of each."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_layers=1)
        self.weight = torch.nn.Parameter(torch.rand(3, 4))
        self.inner = torch.nn.Linear(4, 2)
        self.frozen = torch.nn.Parameter(torch.rand(2), requires_grad=False)
        self.bare = torch.nn.Module()
        self.register_buffer("counts", torch.zeros(5))
        self.register_buffer("scratch", torch.zeros(6), persistent=False)
        self.extra: torch.Tensor | None = torch.arange(7, dtype=torch.uint8)

    def get_extra_state(self) -> torch.Tensor | None:
        return None if self.extra is None else self.extra.clone()

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.extra = state

    def sharded_state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
        return sharded_state_dict(self)


class Training:
    def __init__(self) -> None:
        self.model = Tiny()
        self.adam = torch.optim.Adam(self.trained())
        # As Float16OptimizerWithFloat16Params and FP32Optimizer keep it.
        self.optimizer = SimpleNamespace(optimizer=self.adam)
        self.planner = SavePlanner()

    def trained(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def step(self) -> None:
        for parameter in self.trained():
            parameter.grad = torch.rand_like(parameter)
        self.adam.step()

    def plan(self) -> SavePlan:
        return self.planner.plan(trainer_of(self.model, self.optimizer))

    def state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.adam.state[parameter]


@pytest.fixture
def trainer() -> Training:
    made = Training()
    made.step()
    return made


def planned(plan: SavePlan) -> dict[tuple[str, str], torch.Tensor]:
    """What is written, by name and kind."""
    found = {}
    for file, tensors in zip(plan.files, plan.tensors, strict=True):
        for write, slot, tensor in zip(file.request.tensors, file.pt.slots, tensors.tensors, strict=True):
            assert slot.nbytes == tensor.nbytes, write.key
            found[write.key.name, write.key.kind] = tensor
    return found


def live(trainer: Training) -> dict[tuple[str, str], torch.Tensor]:
    """What should be, found without the package under test."""
    model = trainer.model
    found = {(name, "model"): tensor for name, tensor in model.named_parameters()}
    found |= {(name, "model"): tensor for name, tensor in model.named_buffers() if name != "scratch"}
    for name, parameter in model.named_parameters():
        state = trainer.adam.state.get(parameter, {})
        found |= {(name, kind): value for kind, value in state.items() if kind != "step"}
    return found


def assert_current(trainer: Training, plan: SavePlan) -> None:
    found, wanted = planned(plan), live(trainer)
    opaque = found.pop(("_extra_state", "opaque"), None)
    assert found.keys() == wanted.keys()
    for key, tensor in found.items():
        assert tensor is wanted[key], key
    assert (opaque is None) == (trainer.model.extra is None)
    assert opaque is None or torch.equal(opaque, trainer.model.extra)  # type: ignore[arg-type]


def test_a_plan_has_all_that_there_is(trainer: Training) -> None:
    plan = trainer.plan()
    assert [file.request.kind for file in plan.files] == ["model", "optimizer"]
    assert_current(trainer, plan)
    buffers = {plan.files[file].request.tensors[number].key.name for file, number in plan.buffers}
    assert buffers == {"counts", "_extra_state"}
    assert not plan.on_gpu
    # In fp32 training the main parameters are the model's: written once.
    aliases = {alias.key.name for alias in plan.files[1].request.aliases}
    assert aliases == {"weight", "inner.weight", "inner.bias"}


def grow_nothing(trainer: Training) -> None: ...


def train(trainer: Training) -> None:
    trainer.step()
    trainer.model.counts += 1


def new_data(trainer: Training) -> None:
    trainer.model.weight.data = torch.rand(3, 4)


def new_extra(trainer: Training) -> None:
    trainer.model.extra = torch.arange(7, dtype=torch.uint8) + 1


def new_scratch(trainer: Training) -> None:
    trainer.model.scratch = torch.ones(9)


def stray_state(trainer: Training) -> None:
    """Of a parameter that is in no group any more."""
    trainer.adam.state[torch.nn.Parameter(torch.zeros(2))] = {"exp_avg": torch.zeros(2)}


@pytest.mark.parametrize("change", [grow_nothing, train, new_data, new_extra, new_scratch, stray_state])
def test_the_plan_holds_while_its_tensors_are_the_same(trainer: Training, change: Callable[[Training], None]) -> None:
    first = trainer.plan()
    for _ in range(2):
        change(trainer)
        again = trainer.plan()
        assert again.files is first.files
        assert_current(trainer, again)


def new_parameter(trainer: Training) -> None:
    old = trainer.model.weight
    trainer.model.weight = torch.nn.Parameter(old.detach().clone())
    (group,) = trainer.adam.param_groups
    group["params"] = trainer.trained()
    trainer.adam.state[trainer.model.weight] = trainer.adam.state.pop(old)


def new_frozen_parameter(trainer: Training) -> None:
    """Of which the optimizer knows nothing."""
    trainer.model.frozen = torch.nn.Parameter(torch.rand(2), requires_grad=False)


def new_moment(trainer: Training) -> None:
    state = trainer.state_of(trainer.model.weight)
    state["exp_avg"] = state["exp_avg"].clone()


def moments_go(trainer: Training) -> None:
    trainer.adam.state.clear()


def a_moment_more(trainer: Training) -> None:
    for parameter in trainer.trained():
        trainer.state_of(parameter)["max_exp_avg_sq"] = torch.zeros_like(parameter)


def new_buffer(trainer: Training) -> None:
    trainer.model.counts = trainer.model.counts.clone()


def first_buffer(trainer: Training) -> None:
    """Of a module that had none. In the middle of the model: megatron registers some when they are first needed."""
    trainer.model.inner.register_buffer("late", torch.zeros(3))


def first_parameter(trainer: Training) -> None:
    trainer.model.bare.late = torch.nn.Parameter(torch.zeros(3), requires_grad=False)


def first_child(trainer: Training) -> None:
    trainer.model.bare.late = torch.nn.LayerNorm(3)
    for parameter in trainer.model.bare.late.parameters():
        parameter.requires_grad = False


def other_dtype(trainer: Training) -> None:
    trainer.model.inner.weight.data = trainer.model.inner.weight.data.bfloat16()


def other_shape(trainer: Training) -> None:
    trainer.adam.state.clear()
    trainer.model.weight.data = torch.rand(4, 3)


def same_bytes_of_another_shape(trainer: Training) -> None:
    trainer.adam.state.clear()
    trainer.model.weight.data = trainer.model.weight.data.view(12)


def longer_extra(trainer: Training) -> None:
    trainer.model.extra = torch.arange(30, dtype=torch.uint8)


def no_extra(trainer: Training) -> None:
    trainer.model.extra = torch.empty(0, dtype=torch.uint8)


def new_module(trainer: Training) -> None:
    """The same parameter, under another name."""
    trainer.model.outer = trainer.model.inner
    del trainer.model.inner


@pytest.mark.parametrize(
    "change",
    [
        new_parameter,
        new_frozen_parameter,
        new_moment,
        moments_go,
        a_moment_more,
        new_buffer,
        first_buffer,
        first_parameter,
        first_child,
        other_dtype,
        other_shape,
        same_bytes_of_another_shape,
        longer_extra,
        no_extra,
        new_module,
    ],
)
def test_the_plan_is_made_anew_when_something_is_another(trainer: Training, change: Callable[[Training], None]) -> None:
    first = trainer.plan()
    change(trainer)
    again = trainer.plan()
    assert again.files is not first.files
    assert_current(trainer, again)
    assert trainer.plan().files is again.files


def test_moments_that_appear_with_the_first_step_are_in_the_next_plan() -> None:
    trainer = Training()
    assert_current(trainer, trainer.plan())
    trainer.step()
    plan = trainer.plan()
    assert_current(trainer, plan)
    assert ("inner.weight", "exp_avg_sq") in planned(plan)


def test_an_extra_state_that_appears_is_in_the_next_plan(trainer: Training) -> None:
    """As a module's does that has none (None, not an empty one) until it is asked to compute in fp8."""
    trainer.model.extra = None
    assert_current(trainer, trainer.plan())
    trainer.model.extra = torch.arange(7, dtype=torch.uint8)
    assert_current(trainer, trainer.plan())


def test_a_plan_that_could_not_be_made_is_not_kept(trainer: Training) -> None:
    trainer.plan()
    state = trainer.state_of(trainer.model.weight)
    state["odd"] = "text"  # type: ignore[assignment]
    for _ in range(2):
        with pytest.raises(Exception, match="'odd' of weight is a str"):
            trainer.plan()
    del state["odd"]
    assert_current(trainer, trainer.plan())


def test_what_the_trainer_lets_go_is_gone(trainer: Training) -> None:
    """Between saves: an optimizer that is offloaded puts copies in the place of its moments, to free the GPU."""
    trainer.plan()
    old = weakref.ref(trainer.state_of(trainer.model.weight)["exp_avg"])
    new_moment(trainer)
    gc.collect()
    assert old() is None


def test_what_load_state_dict_puts_in_place_is_saved(trainer: Training) -> None:
    """torch puts a new `state` and new `param_groups` on the optimizer; the old ones live on, unchanged."""
    trainer.plan()
    trainer.adam.load_state_dict(copy.deepcopy(trainer.adam.state_dict()))
    trainer.step()
    assert_current(trainer, trainer.plan())


def test_a_new_state_of_the_optimizer_is_saved(trainer: Training) -> None:
    trainer.plan()
    trainer.adam.state = {p: {k: v.clone() for k, v in s.items()} for p, s in trainer.adam.state.items()}  # type: ignore[assignment]
    assert_current(trainer, trainer.plan())


def test_a_late_param_group_is_saved(trainer: Training) -> None:
    trainer.plan()
    late = trainer.model.frozen
    late.requires_grad_(True)
    trainer.adam.add_param_group({"params": [late]})
    trainer.step()
    assert_current(trainer, trainer.plan())


def test_moments_that_are_dropped_are_freed(trainer: Training) -> None:
    trainer.plan()
    old = weakref.ref(trainer.state_of(trainer.model.weight)["exp_avg"])
    trainer.adam.state.clear()
    gc.collect()
    assert old() is None


def test_a_tensor_without_memory_is_refused_by_name(trainer: Training) -> None:
    """As megatron's buffers leave it when they are offloaded: it has its shape, and somebody else's address."""
    trainer.plan()
    trainer.state_of(trainer.model.weight)["exp_avg"].untyped_storage().resize_(0)
    with pytest.raises(UnsupportedError, match=r"weight \(exp_avg\) has no memory"):
        trainer.plan()


class Adapted(torch.nn.Module):
    """As Megatron-Bridge's `AdapterWrapper`: the layer keeps its names in `state_dict`."""

    def __init__(self, base: Tiny) -> None:
        super().__init__()
        self.to_wrap = base

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:  # type: ignore[override]
        return self.to_wrap.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)

    def sharded_state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
        return self.to_wrap.sharded_state_dict(metadata)


def test_the_extra_state_of_a_layer_with_an_adapter_is_the_layers() -> None:
    adapted = Adapted(Tiny())
    (shard,) = [shard for shard in model_shards([adapted]) if shard.refresh is not None]
    assert shard.restore is not None
    shard.restore(torch.ones(3, dtype=torch.uint8))
    refreshed = shard.refresh()
    assert refreshed is not None
    assert refreshed.tolist() == [1, 1, 1]
