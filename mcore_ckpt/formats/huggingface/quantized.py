"""Recognizes the quantized tensors of a HuggingFace folder: which stored tensors are codes and which are scales.

Three forms are known, under the names that `quant_method` of `config.json` gives them:

- `fp8`: `X` in float8 and `X_scale_inv`, one scale for each block (DeepSeek-V3, Kimi-K2, MiniMax-M2, Qwen3);
- `mxfp4`: `X_blocks` and `X_scales`, one power of two for each 32 codes of 4 bits (gpt-oss). `X` is stored transposed;
- `compressed-tensors`: `X_packed`, integers of 4 or 8 bits in int32 (Kimi-K2.5), or `X` in float8 or int8; in both
  cases with the scales `X_scale`.

In each form, a value is the value of its code times the scale of its block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import torch

from mcore_ckpt.errors import CheckpointError, CheckpointMismatchError, UnsupportedError
from mcore_ckpt.formats.huggingface.safetensors_files import NAMES, HfStored
from mcore_ckpt.models.config_fields import HfConfig
from mcore_ckpt.models.quantization import quantization_of, stated_dtype
from mcore_ckpt.sharding.regions import Shape

CodeKind = Literal["float8_e4m3fn", "float8_e5m2", "int8", "float4_e2m1", "packed_int4", "packed_int8"]
"""The number format of a code. Packed integers have an offset of half their range, so that code 0 is the lowest
number.
"""

Stored = Mapping[str, HfStored]
Fields = Mapping[str, Any]

_OF_4_BITS = ("float4_e2m1", "packed_int4")
_KINDS: Mapping[torch.dtype, CodeKind] = {
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
    torch.int8: "int8",
}
_PACKED: Mapping[int, CodeKind] = {4: "packed_int4", 8: "packed_int8"}
_MXFP4_BLOCK = 32
DEFAULT_BLOCK = (128, 128)
"""The rows and columns that share a scale in block FP8, unless `config.json` states other numbers."""

_SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8)

# These tensors quantize activations and the cache of keys and values during inference. The weights' values do not
# depend on these tensors.
ACTIVATION_SCALES = (
    *(".input_scale", ".input_zero_point", ".activation_scale"),
    *(".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point"),
)
# Each of these suffixes can follow a quantized tensor's name. The tensors with one of the first three suffixes have the
# codes. The tensor with `_shape` states the shape of packed codes without padding.
_OF_CODES = ("", "_packed", "_blocks", "_shape")
# Suffixes of tensors that some forms of compressed-tensors need in addition to codes and scales. These forms cannot be
# read.
_NOT_READ = ("_zero_point", "_g_idx", "_global_scale", ".bitmask", ".compressed")


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor with values that follow from stored codes and scales.

    Attributes:
        values: the tensor as if its values were stored, with the values' name, shape and dtype, but with the file,
            offset and size of the codes.
        matrix: the rows and columns of one matrix of codes. A tensor can have several matrices, which are stored one
            after the other.
        grid: the rows and columns of the scales of one matrix.
        block: the rows and columns that share a scale.
        is_transposed: True if each matrix of values is the transpose of its matrix of codes.
        computed: the dtype to which the product of code and scale is rounded before it is rounded to the dtype of the
            values. None if the product is rounded only once.
    """

    values: HfStored
    kind: CodeKind
    scales: HfStored
    matrix: tuple[int, int]
    grid: tuple[int, int]
    block: tuple[int, int]
    is_transposed: bool = False
    computed: torch.dtype | None = None

    @property
    def bits(self) -> int:
        """The number of bits of a code."""
        return 4 if self.kind in _OF_4_BITS else 8


