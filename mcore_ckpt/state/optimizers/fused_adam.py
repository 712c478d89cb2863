"""transformer-engine's FusedAdam, which may keep main parameters itself, and may keep its state in 16 or 8 bits.

megatron's `use_precision_aware_optimizer` (0.16 to 0.19) turns on both features. FusedAdam then gets ranges of the
model's own parameters, and its state has the main parameter of each range as `master_param`. State tensors of fp16 and
fp8 have a scale. With `store_param_remainders`, `master_param` has the lower 16 bits of each value, and the model's
bfloat16 parameter has the upper 16 bits, rounded half up. A value's bits are `(parameter << 16) + master_param`, so the
two tensors may only change together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from mcore_ckpt.checkpoint.halves import split_halves
from mcore_ckpt.sharding.plan import PARAM
from mcore_ckpt.state.optimizers.part import STEP, Form, Keyed, MainParameter, OptimizerPart

_MAIN = "master_param"
# The dtypes of tensors that have a scale: float16, and uint8 for the bits of float8_e4m3fn.
_SCALED = (torch.float16, torch.uint8)


class FusedAdamPart(OptimizerPart):
    """FusedAdam (transformer-engine 1.13 and newer) in megatron's DistributedOptimizer."""

    def mains(self) -> Iterator[MainParameter]:
        for each in super().mains():
            main = self._state(each.key).get(_MAIN) if self._has_main(each.key) else None
            if main is None:
                # Before the first step, a parameter is its own main parameter. An fp32 parameter remains its own main
                # parameter: FusedAdam makes a `master_param` for it, but never updates this tensor.
                yield each
            else:
                upper = each.key if self._is_halved(each.key) else None
                yield replace(each, main=main, is_model_view=False, upper=upper)

    def state_of(self, key: torch.Tensor) -> dict[str, Any]:
        if not any(STEP in group for group in self.param_groups):
            return {}  # moments that exist now are zeros, which a load has made together with a main parameter
        return {kind: _elements(value) for kind, value in self._state(key).items() if kind != _MAIN}

    def bytes_of_first_step(self) -> int:
        dtypes = self.inner.name_to_dtype_map
        main = 0
        if self.inner.master_weights:
            halved = getattr(self.inner, "store_param_remainders", False)
            main = torch.int16.itemsize if halved else dtypes[_MAIN].itemsize
        return main + sum(dtype.itemsize for name, dtype in dtypes.items() if name != _MAIN)

    def watched_mains(self) -> list[torch.Tensor]:
        return [state[_MAIN] for state in self.inner.state.values() if _MAIN in state]

    def forget_state_of(self, key: torch.Tensor, keep_main: bool) -> None:
        state = self.inner.state.pop(key, {})
        if keep_main and self._has_main(key):
            scale = self.inner._scales.get(key, {}).get(_MAIN)
            self._make_state(key)
            self._state(key)[_MAIN] = state[_MAIN]
            if scale is not None:
                self.inner._scales[key][_MAIN].copy_(scale)

    def form_of(self, each: Keyed, kind: str) -> Form:
        if kind == PARAM and not self._has_main(each.key):
            return Form(each.key.dtype)
        if kind == PARAM and self._is_halved(each.key):
            return Form(torch.int16, is_halved=True)
        dtype = self.inner.name_to_dtype_map.get(_name(kind))
        return Form(dtype, is_scaled=dtype in _SCALED)

    def scale_of(self, key: torch.Tensor, kind: str) -> torch.Tensor | None:
        name = _name(kind)
        kept = self._state(key).get(name)
        dtype = self.inner.name_to_dtype_map.get(name)
        if kept is None or (kind == PARAM and not self._has_main(key)) or dtype not in _SCALED:
            return None
        # A Float8Tensor has its own scale. FusedAdam keeps a copy of this scale, but never reads that copy.
        return kept._scale_inv if dtype == torch.uint8 else self.inner._scales[key][name]

    def tensor_of(self, each: Keyed, kind: str, dtype: torch.dtype) -> torch.Tensor:
        if kind == PARAM and not self._has_main(each.key):
            return each.key
        if _name(kind) not in self._state(each.key):
            self._make_state(each.key)
        return _elements(self._state(each.key)[_name(kind)])

    def encode(self, each: Keyed, kind: str, values: torch.Tensor) -> None:
        elements = self.tensor_of(each, kind, torch.float32)
        if kind != PARAM or not self._is_halved(each.key):
            # Pass a copy, because `set_scaled_state` divides its argument in place.
            self.inner.set_scaled_state(each.key, _name(kind), values.clone())
            return
        upper, lower = split_halves(values)
        elements.copy_(lower)
        each.key.data.copy_(upper)

    def _make_state(self, key: torch.Tensor) -> None:
        # `init_state_fn` of megatron (0.16 to 0.19) leaves out the second argument, which versions of
        # transformer-engine with support for remainders need.
        remainders = (self._is_halved(key),) if hasattr(self.inner, "store_param_remainders") else ()
        self.inner.initialize_state(key, *remainders)

    def _state(self, key: torch.Tensor) -> dict[str, Any]:
        return self.inner.state.get(key, {})

    def _has_main(self, key: torch.Tensor) -> bool:
        """Returns True if FusedAdam's state has the main parameter. An fp32 parameter is its own main parameter."""
        return bool(self.inner.master_weights) and key.dtype != torch.float32

    def _is_halved(self, key: torch.Tensor) -> bool:
        return bool(getattr(self.inner, "store_param_remainders", False)) and key.dtype == torch.bfloat16

    # -- after a load --------------------------------------------------------------------------------------

    @property
    def changes_model(self) -> bool:
        return bool(self.inner.master_weights and getattr(self.inner, "store_param_remainders", False))

    def refresh(self) -> None:
        # Copy fp32 parameters into their `master_param`, because megatron's own save reads `master_param`, but
        # FusedAdam does not update it for fp32 parameters.
        for key, state in self.inner.state.items():
            if _MAIN in state and not self._has_main(key):
                self.inner.set_scaled_state(key, _MAIN, key.detach().clone())

    def copy_to_model(self) -> None:
        super().copy_to_model()
        for each in self.mains():
            if not each.is_model_view and not self._is_halved(each.key) and self._has_main(each.key):
                each.key.data.copy_(self.inner.get_unscaled_state(each.key, _MAIN))

    def follow_model(self) -> None:
        # Set the main parameters here, too, because `_copy_model_params_to_main_params` (0.16 to 0.19) does nothing if
        # FusedAdam has the main parameters.
        super().follow_model()
        for each in self.mains():
            if self._has_main(each.key) and _MAIN in self._state(each.key):
                self._follow(each)

    def _follow(self, each: MainParameter) -> None:
        values = each.key.detach().float()
        if self.form_of(each, PARAM).is_plain:
            each.main.copy_(values)
        else:
            self.encode(each, PARAM, values)


def _name(kind: str) -> str:
    return _MAIN if kind == PARAM else kind


def _elements(value: Any) -> torch.Tensor:
    """Returns the tensor itself, or the bytes of a Float8Tensor."""
    return value._data if hasattr(value, "_scale_inv") else value
