"""A megatron optimizer that is not a chain, and the questions that saving and loading ask about this optimizer.

A kind of optimizer that keeps its state in another way derives from OptimizerPart and overrides the answers that
differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mcore_ckpt.errors import UnsupportedError
from mcore_ckpt.io.device_waits import wait_before_reading
from mcore_ckpt.sharding.plan import PARAM
from mcore_ckpt.state.optimizers.optimizer_kinds import OptimizerKind, Shapes, find_kind, kind_name
from mcore_ckpt.state.quantized import is_quantized

STEP = "step"
_FP32_BYTES = 4


@dataclass(frozen=True, eq=False)
class MainParameter:
    """A parameter on this rank, and the main parameter that the optimizer updates in its place.

    Attributes:
        parameter: the model's parameter.
        key: the tensor under which the optimizer keeps the parameter's state.
        main: the exact values of the elements that this rank owns.
        flat: the range `(start, stop)` of these elements in the parameter.
        is_model_view: whether `main` shares the memory of the model's parameter (fp32 training).
        upper: the upper 16 bits of each value (bfloat16), if `main` has only the lower bits (int16); None otherwise.
    """

    parameter: torch.Tensor
    key: torch.Tensor
    main: torch.Tensor
    flat: tuple[int, int]
    is_model_view: bool
    upper: torch.Tensor | None = None

    def copy_from(self, weight: torch.Tensor) -> None:
        """Sets the elements that this rank owns. `weight` has the values of the whole parameter."""
        own = weight.detach().reshape(-1)[slice(*self.flat)]
        self.main.copy_(own.view(self.main.shape))


class Keyed(Protocol):
    """A main parameter, and the tensor under which the optimizer keeps the parameter's state."""

    @property
    def key(self) -> torch.Tensor: ...
    @property
    def main(self) -> torch.Tensor: ...