def logical_tensors(
    config: HfConfig, stored: Stored, dtype: torch.dtype | None = None
) -> tuple[dict[str, HfStored], dict[str, QuantizedTensor]]:
    """Returns the tensors of a folder as if none of them were quantized, and the quantized tensors.

    Args:
        dtype: the dtype of the values of quantized tensors; None takes the dtype in `config.json`.

    Raises:
        UnsupportedError: the weights are quantized in an unknown form.
        CheckpointMismatchError: codes and scales do not fit together.
    """
    quantization = quantization_of(config)
    if quantization is None:
        return dict(stored), {}
    find = _FINDERS[quantization.method]
    try:
        tensors = tuple(find(stored, quantization.fields, dtype or stated_dtype(config)))
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise UnsupportedError(
            f"config.json: quantization_config does not have the form of {quantization.method}: {error!r}"
        ) from error
    found = {tensor.values.name: tensor for tensor in tensors}
    used = {tensor.scales.name for tensor in found.values()}
    used |= {name + suffix for name in found for suffix in _OF_CODES}
    plain = {
        name: tensor for name, tensor in stored.items() if name not in used and not name.endswith(ACTIVATION_SCALES)
    }
    for tensor in plain.values():
        if tensor.name.endswith(_NOT_READ):
            raise UnsupportedError(
                f"{tensor.path}: tensor {tensor.name}: belongs to a form of {quantization.method} that cannot be read: "
                "dequantize the model first with transformers (from_pretrained, then save_pretrained)"
            )
        if tensor.dtype in _KINDS:
            raise CheckpointMismatchError(
                f"{tensor.path}: tensor {tensor.name}: is stored as {_KINDS[tensor.dtype]}, but the folder has no "
                "scales for it: the download is incomplete, or the scales have an unknown name"
            )
    return plain | {name: tensor.values for name, tensor in found.items()}, found


def _of_8_bits(
    stored: Stored, suffix: str, block: Any, dtype: torch.dtype, equal_parts: bool = False
) -> Iterable[QuantizedTensor]:
    for name, codes in stored.items():
        scales = stored.get(name + suffix)
        if codes.dtype in _KINDS and scales is not None:
            yield _by_blocks(replace(codes, dtype=dtype), _KINDS[codes.dtype], scales, block, equal_parts)


def _find_fp8(stored: Stored, fields: Fields, dtype: torch.dtype) -> Iterable[QuantizedTensor]:
    # If config.json lacks this field, blocks have transformers' default size (FineGrainedFP8Config).
    return _of_8_bits(stored, "_scale_inv", fields.get("weight_block_size", DEFAULT_BLOCK), dtype)


def _find_mxfp4(stored: Stored, fields: Fields, dtype: torch.dtype) -> Iterable[QuantizedTensor]:
    for name, blocks in stored.items():
        base = name.removesuffix("_blocks")
        scales = stored.get(f"{base}_scales")
        if base == name or scales is None or blocks.dtype != torch.uint8:
            continue
        *matrices, rows, groups, nbytes = blocks.shape if len(blocks.shape) > 2 else (0, 0, 0)
        is_fit = 2 * nbytes == _MXFP4_BLOCK and scales.shape == (*matrices, rows, groups)
        if not is_fit or scales.dtype not in (torch.uint8, torch.float8_e8m0fnu):
            raise _not_together(blocks, scales)
        columns = groups * _MXFP4_BLOCK
        values = replace(blocks, name=base, shape=(*matrices, columns, rows), dtype=dtype)
        yield QuantizedTensor(
            values, "float4_e2m1", scales, (rows, columns), (rows, groups), (1, _MXFP4_BLOCK), is_transposed=True
        )


def _find_compressed(stored: Stored, fields: Fields, dtype: torch.dtype) -> Iterable[QuantizedTensor]:
    if fields.get("transform_config"):
        raise UnsupportedError(
            "config.json: quantization_config has a transform_config, but weights that were rotated before "
            "quantization cannot be read"
        )
    groups = [group.get("weights") or {} for group in (fields.get("config_groups") or {}).values()]
    for group in groups:
        if group.get("symmetric") is False or group.get("actorder") not in (None, False, "static", "weight"):
            raise UnsupportedError(
                "config.json: quantization_config has weights with a zero point or in another order (symmetric, "
                "actorder), but only symmetric weights in their own order can be read"
            )
    bits = {group.get("num_bits") for group in groups if group.get("type") == "int"}
    block = next((group["block_structure"] for group in groups if group.get("block_structure")), None)
    # compressed-tensors computes products in the dtype of the scales (`dequantize`, 0.20).
    for tensor in (*_of_8_bits(stored, "_scale", block, dtype, equal_parts=True), *_packed(stored, bits, dtype)):
        yield replace(tensor, computed=None if tensor.scales.dtype == dtype else tensor.scales.dtype)


