"""A stand-in for transformer-engine's quantized tensors on a CPU: weights in FP8, MXFP8 and NVFP4.

It keeps what the real ones do (2.9): bytes that DistributedDataParallel maps into its buffers, scales of a tensor or of
blocks that data-parallel ranks agree on, and a second copy of the bytes for the backward pass, which has to be made
anew after each gathering. Whoever reads a weight outside of `computing()` gets an error. So it proves how megatron and
this package treat such weights, and nothing about kernels or formats. On a GPU the real ones are used.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_map

_GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # float4_e2m1fn
RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4")

_is_computing = False


@contextmanager
def computing(models: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Lets a forward and a backward pass read the weights. Then delayed scaling chooses the next scales."""
    global _is_computing
    _is_computing = True
    try:
        yield
    finally:
        _is_computing = False
    for parameter in (each for model in models for each in model.parameters()):
        if isinstance(parameter, QuantizedTensor):
            parameter.memory.choose_next_scale()


class Memory:
    """Bytes and scales of a weight, which all aliases of the tensor share."""

    def __init__(self, shape: torch.Size, block: int | None, packed: bool) -> None:
        self.shape, self.packed = shape, packed
        self.block = block or shape.numel()
        self.largest_code = 6.0 if packed else 448.0
        self.bytes = torch.zeros((*shape[:-1], shape[-1] // 2) if packed else shape, dtype=torch.uint8)
        self.scales = torch.ones(-(-shape.numel() // self.block))
        self.for_backward = self.bytes.clone()
        # With delayed scaling: the next scale, and what the one after it follows from.
        self.history: torch.Tensor | None = None

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """The largest size of each block."""
        padded = torch.zeros(self.scales.numel() * self.block)
        padded[: values.numel()] = values.abs()
        return padded.view(-1, self.block).amax(dim=1)

    def scale_for(self, largest: torch.Tensor) -> None:
        if self.history is None:
            self.scales.copy_(torch.where(largest > 0, largest / self.largest_code, 1.0))
        else:
            self.scales.copy_(self.history[0])
            self.history[1] = largest

    def choose_next_scale(self) -> None:
        if self.history is not None:
            self.history[0] = self.history[1] / self.largest_code

    def write(self, start: int, values: torch.Tensor) -> None:
        """Quantizes the elements from `start` on."""
        blocks = torch.arange(start, start + values.numel()) // self.block
        scaled = values / self.scales[blocks]
        if not self.packed:
            codes = scaled.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
            self.bytes.view(-1)[start : start + values.numel()] = codes
            return
        codes = (scaled.abs()[:, None] - _GRID).abs().argmin(dim=1).to(torch.uint8) + 8 * (scaled < 0).to(torch.uint8)
        every = self._unpacked(self.bytes)
        every[start : start + values.numel()] = codes
        self.bytes.view(-1).copy_(every[0::2] | every[1::2] << 4)

    def values(self) -> torch.Tensor:
        used = self.for_backward.view(-1)
        if self.packed:
            codes = self._unpacked(used)
            plain = _GRID[(codes & 7).long()] * torch.where(codes >= 8, -1.0, 1.0)
        else:
            plain = used.view(torch.float8_e4m3fn).float()
        return (plain * self.scales.repeat_interleave(self.block)[: plain.numel()]).view(self.shape)

    @staticmethod
    def _unpacked(packed: torch.Tensor) -> torch.Tensor:
        pairs = packed.reshape(-1)
        return torch.stack((pairs & 15, pairs >> 4), dim=1).view(-1)


class QuantizedTensor(torch.Tensor):
    memory: Memory

    @staticmethod
    def __new__(cls, memory: Memory, dtype: torch.dtype) -> "QuantizedTensor":
        made = torch.Tensor._make_wrapper_subclass(cls, memory.shape, dtype=dtype, device=memory.bytes.device)  # type: ignore[attr-defined]
        made.memory = memory
        return made  # type: ignore[no-any-return]

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten, first = torch.ops.aten, args[0]
        if func in (aten.detach.default, aten.alias.default):
            return type(first)(first.memory, first.dtype)
        if func is aten.copy_.default and isinstance(first, QuantizedTensor):
            first.quantize(args[1])
            return first
        if func in (aten.view.default, aten.slice.Tensor, aten.expand.default) and not _is_computing:
            # With delayed scaling the optimizer keeps a view of what this rank owns. DistributedDataParallel finds its
            # hooks by `expand_as`.
            return func(torch.empty(first.shape, device="meta"), *args[1:])
        if not _is_computing:
            raise AssertionError(f"{func} reads the bytes of a quantized weight")
        return func(*tree_map(_plain, args), **tree_map(_plain, kwargs or {}))

    def quantize(self, values: torch.Tensor) -> None:
        assert not isinstance(values, QuantizedTensor), "quantized again from quantized values"
        memory = self.memory
        flat = values.to(self.dtype).float().reshape(-1)
        memory.scale_for(memory.largest(flat))
        memory.write(0, flat)
        memory.for_backward = memory.bytes.clone()

    def parts(self) -> dict[str, torch.Tensor]:
        """Copies of all that the tensor consists of."""
        return {name: getattr(self.memory, name).clone() for name in ("bytes", "scales", "for_backward")}

    @property
    def _rowwise_data(self) -> torch.Tensor:
        return self.memory.bytes

    @_rowwise_data.setter
    def _rowwise_data(self, value: torch.Tensor) -> None:
        self.memory.bytes = value


class Float8Tensor(QuantizedTensor): ...


class Float8BlockwiseQTensor(QuantizedTensor): ...


class MXFP8Tensor(QuantizedTensor): ...


class NVFP4Tensor(QuantizedTensor): ...


_KINDS: dict[str, tuple[type[QuantizedTensor], int | None]] = {
    "delayed": (Float8Tensor, None),
    "tensorwise": (Float8Tensor, None),
    "blockwise": (Float8BlockwiseQTensor, 128),
    "mxfp8": (MXFP8Tensor, 32),
    "nvfp4": (NVFP4Tensor, 16),
}


def _plain(value: Any) -> Any:
    return value.memory.values().to(value.dtype) if isinstance(value, QuantizedTensor) else value


def quantize_linears(model: torch.nn.Module, recipe: str) -> None:
    """Quantizes the weights of all linear layers but the output layer, as `fp8_model_init` makes them."""
    for path, module in model.named_modules():
        if type(module).__name__ in ("ColumnParallelLinear", "RowParallelLinear") and "output_layer" not in path:
            _quantize_linear(module, recipe)


def _quantize_linear(module: torch.nn.Module, recipe: str) -> None:
    plain = module.weight
    assert isinstance(plain, torch.nn.Parameter)
    values = plain.detach()
    weight = _real(values, recipe) if torch.cuda.is_available() else _stand_in(values, recipe)
    parameter = torch.nn.Parameter(weight, requires_grad=plain.requires_grad)
    for name, value in vars(plain).items():
        setattr(parameter, name, value)
    # As preserve_high_precision_init_val=True makes them.
    parameter.get_high_precision_init_val = values.clone  # type: ignore[attr-defined]
    parameter.clear_high_precision_init_val = lambda: None  # type: ignore[attr-defined]
    module.weight = parameter
    if recipe == "delayed" and not torch.cuda.is_available():
        _keep_history(module, weight.memory)


def _stand_in(values: torch.Tensor, recipe: str) -> QuantizedTensor:
    _install()
    kind, block = _KINDS[recipe]
    tensor = kind(Memory(values.shape, block, packed=recipe == "nvfp4"), values.dtype)
    if recipe == "delayed":
        largest = values.float().abs().max()
        tensor.memory.history = torch.stack((largest / tensor.memory.largest_code, largest))
    tensor.quantize(values)
    return tensor


def _keep_history(module: Any, memory: Memory) -> None:
    """Puts the history into the module's `_extra_state`, as transformer-engine does."""

    def restore(state: torch.Tensor) -> None:
        memory.history = state.clone().view(torch.float32)

    def history() -> torch.Tensor:
        assert memory.history is not None
        return memory.history.clone().view(torch.uint8)

    module.get_extra_state, module.set_extra_state = history, restore


def _real(values: torch.Tensor, recipe: str) -> Any:
    """A quantized tensor of transformer-engine (2.9). MXFP8 and NVFP4 need a Blackwell GPU."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor import float8_blockwise_tensor, float8_tensor, mxfp8_tensor

    code = tex.DType.kFloat8E4M3
    if recipe == "tensorwise":
        return float8_tensor.Float8CurrentScalingQuantizer(code, values.device)(values)
    if recipe == "blockwise":
        return float8_blockwise_tensor.Float8BlockQuantizer(code, rowwise=True, columnwise=True)(values)
    if recipe == "mxfp8":
        return mxfp8_tensor.MXFP8Quantizer(code)(values)
    scale, largest = torch.ones(1, device=values.device), torch.zeros(1, device=values.device)
    return float8_tensor.Float8Quantizer(scale, largest, code)(values)


# -- what megatron calls transformer-engine for ------------------------------------------------------------


def _install() -> None:
    """Lets megatron recognize the stand-ins, and call what is below, for the rest of the process."""
    from megatron.core import fp8_utils
    from megatron.core.distributed import param_and_grad_buffer

    module: Any = fp8_utils
    module.HAVE_TE_FP8_TENSOR_CLASS, module.FP8_TENSOR_CLASS = True, QuantizedTensor
    module.HAVE_TE_MXFP8TENSOR, module.MXFP8Tensor = True, MXFP8Tensor
    module._modify_underlying_storage_impl = _map_bytes
    module._quantize_param_shard_impl = _cast_mains
    module.te_post_all_gather_processing = _finish_gathering
    param_and_grad_buffer._coalescing_manager = _by_dtype  # type: ignore[attr-defined]
    try:
        from megatron.core import fp4_utils
        from megatron.core.optimizer import distrib_optimizer
    except ImportError:
        return
    four: Any = fp4_utils
    four.HAVE_TE_FP4_TENSOR_CLASS, four.FP4_TENSOR_CLASS = True, NVFP4Tensor
    distrib_optimizer.quantize_nvfp4_param_shard = _cast_mains


@contextmanager
def _by_dtype(group: torch.distributed.ProcessGroup, async_ops: bool = False) -> Iterator[Any]:
    """Gathers tensors of several dtypes one by one. gloo (torch 2.13) takes them for tensors of the first one's."""
    apart: list[Any] = []
    with distributed_c10d._coalescing_manager(group, async_ops=async_ops) as manager:
        yield manager
        together = distributed_c10d._world.pg_coalesce_state[group]
        if len({operation.tensor.dtype for operation in together}) > 1:
            apart = together[:]
            together.clear()
    for operation in apart:
        torch.distributed.all_gather_into_tensor(operation.dst_tensor, operation.tensor, group=group)


def _map_bytes(tensor: Any, memory: torch.Tensor) -> None:
    memory.detach().copy_(tensor.memory.bytes)
    tensor.memory.bytes = memory


def _cast_mains(
    parameters: Sequence[Any],
    mains: Sequence[torch.Tensor | None],
    starts: Sequence[int],
    group: torch.distributed.ProcessGroup,
    *more: Any,
) -> None:
    """As `cast_master_weights_to_fp8`: all ranks agree on the scales, and each quantizes what it owns."""
    for parameter, main, start in zip(parameters, mains, starts, strict=True):
        memory: Memory = parameter.memory
        every = torch.zeros(memory.shape.numel())
        values = None if main is None else main.detach().to(parameter.dtype).float()
        if values is not None:
            every[start : start + values.numel()] = values
        largest = memory.largest(every)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group)
        memory.scale_for(largest)
        if values is not None:
            memory.write(start, values)


def _finish_gathering(parameters: Sequence[Any]) -> None:
    for parameter in parameters:
        parameter.memory.for_backward = parameter.memory.bytes.clone()
