"""A stand-in for transformer-engine's FusedAdam on a CPU, for megatron's `use_precision_aware_optimizer`.

It keeps its state as the real one does (2.9, fused_adam.py): `master_param` beside the moments, fp16 and fp8 with a
scale, remainders of 16 bits. So it proves that the layout of the state survives, and not the kernels. On a GPU the real
one is used.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from packaging.version import Version

MAIN = "master_param"
RANGES = {torch.float16: torch.finfo(torch.float16).max / 2, torch.uint8: 448.0}


class Float8Tensor:
    """Bits of float8_e4m3fn, with the scale that they are multiplied by and the one that their values were."""

    def __init__(self, shape: torch.Size) -> None:
        self._data = torch.zeros(shape, dtype=torch.uint8)
        self._scale_inv = torch.ones(1)
        self._quantizer = SimpleNamespace(scale=torch.ones(1))

    def copy_(self, values: torch.Tensor) -> None:
        scaled = (values * self._quantizer.scale).nan_to_num(0.0).clamp(-448, 448)
        self._data.copy_(scaled.to(torch.float8_e4m3fn).view(torch.uint8))
        self._scale_inv.copy_(self._quantizer.scale.reciprocal())

    def float(self) -> torch.Tensor:
        return self._data.view(torch.float8_e4m3fn).float() * self._scale_inv


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        assert (adam_w_mode, capturable) == (True, False)
        self.master_weights = master_weights
        self.name_to_dtype_map = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            MAIN: master_weight_dtype,
        }
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights and master_weight_dtype == torch.float32
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def _has_remainders(self, param: torch.Tensor) -> bool:
        return self.store_param_remainders and param.dtype == torch.bfloat16

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        for name in ("exp_avg", "exp_avg_sq"):
            self._initialize(param, name, self.name_to_dtype_map[name])
        if not self.master_weights:
            return
        if store_param_remainders:
            self.state[param][MAIN] = torch.zeros_like(param, dtype=torch.int16)
        else:
            self._initialize(param, MAIN, self.name_to_dtype_map[MAIN])
            self.set_scaled_state(param, MAIN, param.clone().detach().float())

    def _initialize(self, param: torch.Tensor, name: str, dtype: torch.dtype) -> None:
        is_fp8 = dtype == torch.uint8
        self.state[param][name] = Float8Tensor(param.shape) if is_fp8 else torch.zeros_like(param, dtype=dtype)
        if dtype != torch.float32:
            self._scales.setdefault(param, {})[name] = torch.ones(1)

    def get_unscaled_state(self, param: torch.Tensor, name: str) -> torch.Tensor:
        kept = self.state[param][name]
        if name == MAIN and self._has_remainders(param):
            return kept
        if kept.dtype == torch.float16 if isinstance(kept, torch.Tensor) else False:
            return kept.float() * self._scales[param][name]
        return kept if isinstance(kept, torch.Tensor) and kept.dtype == torch.float32 else kept.float()

    def set_scaled_state(self, param: torch.Tensor, name: str, unscaled: torch.Tensor) -> None:
        wanted = torch.int16 if name == MAIN and self._has_remainders(param) else torch.float32
        assert unscaled.dtype == wanted
        if name not in self.state[param]:
            if wanted == torch.int16:
                self.state[param][name] = torch.zeros_like(param, dtype=torch.int16)
            else:
                self._initialize(param, name, self.name_to_dtype_map[name])
        kept, dtype = self.state[param][name], self.name_to_dtype_map[name]
        if dtype in RANGES:
            scale = self._scales[param][name]
            low, high = torch.aminmax(unscaled)
            torch.div(torch.maximum(-low, high), torch.tensor([RANGES[dtype]]), out=scale)
            if dtype == torch.uint8:
                kept._quantizer.scale.copy_(1 / scale)
            else:
                # The real one changes its argument, too.
                unscaled.mul_(torch.where(scale > 0, scale.reciprocal(), 0.0))
        kept.copy_(unscaled)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch's makes the state of the parameters' dtype, so the real one sets it anew, too."""
        super().load_state_dict(state_dict)
        both = (state_dict["param_groups"], self.param_groups)
        saved, own = ([each for group in groups for each in group["params"]] for groups in both)
        for number, param in zip(saved, own, strict=True):
            if number in state_dict["state"]:
                self.state[param] = {}
                for name, value in state_dict["state"][number].items():
                    is_remainder = name == MAIN and self._has_remainders(param)
                    self.set_scaled_state(param, name, value if is_remainder else value.float())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if not self.state[param]:
                    self.initialize_state(param, self._has_remainders(param))
                grad = param.decoupled_grad if self.use_decoupled_grad else param.grad
                if grad is not None:
                    self._update(group, param, grad.float())

    def _update(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor) -> None:
        first, second = (self.get_unscaled_state(param, name) for name in ("exp_avg", "exp_avg_sq"))
        (beta1, beta2), step = group["betas"], group["step"]
        first.lerp_(grad, 1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        main = self._main(param)
        size = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
        main.sub_(group["lr"] * (first / (1 - beta1**step) / size + group["weight_decay"] * main))
        self._write(param, main, {"exp_avg": first, "exp_avg_sq": second})

    def _main(self, param: torch.Tensor) -> torch.Tensor:
        if param.dtype == torch.float32 or not self.master_weights:
            return param.data
        if not self._has_remainders(param):
            return self.get_unscaled_state(param, MAIN)
        upper = param.data.view(torch.int16).int() << 16
        return (upper + self.state[param][MAIN].int()).view(torch.float32)

    def _write(self, param: torch.Tensor, main: torch.Tensor, moments: dict[str, torch.Tensor]) -> None:
        if self._has_remainders(param):
            bits = main.view(torch.int32)
            lower = ((bits & 0xFFFF) ^ 0x8000) - 0x8000
            self.state[param][MAIN].copy_(lower)
            param.data.copy_(((bits - lower) >> 16).short().view(torch.bfloat16))
        elif param.dtype != torch.float32:
            param.data.copy_(main)
            if self.master_weights:
                moments = {**moments, MAIN: main}
        for name, values in moments.items():
            if self.name_to_dtype_map[name] != torch.float32:
                self.set_scaled_state(param, name, values)


@contextmanager
def fused_adam() -> Iterator[None]:
    """Lets megatron find the stand-in while it builds an optimizer and its configuration, or saves one itself."""
    if torch.cuda.is_available():
        yield
        return
    from megatron.core import optimizer, utils
    from megatron.core.optimizer import distrib_optimizer

    stand_ins = [
        (optimizer, "Adam", FusedAdam),
        (optimizer, "USING_PYTORCH_OPTIMIZER", False),
        (distrib_optimizer, "Adam", FusedAdam),
        (distrib_optimizer, "HAVE_APEX_OR_TE", True),
        (distrib_optimizer, "USING_TE_OPTIMIZER", True),
    ]
    found = [getattr(module, name, None) for module, name, _ in stand_ins]
    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers")
    modules = {name: sys.modules.get(name) for name in names}
    version = utils.get_te_version
    utils.get_te_version = lambda: Version("2.9.0")
    for module, name, value in stand_ins:
        setattr(module, name, value)
    sys.modules |= {name: ModuleType(name) for name in names}
    sys.modules[names[-1]].FusedAdam = FusedAdam  # type: ignore[attr-defined]
    try:
        yield
    finally:
        utils.get_te_version = version
        for (module, name, _), value in zip(stand_ins, found, strict=True):
            setattr(module, name, value)
        for name, known in modules.items():
            if known is None:
                del sys.modules[name]
            else:
                sys.modules[name] = known