def _packed(stored: Stored, bits: set[Any], dtype: torch.dtype) -> Iterable[QuantizedTensor]:
    for name, packed in stored.items():
        scales = stored.get(f"{name.removesuffix('_packed')}_scale")
        if not name.endswith("_packed") or scales is None:
            continue
        if packed.dtype != torch.int32 or len(packed.shape) != 2 or len(bits) != 1 or not bits <= {*_PACKED}:
            raise UnsupportedError(
                f"{packed.path}: tensor {name}: has integers of {sorted(map(str, bits))} bits, but only integers of 4 "
                "or 8 bits, packed into int32, can be read"
            )
        width = bits.copy().pop()
        rows, columns = packed.shape[0], packed.shape[1] * 32 // width
        values = replace(packed, name=name.removesuffix("_packed"), shape=(rows, columns), dtype=dtype)
        yield _by_blocks(values, _PACKED[width], scales, None, equal_parts=True)


_Finder = Callable[[Stored, Fields, torch.dtype], Iterable[QuantizedTensor]]
_FINDERS: Mapping[str, _Finder] = {"fp8": _find_fp8, "mxfp4": _find_mxfp4, "compressed-tensors": _find_compressed}


def _by_blocks(values: HfStored, kind: CodeKind, scales: HfStored, block: Any, equal_parts: bool) -> QuantizedTensor:
    """Describes a tensor with one scale for each block.

    The shape of the scales must fit one of three divisions: blocks of the size `block`, which the config states; one
    scale for each matrix; or one scale for each row. With `equal_parts`, the shape may also fit any other division into
    equal blocks.
    """
    if len(values.shape) < 2:
        raise _not_together(values, scales)
    matrices, (rows, columns) = prod(values.shape[:-2]), values.shape[-2:]
    grid = _grid(scales.shape, len(values.shape), matrices)
    if grid is None or 0 in (rows, columns, *grid) or scales.dtype not in _SCALES:
        raise _not_together(values, scales)
    if is_block(block) and grid == (-(-rows // block[0]), -(-columns // block[1])):
        size = min(block[0], rows), min(block[1], columns)
    elif grid in ((1, 1), (rows, 1)) or (equal_parts and rows % grid[0] == columns % grid[1] == 0):
        size = rows // grid[0], columns // grid[1]
    else:
        raise _not_together(values, scales)
    return QuantizedTensor(values, kind, scales, (rows, columns), grid, size)


def _grid(shape: Shape, axes: int, matrices: int) -> tuple[int, int] | None:
    """Returns the rows and columns of the scales of one matrix, or None if scales cannot have this shape."""
    if len(shape) == axes and prod(shape[:-2]) == matrices:
        return shape[-2], shape[-1]
    return (1, 1) if prod(shape) == matrices else None


def is_block(block: Any) -> bool:
    """Returns True if a value of a config is the size of a block: two positive integers."""
    return isinstance(block, (list, tuple)) and len(block) == 2 and all(type(one) is int and one > 0 for one in block)


def _not_together(codes: HfStored, scales: HfStored) -> CheckpointMismatchError:
    return CheckpointMismatchError(
        f"{codes.path}: tensor {codes.name}: has shape {list(codes.shape)}, and its scales {scales.name} are "
        f"{list(scales.shape)} of {NAMES[scales.dtype]}, which does not fit the blocks that quantization_config "
        "states: the folder mixes files of two models, or config.json belongs to another model"
    )
