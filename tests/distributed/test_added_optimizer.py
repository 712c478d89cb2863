"""An optimizer that this package does not know, added in the way that CONTRIBUTING.md says."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron.core.optimizer
import pytest
import torch

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.state.optimizers import chain, optimizer_kinds
from mcore_ckpt.state.optimizers.optimizer_kinds import OptimizerKind
from mcore_ckpt.state.optimizers.part import OptimizerPart
from tests.distributed.agreement import everywhere
from tests.distributed.checkpointing import manager_of, save
from tests.distributed.global_state import assert_same_state, global_state
from tests.distributed.resuming import loaded
from tests.distributed.training import Layout, build, parallel, train

LAYOUT = Layout(2, precision="bf16", optimizer="sgd", distributed_optimizer=False, padded_vocab=144)


class HeavyBall(torch.optim.Optimizer):
    """Keeps its velocities in a dict of its own."""

    def __init__(self, params: Any, lr: float, weight_decay: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "friction": 1 - momentum})
        self.velocities: dict[torch.Tensor, dict[str, Any]] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                kept = self.velocities.setdefault(param, {"velocity": torch.zeros_like(param), "step": 0})
                kept["velocity"].mul_(1 - group["friction"]).add_(param.grad)
                kept["step"] += 1
                param.sub_(group["lr"] / kept["step"] * kept["velocity"])


class HeavyBallPart(OptimizerPart):
    def state_of(self, key: torch.Tensor) -> dict[str, Any]:
        return self.inner.velocities.get(key, {})

    def new_state_of(self, key: torch.Tensor) -> dict[str, Any]:
        return self.inner.velocities.setdefault(key, {})

    def forget_state_of(self, key: torch.Tensor, keep_main: bool) -> None:
        self.inner.velocities.pop(key, None)

    def steps(self) -> set[float | int]:
        return {kept["step"] for kept in self.inner.velocities.values()}

    def write_step(self, step: float | int | None) -> None:
        for kept in self.inner.velocities.values():
            kept["step"] = step


@pytest.fixture
def heavy_ball(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron.core.optimizer, "SGD", HeavyBall)


def add(monkeypatch: pytest.MonkeyPatch) -> None:
    added = OptimizerKind("HeavyBall", ("HeavyBall",), ("velocity",), has_step=True)
    monkeypatch.setattr(optimizer_kinds, "KINDS", (*optimizer_kinds.KINDS, added))
    monkeypatch.setitem(chain._PARTS, "velocities", HeavyBallPart)


@pytest.mark.world(2)
@pytest.mark.usefixtures("heavy_ball")
def test_it_is_refused_until_it_is_added_and_then_goes_on(shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with parallel(LAYOUT):
        first = build(LAYOUT, seed=1)
        with pytest.raises(UnsupportedError, match="optimizer HeavyBall is not supported: use one of Adam, "):
            manager_of(first, shared_path)
        add(monkeypatch)
        train(first, 0, 2)
        save(first, shared_path, 2)
        state, reference = global_state(first), train(first, 2, 4)
        second, _ = loaded(LAYOUT, shared_path)
        found, resumed = global_state(second), train(second, 2, 4)
        with everywhere():
            assert_same_state(found, state)
            assert any(name.endswith(" velocity") for name in state)
            assert resumed == reference
    other = replace(LAYOUT, tp=2)
    with parallel(other):
        found = global_state(loaded(other, shared_path)[0])
        with everywhere():
            assert_same_state(found, state)


class SlowSGD(torch.optim.SGD):
    """Derived from a known optimizer, with one more moment."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for param, kept in self.state.items():
            kept.setdefault("slow", torch.zeros_like(param)).lerp_(kept["momentum_buffer"], 0.1)
            param.sub_(0.01 * kept["slow"])


@pytest.mark.world(2)
def test_a_derived_optimizer_may_keep_more(shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron.core.optimizer, "SGD", SlowSGD)
    with parallel(LAYOUT):
        first = build(LAYOUT, seed=1)
        train(first, 0, 2)
        save(first, shared_path, 2)
        state, reference = global_state(first), train(first, 2, 4)
        second, _ = loaded(LAYOUT, shared_path)
        found, resumed = global_state(second), train(second, 2, 4)
        with everywhere():
            assert any(name.endswith(" slow") for name in state)
            assert_same_state(found, state)
            assert resumed == reference
