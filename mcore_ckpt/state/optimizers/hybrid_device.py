"""HybridDeviceOptimizer (`optimizer_cpu_offload`), which updates some of the parameters in host memory.

megatron-core 0.16 to 0.19 have the same class. The class has one inner optimizer for the parameters that stay on the
device, and one or several inner optimizers for the parameters in host memory. Each parameter of HybridDeviceOptimizer
(an outer parameter) has an inner parameter, which one of the inner optimizers updates: a copy in host memory, a copy in
fp32, or the outer parameter itself. The inner parameter has the exact values.

A save stores the inner parameter, and a load fills it. After a load, the inner parameter is copied to the outer
parameter, and `_sync_sub_optimizers_state_to_hdo` makes the outer state show the inner state again. The number of steps
is set only in the inner optimizers. If the outer groups had a number of steps, megatron would copy that number to the
inner optimizers before every step. The arguments of the constructor, which torch puts into the groups, are not saved,
so that a run with another offload fraction can load the groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from mcore_ckpt.state.group_fields import IMPLEMENTATION
from mcore_ckpt.state.optimizers.optimizer_kinds import OptimizerKind, find_kind, kind_name, kind_name_of
from mcore_ckpt.state.optimizers.part import MainParameter, OptimizerPart, steps_of, write_steps_of
from mcore_ckpt.state.quantized import is_quantized

# Entries of the state that are not saved: the inner parameter itself, which `_sync_sub_optimizers_state_to_hdo` adds
# after each step, and entries that megatron's own save as dp_reshardable (0.16) leaves behind.
_NO_STATE = ("master_param", "padding")
# Arguments of HybridDeviceOptimizer's constructor that control where and how the optimizer works. torch's Optimizer
# puts these arguments into the groups.
ARGUMENTS = (
    *("offload_fraction", "cpu_optimizer_cls", "gpu_optimizer_cls", "param_update_in_fp32", "pin_cpu_grads"),
    *("pin_cpu_params", "overlap_cpu_optimizer_d2h_h2d"),
)


class HybridDevicePart(OptimizerPart):
    """A HybridDeviceOptimizer in megatron's DistributedOptimizer."""

    @property
    def kind_name(self) -> str:
        names = {kind_name(each) for each in self.inner.sub_optimizers}
        if not names:
            # The optimizer has no parameters on this rank. An argument of its constructor names the class.
            return kind_name_of(self.inner.defaults["gpu_optimizer_cls"])
        return names.pop() if len(names) == 1 else f"HybridDeviceOptimizer of {', '.join(sorted(names))}"

    @property
    def kind(self) -> OptimizerKind | None:
        return next(map(find_kind, self.inner.sub_optimizers), None)

    @property
    def own_fields(self) -> tuple[str, ...]:
        # The groups have all arguments of the constructor. Only the arguments that the inner optimizers use are saved.
        return (*ARGUMENTS, *IMPLEMENTATION)

    def group_numbers(self) -> dict[int, int]:
        inner, groups = self.inner.param_to_inner_param, enumerate(self.param_groups)
        return {id(inner[parameter]): number for number, group in groups for parameter in group["params"]}

    def mains(self) -> Iterator[MainParameter]:
        inner = self.inner.param_to_inner_param
        for each in super().mains():
            main = inner[each.main]
            yield replace(each, key=main, main=main, is_model_view=each.is_model_view and main is each.main)

    def state_of(self, key: torch.Tensor) -> dict[str, Any]:
        found = self._optimizer_of(key).state.get(key, {})
        return {kind: value for kind, value in found.items() if kind not in _NO_STATE}

    def new_state_of(self, key: torch.Tensor) -> dict[str, Any]:
        return self._optimizer_of(key).state[key]

    def forget_state_of(self, key: torch.Tensor, keep_main: bool) -> None:
        self._optimizer_of(key).state.pop(key, None)

    def _optimizer_of(self, key: torch.Tensor) -> Any:
        """Returns the optimizer that updates an inner parameter."""
        owners = self.__dict__.get("_owners")
        if owners is None or id(key) not in owners:
            owners = {
                id(parameter): optimizer
                for optimizer in self.inner.sub_optimizers
                for group in optimizer.param_groups
                for parameter in group["params"]
            }
            self.__dict__["_owners"] = owners
        return owners[id(key)]

    def watched(self) -> list[torch.Tensor]:
        inner = self.inner.param_to_inner_param
        return [inner[parameter] for parameter in super().watched()]

    def steps(self) -> set[float | int]:
        return set().union(*map(steps_of, self.inner.sub_optimizers))

    def write_step(self, step: float | int | None) -> None:
        # The outer groups must not get a number of steps, because `_sync_hdo_param_groups_to_sub_optimizers` would copy
        # this number to the inner optimizers before every step.
        for optimizer in self.inner.sub_optimizers:
            write_steps_of(optimizer, step)

    @property
    def changes_model(self) -> bool:
        # If the outer parameters are ranges of the model's parameters, `refresh` rounds main parameters into the model.
        return self.has_model_ranges

    def refresh(self) -> None:
        self._copy_to_outer()
        self.inner._sync_sub_optimizers_state_to_hdo()

    def _copy_to_outer(self) -> None:
        with torch.no_grad():
            for outer, main in self.inner.param_to_inner_param.items():
                if main is not outer:
                    outer.data.copy_(main.data)

    def copy_to_model(self) -> None:
        self.refresh()
        super().copy_to_model()

    def follow_model(self) -> None:
        # Do not call `_copy_model_params_to_main_params` (0.16 to 0.19), which only calls
        # `update_fp32_param_by_new_param`, and so leaves out fp32 parameters that have a copy in host memory.
        with torch.no_grad():
            for each in self.mains():
                if not is_quantized(each.parameter):
                    each.copy_from(each.parameter)
        self._copy_to_outer()