@dataclass(frozen=True)
class Form:
    """The form in which an optimizer keeps the values of a main parameter or of a moment.

    Attributes:
        dtype: the dtype of the elements; None if the elements will be made in the checkpoint's dtype.
        is_scaled: whether a value is the element times a scale, which all elements of the tensor share.
        is_halved: whether the elements are the lower 16 bits of the values, and the model has the upper 16 bits.
    """

    dtype: torch.dtype | None
    is_scaled: bool = False
    is_halved: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the elements are the values."""
        return not (self.is_scaled or self.is_halved)


@dataclass(frozen=True)
class OptimizerPart:
    """A chained optimizer.

    Attributes:
        megatron: megatron's object.
        inner: the torch-like optimizer in that object; None if this rank has no parameters for it.
        is_of_owner: whether this data-parallel rank owns, as a whole, each parameter that the optimizer has
            (LayerWiseDistributedOptimizer).
    """

    megatron: Any
    inner: Any
    is_of_owner: bool = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [] if self.inner is None else self.inner.param_groups

    def group_numbers(self) -> dict[int, int]:
        """Returns the number of each parameter's group, by `id` of the tensor under which the state is kept."""
        groups = enumerate(self.param_groups)
        return {id(parameter): number for number, group in groups for parameter in group["params"]}

    @property
    def own_fields(self) -> tuple[str, ...]:
        """The fields of a param group that only this kind of optimizer has. They are neither saved nor loaded."""
        return ()

    @property
    def is_sharded(self) -> bool:
        """True if the state is divided among data-parallel ranks, and not replicated."""
        return self.is_distributed or self.is_of_owner

    @property
    def is_distributed(self) -> bool:
        """True for a DistributedOptimizer, which cuts parameters at any element."""
        return hasattr(self.megatron, "gbuf_ranges")

    @property
    def kind_name(self) -> str:
        """The name of the kind of state that the optimizer keeps. All variants of Adam keep the same kind."""
        return kind_name(self.inner)

    @property
    def kind(self) -> OptimizerKind | None:
        """The kind of state that the optimizer keeps; None if it has no parameters."""
        return find_kind(self.inner)

    # -- parameters and their state ------------------------------------------------------------------------

    def mains(self) -> Iterator[MainParameter]:
        """Yields all parameters that this rank's optimizer updates.

        Reads the groups in which megatron pairs model parameters with main parameters. Megatron's own
        `_get_main_param_and_optimizer_states` (0.16.1) finds a main parameter by its position in buffer order, although
        the groups list fp32 parameters first. If a group has parameters of two dtypes, that method mixes up main
        parameters.
        """
        owner = self.megatron
        if self.inner is None:
            return
        if self.is_distributed:
            for model_groups, main_groups, is_view in self._sharded_groups():
                for parameter, main in zip_groups(model_groups, main_groups):
                    owned = owner._get_model_param_range_map(parameter)["param"]
                    yield MainParameter(parameter, main, main, (owned.start, owned.end), is_view)
        elif hasattr(owner, "float16_groups"):
            for parameter, main in zip_groups(owner.float16_groups, owner.fp32_from_float16_groups):
                yield MainParameter(parameter, main, main, (0, parameter.numel()), False)
            yield from (whole(parameter) for group in owner.fp32_from_fp32_groups for parameter in group)
        else:
            yield from (whole(parameter) for group in self.param_groups for parameter in group["params"])

    @property
    def has_model_ranges(self) -> bool:
        """True if a DistributedOptimizer hands ranges of the model's own 16-bit parameters to its inner optimizer."""
        return bool(getattr(self.megatron.config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False))

    def _sharded_groups(self) -> Sequence[tuple[Any, Any, bool]]:
        """Returns a DistributedOptimizer's groups.

        Each entry has model parameters, their main parameters, and True if the main parameters are views.
        """
        owner = self.megatron
        fp32 = (owner.model_fp32_groups, owner.shard_fp32_groups, True)
        if self.has_model_ranges:
            # Megatron keeps no main parameters in this case (the list has `None`s). The inner optimizer gets ranges of
            # the model's own 16-bit parameters.
            return (owner.model_float16_groups, owner.shard_float16_groups, True), fp32
        return (owner.model_float16_groups, owner.shard_fp32_from_float16_groups, False), fp32

    def state_of(self, key: torch.Tensor) -> dict[str, Any]:
        """Returns the optimizer's state of a parameter by kind; empty before the first step. Makes no state."""
        # `state` is a defaultdict, so indexing it for a parameter without state would create an entry.
        return self.inner.state.get(key, {})

    def new_state_of(self, key: torch.Tensor) -> dict[str, Any]:
        """Returns the dict of a parameter's state, which the caller may change. Makes the dict if there is none."""
        return self.inner.state[key]

    def bytes_of_first_step(self) -> int:
        """Returns how many bytes of state the first step adds for each element of a parameter."""
        kind = self.kind
        return 0 if kind is None else _FP32_BYTES * (len(kind.moments) or len(kind.bound(self.inner, (1, 1))))

    def bound_shapes(self, main: torch.Tensor) -> Shapes:
        """Returns, by kind, the shapes of the state that belongs to this rank's whole part of a parameter."""
        kind = self.kind
        return {} if kind is None else kind.bound(self.inner, tuple(main.shape))

    def bound_tensor(self, key: torch.Tensor, kind: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor of the bound state, which the caller fills. Makes the tensor if there is none."""
        state = self.new_state_of(key)
        if state.get(kind) is None:
            state[kind] = torch.empty(tuple(shape), dtype=dtype, device=key.device)
        return state[kind]

    def forget_state_of(self, key: torch.Tensor, keep_main: bool) -> None:
        """Removes the state of a parameter that had done no step at the save.

        If `keep_main` is True, the main parameter stays, even if it is part of the state.
        """
        self.inner.state.pop(key, None)

    def form_of(self, each: Keyed, kind: str) -> Form:
        """Returns the form in which the main parameter (`param`) or a moment is kept. Makes no state."""
        live = each.main if kind == PARAM else self.state_of(each.key).get(kind)
        return Form(None if live is None else live.dtype)

    def scale_of(self, key: torch.Tensor, kind: str) -> torch.Tensor | None:
        """Returns the scale, one fp32 number, of state that is kept in a scaled form; None otherwise."""
        return None

    def live_scale_of(self, each: Keyed, kind: str) -> torch.Tensor:
        """Returns the scale of state that is kept in a scaled form, for the caller to fill. Makes missing state."""
        self.tensor_of(each, kind, torch.float32)
        scale = self.scale_of(each.key, kind)
        assert scale is not None, "the form is scaled"
        return scale

    def tensor_of(self, each: Keyed, kind: str, dtype: torch.dtype) -> torch.Tensor:
        """Returns the tensor with the elements of the main parameter or of a moment, for the caller to fill.

        If there is no such moment yet, this function makes it, with `dtype` unless the optimizer prescribes another
        dtype.
        """
        if kind == PARAM:
            return each.main
        moments = self.new_state_of(each.key)
        if moments.get(kind) is None:
            moments[kind] = torch.empty_like(each.main, dtype=dtype, requires_grad=False)
        return moments[kind]

    def encode(self, each: Keyed, kind: str, values: torch.Tensor) -> None:
        """Sets, from float32 values, a main parameter or a moment whose form is not plain (`Form.is_plain`)."""
        raise NotImplementedError(f"{type(self).__name__} keeps all state in a plain form")

    def watched(self) -> list[torch.Tensor]:
        """Returns the tensors that the optimizer updates. A save checks whether they are still the same tensors."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def watched_mains(self) -> list[torch.Tensor]:
        """Returns the main parameters that the optimizer makes and drops as part of its state."""
        return []

    # -- the number of steps -------------------------------------------------------------------------------

    def steps(self) -> set[float | int]:
        """Returns the numbers of steps that parameters of this part have done; empty before the first step."""
        return set() if self.inner is None else steps_of(self.inner)

    def write_step(self, step: float | int | None) -> None:
        """Sets the step of every param group, or of every parameter that has state, on this rank.

        Each parameter gets its own tensor. `DistributedOptimizer.load_state_dict` (0.16.1) shares one tensor among all
        parameters, so that Adam increments the shared step once per parameter.
        """
        if self.inner is not None:
            write_steps_of(self.inner, step)

    # -- after a load --------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Updates everything that follows from the main parameters and the state, except the model."""

    @property
    def changes_model(self) -> bool:
        """Whether filling the main parameters changes the model's parameters on this rank, but not on its replicas."""
        return False

    def copy_to_model(self) -> None:
        """Casts this rank's ranges of the main parameters into the model, as `step()` does after the update."""
        if self.inner is not None and hasattr(self.megatron, "_copy_main_params_to_model_params"):
            self.megatron._copy_main_params_to_model_params()

    def follow_model(self) -> None:
        """Sets the main parameters from the model, if only the model has been loaded.

        The main parameters of quantized weights stay as they are, because the load has filled them directly.
        """
        mains = list(self.mains())
        if not any(is_quantized(each.parameter) for each in mains):
            self.megatron.reload_model_params()
            return
        with torch.no_grad():
            for each in mains:
                if not is_quantized(each.parameter):
                    each.copy_from(each.parameter)


def whole(parameter: torch.Tensor) -> MainParameter:
    """Returns a parameter that is its own main parameter."""
    return MainParameter(parameter, parameter, parameter, (0, parameter.numel()), True)


def zip_groups(first: Any, second: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields the pairs of tensors at the same places of two lists of lists."""
    for a, b in zip(first, second, strict=True):
        yield from zip(a, b, strict=True)


def steps_in_groups(inner: Any) -> bool:
    """True if the step is in the param groups (transformer-engine's FusedAdam), not in `state` (torch's Adam)."""
    return any(cls.__name__ == "FusedAdam" for cls in type(inner).__mro__)


def steps_of(inner: Any) -> set[float | int]:
    """Returns the numbers of steps that the parameters of a torch-like optimizer have done."""
    if steps_in_groups(inner):
        return {group[STEP] for group in inner.param_groups if group["params"] and STEP in group}
    return _numbers([state[STEP] for state in inner.state.values() if STEP in state])


def write_steps_of(inner: Any, step: float | int | None) -> None:
    """Sets the step of a torch-like optimizer, in its param groups or in its state."""
    if steps_in_groups(inner):
        for group in inner.param_groups:
            group.pop(STEP, None)
            if step is not None:
                group[STEP] = int(step)
        return
    kind = find_kind(inner)
    if step is None or (kind is not None and not kind.has_step):
        return
    is_int = kind is not None and kind.step_is_int
    on_device = {id(p) for g in inner.param_groups if g.get("capturable") or g.get("fused") for p in g["params"]}
    for parameter, state in inner.state.items():
        device = parameter.device if id(parameter) in on_device else torch.device("cpu")
        state[STEP] = int(step) if is_int else torch.tensor(float(step), dtype=torch.float32, device=device)


def _numbers(steps: Sequence[Any]) -> set[float | int]:
    # Without this context, a TorchFunctionMode, such as a profiler's, would be called for each of thousands of tensors.
    with torch._C.DisableTorchFunction():
        tensors = [step for step in steps if isinstance(step, torch.Tensor)]
        numbers = {step for step in steps if not isinstance(step, torch.Tensor)}
        on_device = [step for step in tensors if not step.is_cpu]
        numbers.update(map(torch.Tensor.item, (step for step in tensors if step.is_cpu)))
        # All these steps are transferred together, because each transfer waits for the device.
        if on_device:
            wait_before_reading(on_device[0])
        return numbers.union(torch.stack(on_device).tolist() if on_device else ())


def read_step(part: OptimizerPart) -> float | int | None:
    """Returns the number of steps that a part has done on this rank; None if the part has done no step on this rank.

    Raises UnsupportedError: parameters have done different numbers of steps, which a single number cannot restore, or
    the number is not finite.
    """
    steps = part.steps()
    if len(steps) > 1:
        raise UnsupportedError(
            f"parameters of {type(part.inner).__name__} have done different numbers of steps: {sorted(steps)}"
        )
    step = steps.pop() if steps else None
    if step is not None and not math.isfinite(step):
        raise UnsupportedError(
            f"parameters of {type(part.inner).__name__} have done {step} steps: the state is damaged"
        )
    return step
